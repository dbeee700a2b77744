"""Fabric's strategies with a level: its plugin in Fabric, sharded models, clipping, checkpoints.

Fabric calls no hook of a Precision plugin when it sets up a module's wrapper or an optimizer, and saves nothing of the
plugin. So a few methods of Fabric's strategies are wrapped. Strategies without a level keep their own behaviour.
"""

from __future__ import annotations

from functools import partial, wraps
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAFSDPStrategy,
    XLAStrategy,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.checkpoint.sharded_folder import restore
from nemo_lowprec.checkpoint.torch_zip import load
from nemo_lowprec.compat.distributed import fsdp_units
from nemo_lowprec.engine import Engine, mixed_precision_policy
from nemo_lowprec.plugins.checkpoint_io import AtomicFileIO, writing_together
from nemo_lowprec.plugins.fabric import FabricPrecision
from nemo_lowprec.plugins.precision import LowPrecision
from nemo_lowprec.strategies.fabric_checkpoint import OWN, load_sharded, loaded, save_sharded
from nemo_lowprec.strategies.shard import (
    blocks_of,
    mesh_of_units,
    refuse_second_derivatives,
    sharding_over,
    take_over_units,
)


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A ``parallelize_fn`` for Fabric's ``ModelParallelStrategy``: FSDP2 units of the repeated blocks, and of the rest.

    ::

        ModelParallelStrategy(nemo_lowprec.shard_blocks, data_parallel_size=8, tensor_parallel_size=1)

    Args:
        model: the model, changed in place.
        mesh: Fabric's, whose dimension ``data_parallel`` shards the parameters.

    Returns:
        ``model``.
    """
    for unit in [*blocks_of(model), model]:
        fully_shard(unit, mesh=mesh["data_parallel"], reshard_after_forward=unit is not model)
    return model


class ShardedFabricPrecision(FabricPrecision):
    """A level for models that FSDP2 has sharded: converts a model after the strategy's ``parallelize_fn``."""

    trains_with = (ModelParallelStrategy,)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def set_up(self, module: nn.Module, wrap: Any) -> nn.Module:
        module = wrap(module)
        mesh = mesh_of_units(module)
        if mesh is None:
            raise ValueError(
                "parallelize_fn has called fully_shard for no module. Call it for the blocks and then for the model, "
                "or pass parallelize_fn=nemo_lowprec.shard_blocks."
            )
        self.check_processes(module)
        engine = Engine(self.options)
        engine.sharding = sharding_over(mesh, frees_weights=True)
        self.convert(module, engine)
        take_over_units(module, mixed_precision_policy(self.level))
        refuse_second_derivatives(module)
        module.register_forward_pre_hook(lambda *_: engine.columns.weights.meet_root())
        engine.settle()
        units = [unit for _, unit in fsdp_units(module)]
        self.begin(module, engine, lambda: any(unit.reduces_gradients for unit in units))
        return module


def in_fabric(plugin: LowPrecision, strategy: Strategy) -> FabricPrecision:
    """The level of ``plugin`` as a Precision plugin of Fabric's."""
    kind = ShardedFabricPrecision if isinstance(strategy, ModelParallelStrategy) else FabricPrecision
    return kind(plugin.parsed, strategy)


def _take_levels(kind: type[Strategy]) -> None:
    """Make the property ``precision`` of ``kind`` accept the plugin of a level."""
    plain: Any = kind.precision

    def give(strategy: Strategy, precision: Any) -> None:
        if isinstance(precision, LowPrecision):
            precision = in_fabric(precision, strategy)
            if not isinstance(strategy, ModelParallelStrategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
                strategy.checkpoint_io = AtomicFileIO()
        plain.fset(strategy, precision)

    kind.precision = plain.setter(give)  # type: ignore[method-assign]


for _kind in (Strategy, FSDPStrategy, XLAStrategy, XLAFSDPStrategy, SingleDeviceXLAStrategy):
    _take_levels(_kind)


def _set_up_modules(kind: type[Strategy]) -> None:
    plain = kind.setup_module

    @wraps(plain)
    def setup_module(self: Strategy, module: nn.Module) -> nn.Module:
        wrap = partial(plain, self)
        return self.precision.set_up(module, wrap) if isinstance(self.precision, FabricPrecision) else wrap(module)

    kind.setup_module = setup_module  # type: ignore[method-assign]


for _wrapping in (Strategy, DDPStrategy, ModelParallelStrategy):
    _set_up_modules(_wrapping)

_setup_optimizer, _clip_gradients_norm = Strategy.setup_optimizer, Strategy.clip_gradients_norm


@wraps(_setup_optimizer)
def _attach(self: Strategy, optimizer: Optimizer) -> Optimizer:
    if isinstance(self.precision, FabricPrecision):
        self.precision.attach(optimizer)
    return _setup_optimizer(self, optimizer)


@wraps(_clip_gradients_norm)
def _clip(
    self: Strategy,
    module: nn.Module,
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
) -> Tensor:
    if isinstance(self.precision, FabricPrecision):
        return self.precision.clip_norm(optimizer, max_norm, norm_type, error_if_nonfinite)
    return _clip_gradients_norm(self, module, optimizer, max_norm, norm_type, error_if_nonfinite)


Strategy.setup_optimizer = _attach  # type: ignore[method-assign]
Strategy.clip_gradients_norm = _clip  # type: ignore[method-assign]

# Checkpoints

_SAVED = (nn.Module, Optimizer)
_save, _load = Strategy.save_checkpoint, Strategy.load_checkpoint


@wraps(_save)
def _save_whole(self: Strategy, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    # A state of tensors alone may be a ``state_dict`` that is loaded with ``strict=True``.
    if not isinstance(self.precision, FabricPrecision) or not any(isinstance(v, _SAVED) for v in state.values()):
        _save(self, path, state, *args, **kwargs)
        return
    with writing_together(self):
        _save(self, path, {**state, OWN: self.precision.state_of(state)}, *args, **kwargs)


@wraps(_load)
def _load_whole(self: Strategy, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    rest = _load(self, path, state, *args, **kwargs)
    if state and isinstance(self.precision, FabricPrecision):
        loaded(self, state, rest.pop(OWN, None))
    return rest


_save_parts, _load_parts = ModelParallelStrategy.save_checkpoint, ModelParallelStrategy.load_checkpoint


@wraps(_save_parts)
def _save_shards(
    self: ModelParallelStrategy,
    path: Any,
    state: dict[str, Any],
    storage_options: Any | None = None,
    filter: dict[str, Any] | None = None,
) -> None:
    if not isinstance(self.precision, FabricPrecision) or storage_options is not None:  # refused by Fabric
        _save_parts(self, path, state, storage_options, filter)
        return
    save_sharded(self, Path(self.broadcast(path)), state, filter)


@wraps(_load_parts)
def _load_shards(
    self: ModelParallelStrategy, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
) -> dict[str, Any]:
    if not isinstance(self.precision, FabricPrecision) or not state or isinstance(state, Optimizer):
        return _load_parts(self, path, state, strict, weights_only)
    if weights_only is False:
        raise ValueError(f"{self.precision.level.name} runs no code of a checkpoint. Leave weights_only=False out.")
    path = Path(self.broadcast(path))
    if isinstance(state, nn.Module):
        restore({"state_dict": load(path)}, state, [], strict)
        loaded(self, state, None)
        return {}
    return load_sharded(self, path, state, strict)


Strategy.save_checkpoint = _save_whole  # type: ignore[method-assign]
Strategy.load_checkpoint = _load_whole  # type: ignore[method-assign]
ModelParallelStrategy.save_checkpoint = _save_shards  # type: ignore[method-assign]
ModelParallelStrategy.load_checkpoint = _load_shards  # type: ignore[method-assign]
