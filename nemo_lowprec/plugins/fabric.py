"""The levels in Lightning Fabric: ``Fabric(plugins=bf16_with_fp8_mixed())``.

Fabric has a Precision plugin of its own, whose methods have other signatures than those of the Trainer's. Where a
strategy of Fabric is given a ``LowPrecision``, it gets the ``FabricPrecision`` of the same level.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import lightning.pytorch as pl
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.chart.options import Options
from nemo_lowprec.comm import check_same, leave_to_ddp, take_from_ddp
from nemo_lowprec.compute.half_layers import widened
from nemo_lowprec.engine import Engine
from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.loops.prepare import say_what_is_converted
from nemo_lowprec.optim import needs_closure
from nemo_lowprec.plugins.processes import leaves_ddp, parameters_digest, versions
from nemo_lowprec.plugins.replaced import replace_attribute

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")  # of a LightningModule, called in Fabric


class FabricPrecision(Precision):
    """A level of the chart in Lightning Fabric, with an engine for each model that is set up.

    The forward pass runs under autocast to the level's half format and returns FP32, as with Fabric's own mixed
    precision. ``fabric.backward`` scales the loss where the level scales it, and averages gradients in the level's
    format. A step with a gradient that is not finite is skipped.

    Args:
        options: the level and its arguments.
        strategy: the strategy that gets the plugin.

    Raises:
        ValueError: the strategy does not train at levels of the chart.
    """

    trains_with: tuple[type[Strategy], ...] = (SingleDeviceStrategy, DDPStrategy)

    def __init__(self, options: Options, strategy: Strategy) -> None:
        self.options, self.level = options, options.level
        self.precision = options.level.name  # type: ignore[assignment]
        self.strategy = strategy
        self._models: list[tuple[ref[Engine], Callable[[], bool]]] = []
        self._undo = ExitStack()
        self._in_forward = False
        if not isinstance(strategy, self.trains_with) or isinstance(strategy, DeepSpeedStrategy):  # a DDPStrategy
            raise ValueError(
                f"{self.level.name} does not train with Fabric's {type(strategy).__name__}. Use one device, "
                "strategy='ddp', or Fabric's ModelParallelStrategy with parallelize_fn=nemo_lowprec.shard_blocks."
            )

    # Models

    @property
    def engines(self) -> list[Engine]:
        """The engines of the models that were set up, in that order."""
        return [engine for made, _ in self._models if (engine := made()) is not None]

    def engine_of(self, optimizer: Optimizer) -> Engine:
        """The engine whose model's parameters ``optimizer`` holds.

        Raises:
            ValueError: the parameters are of no model that was set up, or of several.
        """
        for engine in self.engines:
            if optimizer in engine.optimizers:
                return engine
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [e for e in self.engines if e.model is not None and any(id(p) in held for p in e.model.parameters())]
        if len(found) != 1:
            raise ValueError(
                f"This {type(optimizer).__name__} holds parameters of {len(found)} models that Fabric has set up, and "
                "must hold those of one. Set the model up first, and make its optimizer from the model's parameters; "
                "with ModelParallelStrategy after fabric.setup_module, which replaces the parameters."
            )
        return found[0]

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self.convert(module, Engine(self.options))
        return module

    def convert(self, module: nn.Module, engine: Engine) -> None:
        """Convert ``module`` in place by ``engine``.

        Raises:
            ValueError: the level cannot store a parameter, or scales the loss, and another model was set up.
        """
        if self.options.loss_scale is not None and self.engines:
            raise ValueError(
                f"{self.level.name} scales the loss of one model. Set up one module that holds all models, make a "
                "Fabric for each model, or use a bf16 level."
            )
        engine.convert(module, self.strategy.root_device)
        self._models.append((ref(engine), lambda: True))

    def set_up(self, module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """``wrap(module)``, which is ``setup_module`` of the strategy, and the engine made ready for the first step.

        Raises:
            ValueError: the model is on another device than Fabric's; or processes have other models or versions.
        """
        engine = Engine.of(module)
        assert engine is not None and engine.model is module
        self.check_device(module)
        if not isinstance(self.strategy, DDPStrategy):
            engine.settle()
            self.begin(module, engine)
            return wrap(module)
        self.check_processes(module)
        engine.columns.comm.check_averaging()
        replaces = leaves_ddp(self.level)
        if replaces:
            leave_to_ddp(module)
        ddp: Any = wrap(module)
        assert isinstance(ddp, DistributedDataParallel)
        if replaces:
            take_from_ddp(ddp)
        engine.settle()
        if replaces:
            engine.columns.comm.average_over(ddp.process_group, ddp.bucket_bytes_cap)
            engine.broadcast()
        else:
            engine.columns.comm.share_amaxes(ddp.process_group)
        self.begin(module, engine, partial(_synchronizes, ref(ddp)))
        return ddp

    def begin(self, module: nn.Module, engine: Engine, synchronizes: Callable[[], bool] = lambda: True) -> None:
        """Note how backward passes of ``module`` are synchronized, and log the table of layers."""
        self._models = [(made, synchronizes if made() is engine else other) for made, other in self._models]
        if isinstance(module, pl.LightningModule):  # on one device Fabric calls its steps outside of any context
            for name in _STEPS:
                replace_attribute(self._undo, module, name, self._in_context(getattr(module, name)))
        say_what_is_converted(engine)
        engine.columns.computation.when_decided = partial(say_what_is_converted, engine)

    def check_device(self, module: nn.Module) -> None:
        """Raise ValueError where ``module`` is not on the device of this process."""
        device = next((p.device for p in module.parameters()), self.strategy.root_device)
        if device != self.strategy.root_device:
            raise ValueError(
                f"The model is on {device}, and Fabric's device is {self.strategy.root_device}. Leave "
                "move_to_device=False out, or move the model there before it is set up."
            )

    def check_processes(self, module: nn.Module) -> None:
        """Raise ValueError where processes have other levels, models or versions of the packages."""
        facts = {"the level": f"{self.level.name}({self.options.given})", **versions()}
        check_same({**facts, "the model's parameters": parameters_digest(module)})

    def _in_context(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._in_forward else self.forward_context():
                return step(*args, **kwargs)

        return run

    def attach(self, optimizer: Optimizer) -> None:
        """Give ``optimizer`` its masters or its low-bit states.

        Raises:
            ValueError: ``optimizer`` has no low-bit form, or holds the parameters of no model or of several.
        """
        self.engine_of(optimizer).attach(optimizer)

    # Passes

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.forward_context())
            before, self._in_forward = self._in_forward, True
            try:
                yield
            finally:
                self._in_forward = before

    @override
    def convert_output(self, data: Any) -> Any:
        return widened(data)

    @override
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            for made, synchronizes in self._models:
                engine = made()
                if engine is not None:
                    tensor = engine.step.scale(tensor)
                    stack.enter_context(engine.backward_context(synchronizes()))
            tensor.backward(*args, **kwargs)

    # Steps

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        engine = self.engine_of(optimizer)
        engine.attach(optimizer)
        if closure is None:
            return engine.step.run(optimizer, **kwargs)
        if needs_closure(optimizer):
            return engine.step.run_with_closure(optimizer, closure, **kwargs)
        result = closure()
        engine.step.run(optimizer, **kwargs)
        return result

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Make the gradients true gradients, before Fabric clips by value, which would hide infinities.

        Raises:
            ValueError: ``gradient_release`` has stepped the parameters already.
        """
        if self.options.low_bit.gradient_release:
            raise ValueError(
                "gradient_release=True has stepped each parameter before all gradients are there to be clipped. "
                "Leave one of them out."
            )
        self.engine_of(optimizer).step.check_finite(optimizer)

    def clip_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients of ``optimizer`` down to ``max_norm``.

        Returns:
            the norm of the true gradients before clipping, FP32 scalar, over all shards.

        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``. Else the step is skipped.
        """
        step = self.engine_of(optimizer).step
        step.check_finite(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_grad_norm_(params, max_norm, float(norm_type), error_if_nonfinite)

    # State

    def engines_in(self, state: Mapping[str, Any]) -> dict[str, list[Engine]]:
        """The engines of the models and optimizers in ``state``, each once; those of modules by the modules' keys."""
        found, left = {}, self.engines
        for name in sorted(state, key=lambda name: (isinstance(state[name], Optimizer), str(name))):
            found[name] = [engine for engine in left if _is_of(state[name], engine)]
            left = [engine for engine in left if engine not in found[name]]
        return found

    def state_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Histories and loss scales of the models in ``state``, by their keys in ``state``."""
        found = self.engines_in(state)
        return {"models": {name: [e.state_dict() for e in engines] for name, engines in found.items() if engines}}

    def load_state_of(self, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Give the models in ``state`` what ``state_of`` has saved by the same keys."""
        for name, engines in self.engines_in(state).items():
            for engine, own in zip(engines, saved["models"].get(name, ()), strict=False):
                engine.load_state_dict(own)

    @override
    def teardown(self) -> None:
        for engine in self.engines:
            engine.step.settle()
            engine.revert()
        self._undo.close()
        self._models.clear()


def _is_of(value: Any, engine: Engine) -> bool:
    """Whether ``value`` holds the model of ``engine``, is a part of it, or an optimizer of it."""
    if isinstance(value, nn.Module) and engine.model is not None:
        return not {*value.modules()}.isdisjoint(engine.model.modules())
    return isinstance(value, Optimizer) and value in engine.optimizers


def _synchronizes(made: ref[Any]) -> bool:
    ddp = made()
    return ddp is None or ddp.require_backward_grad_sync
