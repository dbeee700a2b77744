"""``strategy="lowprec_sharded"``: weights, masters, gradients and optimizer states sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.arguments import checked
from nemo_lowprec.checkpoint.background import BackgroundWriter
from nemo_lowprec.checkpoint.partial_gradients import partial_gradients
from nemo_lowprec.checkpoint.sharded_folder import begin_sharded, in_full, is_folder, read_folder, restore
from nemo_lowprec.checkpoint.writing import remove
from nemo_lowprec.comm import check_same, raise_together
from nemo_lowprec.compat.distributed import set_timeout
from nemo_lowprec.compat.lightning import materialize, optimizers_to_device, trainer_of
from nemo_lowprec.engine import mixed_precision_policy
from nemo_lowprec.plugins.agreement import meet_at_start
from nemo_lowprec.plugins.precision import LowPrecision
from nemo_lowprec.strategies.agreed import AgreesOnResume
from nemo_lowprec.strategies.materialize import obstacle
from nemo_lowprec.strategies.root import gather_around_steps
from nemo_lowprec.strategies.shard import (
    mesh_of_units,
    refuse_second_derivatives,
    shard_model,
    sharding_over,
    take_over_units,
)

_CUT_WITH = "_lowprec_cut_with"  # attribute of a sharded model: (shard_size, reshard_after_forward)


class LowPrecisionShardedStrategy(AgreesOnResume, ModelParallelStrategy):
    """Each process holds some rows of every parameter, with their masters and optimizer states.

    Weights are gathered in the level's format for each block's forward and backward. Gradients are reduced onto their
    shards in the format of the column Comm. Each of the model's repeated blocks is a unit of its own; a model that was
    sharded in ``configure_model`` keeps its units. A model that is too large for each process's memory is made within
    ``init_on_first_process``, or on torch's meta device by modules that have a ``reset_parameters``.

    Args:
        reshard_after_forward: whether weights are freed between forward and backward (ZeRO-3), or kept (ZeRO-2).
        shard_size: processes that hold one copy of the model among them, for hybrid sharding; None for all.
        async_checkpoints: whether checkpoints are written while training goes on, from copies in the CPU's memory.
        save_distributed_checkpoint: whether every process writes its part of a checkpoint folder, or rank 0 one file.
        options: options of Lightning's ``ModelParallelStrategy``: ``process_group_backend``, ``timeout``.

    Raises:
        ValueError: ``shard_size`` does not divide the number of processes; ``async_checkpoints`` of one file.
    """

    strategy_name = "lowprec_sharded"

    @partial(checked, also=ModelParallelStrategy.__init__)
    def __init__(
        self,
        reshard_after_forward: bool = True,
        shard_size: int | None = None,
        async_checkpoints: bool = False,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if options.pop(name, "auto") != "auto":  # LightningCLI passes Lightning's defaults
                raise TypeError(f"lowprec_sharded shards over all processes, or over shard_size. Leave {name} out.")
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **options)
        if async_checkpoints and not save_distributed_checkpoint:
            raise ValueError(
                "async_checkpoints=True writes folders. Leave save_distributed_checkpoint=False out, or give the "
                "Trainer Lightning's AsyncCheckpointIO."
            )
        self._async = async_checkpoints
        self._writer: BackgroundWriter | None = None
        self._reshard = reshard_after_forward
        self._shard_size = shard_size
        self.require_backward_grad_sync = True

    @contextmanager
    def init_on_first_process(self) -> Generator[None, None, None]:
        """For ``configure_model``: the first process makes the weights, and sends them to the others block by block.

        The others make their models on torch's meta device, so that a machine holds at most one copy of the model in
        its CPU's memory, whatever the number of its GPUs::

            def configure_model(self):
                with self.trainer.strategy.init_on_first_process():
                    self.model = MyModel()
        """
        with nullcontext() if self.is_global_zero else torch.device("meta"):
            yield

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def agreement(self) -> dict[str, Any]:
        """Settings that must be the same on all processes."""
        return {
            "reshard_after_forward": self._reshard,
            "shard_size": self._shard_size,
            "async_checkpoints": self._async,
            "save_distributed_checkpoint": self._save_distributed_checkpoint,
        }

    @override
    def _setup_distributed(self) -> None:
        made_group = not dist.is_initialized()
        super()._setup_distributed()
        meet_at_start(self, made_group)  # before the groups of a mesh are made

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        plugin = self.precision_plugin
        if not isinstance(plugin, LowPrecision):
            raise ValueError("lowprec_sharded needs a level of nemo_lowprec among the Trainer's plugins.")
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        policy, own = mixed_precision_policy(plugin.level), mesh_of_units(self.model)
        if own is not None:
            self._take_over(self.model)
        mesh = own or self._mesh()
        if self._timeout is not None:  # a mesh makes groups with torch's default
            set_timeout((group for group in mesh.get_all_groups() if group is not dist.group.WORLD), self._timeout)
        plugin.engine.sharding = sharding_over(mesh, self._reshard)
        problem: ValueError | None
        try:
            self.model = plugin.convert_module(self.model)
            problem = obstacle(self.model, self.is_global_zero)
        except ValueError as error:  # perhaps about a weight's value, which only the first process has
            problem = error
        raise_together(problem)
        if own is not None:
            take_over_units(self.model, policy)
        else:
            shard_model(self.model, mesh, self.root_device, policy, self._reshard)
            self.model.__dict__[_CUT_WITH] = self._shard_size, self._reshard
        refuse_second_derivatives(self.model)
        gather_around_steps(self.model, plugin.undo)
        self.model_to_device()
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            optimizers_to_device(self.optimizers, self.root_device)

    def _take_over(self, model: nn.Module) -> None:
        """Give memory to the parameters on the meta device of a model that the user has sharded.

        Raises:
            ValueError: on all processes, for an option without effect, or a tensor that cannot get values.
        """
        if (self._shard_size, self._reshard) != model.__dict__.get(_CUT_WITH, (None, True)):
            raise ValueError(
                "This model is sharded already: other shard_size and reshard_after_forward than it was sharded with "
                "have no effect. Where you call fully_shard, give them to it, and leave them out here."
            )
        there = "on the meta device" if any(p.is_meta for p in model.parameters()) else "with values"
        check_same({"where a model that fully_shard cuts is made (without init_on_first_process)": there})
        raise_together(obstacle(model, initializes=True))
        materialize(model, self.root_device)

    def _mesh(self) -> Any:
        world, size = self.world_size, self._shard_size or self.world_size
        if world % size:
            raise ValueError(f"shard_size={size!r} must divide the number of processes, {world}.")
        if size == world:
            return self.device_mesh["data_parallel"]
        shape, names = (world // size, size), ("replicate", "shard")
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert isinstance(self.model, FSDPModule)
        self.require_backward_grad_sync = False
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.require_backward_grad_sync = True
            self.model.set_requires_gradient_sync(True)

    @override
    def teardown(self) -> None:
        for module in self.model.modules() if self.model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves weights gathered
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        finally:
            super().teardown()

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        state = self.model.state_dict()
        return state if self._save_distributed_checkpoint else in_full(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = Strategy.optimizer_state(self, optimizer)
        return state if self._save_distributed_checkpoint else in_full(state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        path = Path(self.broadcast(filepath))
        if self._save_distributed_checkpoint and self._async:
            if self._writer is None:
                self._writer = BackgroundWriter(self._timeout)
            self._writer.write(checkpoint, path)
            module = self.lightning_module
            if module is None or trainer_of(module) is None or not module.trainer.training:
                self._writer.wait()  # outside of training no later call waits
        elif self._save_distributed_checkpoint:
            begin_sharded(checkpoint, path)()
        elif self.broadcast(path.is_dir()):
            raise IsADirectoryError(f"{path} is a folder, and a checkpoint in one file is to be written there.")
        else:
            gradients = partial_gradients(checkpoint)
            gradients.update(in_full(gradients))
            Strategy.save_checkpoint(self, checkpoint, path, storage_options)  # as ``plugins.checkpoint_io`` wraps it

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        path = Path(filepath)
        if not self.is_global_zero:
            return
        if not path.is_dir():
            self.checkpoint_io.remove_checkpoint(path)
        elif self._writer is not None:
            self._writer.remove(path)
        else:
            remove(path)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.wait()
        path = self.agreed_path(checkpoint_path)
        assert self.model is not None and self.lightning_module is not None
        engine = self.precision_plugin.engine  # type: ignore[attr-defined]
        if is_folder(path):
            checkpoint = read_folder(path, self.model, self.optimizers)
        elif path.is_file():
            checkpoint = Strategy.load_checkpoint(self, path, weights_only=weights_only)
        else:
            raise ValueError(f"{path} is neither a complete sharded checkpoint nor a file.")
        restore(checkpoint, self.model, self.optimizers, self.lightning_module.strict_loading)
        engine.columns.weights.were_written()  # Lightning loads the plugin's state of the weights next
        return checkpoint
