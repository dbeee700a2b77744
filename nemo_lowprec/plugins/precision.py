"""The Lightning precision plugin: a level's engine behind Lightning's hooks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.chart import PrecisionLevel, get_level, preset_of
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.comm import give_back_to_ddp
from nemo_lowprec.compat.lightning import trainer_of
from nemo_lowprec.engine import DTYPES, Engine, Step
from nemo_lowprec.megatron import MegatronSettings, resolve
from nemo_lowprec.megatron.nemo import dtype_config
from nemo_lowprec.optim import needs_closure
from nemo_lowprec.plugins import agreement, nemo, processes
from nemo_lowprec.plugins.averaging import average_exactly
from nemo_lowprec.plugins.checkpoint_io import AtomicCheckpointIO
from nemo_lowprec.plugins.logged import LevelLog
from nemo_lowprec.plugins.manual import ManualPasses
from nemo_lowprec.plugins.old_gradients import zero_before_forward
from nemo_lowprec.plugins.resume import ResumeState
from nemo_lowprec.plugins.schedulers import StepwiseSchedulers
from nemo_lowprec.plugins.signals import StopTogether
from nemo_lowprec.plugins.summary import print_summary, summarize_true_size


class LowPrecision(nemo.SavedByNemo, Precision):
    """A level of the precision chart as a plugin of ``lightning.pytorch.Trainer``.

    Args:
        level: a level's name, or an alias (``chart.ALIASES``); each is also a function, ``nemo_lowprec.bf16_mixed()``
            for example. Or a row of your own, ``dataclasses.replace(CHART["bf16_mixed"], name="mine", comm="bf16")``.
        options: the level's arguments.

    Raises:
        ValueError: the level is unknown, the row has no implementation, or an argument has a bad value.
        TypeError: the level does not take an argument.

    Attributes:
        engine: converts and trains the model.
        log: writes to the Trainer's loggers.
        undo: puts back, at teardown, the attributes of other objects that a run has replaced.
    """

    own_checkpoint_io = AtomicCheckpointIO  # read by checkpoint_io.py
    meets_at_start = True  # read by agreement.py

    def __init__(self, level: str | PrecisionLevel, **options: Any) -> None:
        options = preset_of(level) | options
        self.parsed = parsed = parse_options(get_level(level), options)
        row = self.level = parsed.level
        self.options = options
        self.precision = row.name  # type: ignore[assignment]
        self.engine = Engine(parsed)
        self._resume = ResumeState()
        self.log = LevelLog()
        self.undo = ExitStack()
        self._module: pl.LightningModule | None = None
        self._signals: StopTogether | None = None
        self._manual: ManualPasses | None = None
        self._compared = False  # whether the numbers of batches of this training were compared over the processes

    def __repr__(self) -> str:
        return f"{self.level.name}({self.parsed.given})"

    @property
    def dtype(self) -> torch.dtype:
        """The half dtype that the forward pass runs in."""
        return DTYPES[self.level.autocast]

    def megatron(self, own_layers: bool = False) -> MegatronSettings:
        """The level's settings of Megatron-core; see ``nemo_lowprec.megatron.resolve``."""
        return resolve(self.parsed, own_layers)

    @property
    def dtype_config(self) -> Any:
        """The fields that NeMo's MegatronStrategy copies onto its configs; see ``nemo_lowprec.megatron.nemo``.

        Raises:
            ValueError: NeMo's strategy cannot train the level, or cannot follow an argument.
        """
        return dtype_config(self.parsed)

    # Setting up

    def follow(
        self,
        module: pl.LightningModule,
        step: Step,
        lr_schedulers: list[Any],
        place: str = "precision_plugin.engine.step",
    ) -> None:
        """Save, restore and log the run of ``module``; MegatronStrategy, which calls no hooks, calls it too.

        Args:
            place: where ``step`` is in the Trainer, for messages.
        """
        self._module = module
        StepwiseSchedulers(module, step, lr_schedulers, self.undo)
        self.log.begin(module, step, place, self.level.name, self.parsed.given, self.undo)

    def before_step(self) -> None:
        """Compare batches and restore an unfinished step, before a training step; MegatronStrategy calls it too."""
        if not self._compared and self._module is not None and trainer_of(self._module) is not None:
            self._compared = True
            agreement.check_batches(self._module.trainer)
        restored = self._resume.before_first_step(self.engine, self._module)
        if restored and self._manual is not None:
            self._manual.take_restored(restored)

    def stop_together(self, trainer: pl.Trainer, evaluates_in_step: bool, between_steps: bool = False) -> None:
        """Have the processes of ``trainer`` end or requeue together at a signal, until ``teardown``."""
        several = trainer.world_size > 1
        self._signals = StopTogether(trainer, self.undo, evaluates_in_step, between_steps) if several else None
        self._compared = False

    def before_evaluation_step(self) -> None:
        """Compare batches and act on signals, before each step of an evaluation."""
        if self._signals is not None:
            if self._signals.evaluates_in_step:
                agreement.check_evaluation(self._signals.trainer)
            self._signals.before_evaluation_step()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer = trainer_of(module)
        if trainer is None:
            self.engine.convert(module, next((p.device for p in module.parameters()), torch.device("cpu")))
            return module
        strategy = trainer.strategy
        if nemo.runs(strategy):
            return nemo.take_over(strategy, self.level, self.dtype_config).convert_module(module)
        fits = trainer.state.fn == "fit"
        if isinstance(strategy, ParallelStrategy):
            self.stop_together(trainer, evaluates_in_step=self.engine.sharding is not None)
        if fits:
            assert isinstance(module, pl.LightningModule)
            processes.prepare(module, strategy, self.engine)
            summarize_true_size(trainer, self.undo)
            if self.level.has_half_weights:
                average_exactly(trainer, module, self.engine, self.undo)
        if self.parsed.low_bit.gradient_release:
            _check_release(trainer)
        self.engine.convert(module, strategy.root_device, training=fits)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            self.engine.check_optimizer(optimizer)
        module = self.engine.model  # ``model`` may be a wrapper around the module
        trainer = trainer_of(module)
        strategy = trainer.strategy if trainer is not None and trainer.state.fn == "fit" else None
        if strategy is not None:
            if isinstance(strategy, ParallelStrategy):
                agreement.check_optimizers(optimizers, lr_schedulers)
            processes.release_ddp(model, strategy, self.engine)
        self.engine.settle()
        for optimizer in optimizers:
            self.engine.attach(optimizer)
        if strategy is not None:
            processes.average_gradients(model, strategy, self.engine)
        if isinstance(module, pl.LightningModule):
            self.follow(module, self.engine.step, lr_schedulers)
            if strategy is not None and not module.automatic_optimization:
                self._manual = ManualPasses(module, self.engine, processes.averages(strategy, self.engine))
                self._manual.watch(optimizers)
            if strategy is not None:  # a validation after a fit has the fit's optimizers, too
                print_summary(self.engine, self)
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        try:
            self.engine.step.settle()
        finally:
            self._take_down()

    def _take_down(self) -> None:
        # Each fit or evaluation converts anew: a Trainer without this plugin would train the half copies of a converted
        # model, and save the masters.
        self.undo.close()
        self._signals = None
        if self._manual is not None:
            self._manual.remove()
            self._manual = None
        self.engine.revert()
        self._resume.forget()
        if self.engine.model is not None:
            give_back_to_ddp(self.engine.model)
        self.engine.sharding = None  # another Trainer may have another strategy

    # A step

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with self.engine.forward_context():
            yield

    @contextmanager
    def _evaluation_context(self) -> Generator[None, None, None]:
        self.before_evaluation_step()
        with self.forward_context():
            yield

    val_step_context = test_step_context = predict_step_context = _evaluation_context

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        self.before_step()
        if self._manual is not None:
            self._manual.before_training_step()
        if self._module is not None and self.engine.columns.computation.overwrites_gradients:
            zero_before_forward(self._module)
        with self.forward_context():
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self._resume.running = True
        return super().pre_backward(self.engine.step.scale(tensor), module)

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self._resume.pending, self._resume.running = True, False
        return super().post_backward(tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        # Manual optimization calls this inside training_step, whose autocast would round the GEMMs to half.
        wanted = trainer_of(model) is None or processes.synchronizes(model.trainer.strategy)
        announced = nullcontext() if self._manual is None else self._manual.announced()
        with self.engine.backward_context(wanted), announced:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert isinstance(optimizer, Optimizer)
        with nullcontext() if self._manual is None else self._manual.step_of(optimizer):
            result = self._step(optimizer, model, closure, **kwargs)
        self._resume.pending = self._resume.running = False
        return result

    def _step(self, optimizer: Optimizer, model: pl.LightningModule, run: Callable[[], Any], **kwargs: Any) -> Any:
        def closure() -> Any:
            result = run()
            if self._manual is not None:
                self._manual.check(optimizer)
            return result

        self.engine.attach(optimizer)
        if needs_closure(optimizer):

            def wrapped() -> Any:
                with self.engine.forward_context():
                    return self._wrap_closure(model, optimizer, closure)

            return self.engine.step.run_with_closure(optimizer, wrapped, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:
            return None  # training_step has returned None to skip the batch
        self._resume.running = True
        step = self.engine.step
        step.unscale(optimizer)
        self._after_closure(model, optimizer)
        norm = step.norm_of(optimizer, needed=self.log.is_due(model))
        step.run(optimizer, **kwargs)
        self.log.after_step(model, optimizer, norm)
        return result

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if clip_val > 0 and self.parsed.low_bit.gradient_release:
            raise ValueError(
                "gradient_release=True has stepped each parameter before all gradients are there to be clipped. "
                "Leave one of them out."
            )
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.engine.step.clip(_unwrapped(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.engine.step.check_finite(_unwrapped(optimizer))  # clipping by value makes infinities finite
        super().clip_grad_by_value(optimizer, clip_val)

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        self.engine.step.settle()
        new = None if self._manual is None else self._manual.new_gradients()
        resume = self._resume.state_dict(self.engine, self._module, new)  # before the engine's: a collective of amaxes
        counted = {"skipped_steps": self.log.skipped_steps}
        return {**self.engine.state_dict(), **counted, **resume}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.load_state_dict(state_dict)
        self.log.skipped_steps = int(state_dict.get("skipped_steps", 0))
        self._resume.load_state_dict(state_dict, self._module)


def _check_release(trainer: pl.Trainer) -> None:
    """Raise ValueError for Trainer options that need the gradients of all parameters at once, with gradient release."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [c for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
    obstacles = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches!r}": trainer.accumulate_grad_batches > 1,
        f"gradient_clip_val={trainer.gradient_clip_val!r}": trainer.gradient_clip_val is not None,
        "GradientAccumulationScheduler": any(c.going_to_accumulate_grad_batches() for c in schedules),
    }
    for name, there in obstacles.items():
        if there:
            raise ValueError(
                f"gradient_release=True steps each parameter as soon as its gradient is there, which cannot go with "
                f"{name}. Leave one of them out."
            )


def _unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    # Manual optimization passes Lightning's wrapper.
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
