"""Trains one model at a level and in FP32, on one batch, and asserts what holds for any model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from support import assert_same, level_of, plugin, replay, trainer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nemo_lowprec.compute import is_converted
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.coverage import Group, groups_of
from nemo_lowprec.observers import Observer

STEPS = 24

Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], Tensor]


def dealt(names: Iterable[str], cases: Sequence[str]) -> list[tuple[str, str]]:
    """Each name with one of ``cases``, which are dealt out in the order of the names' hashes."""
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [(name, cases[at % len(cases)]) for at, name in enumerate(order)]


class Called(Observer):
    """The layers that have quantized their inputs."""

    def __init__(self) -> None:
        self.layers: set[str] = set()

    def quantized(self, layer: str, kind: str, values: Tensor, operand: Any, backend: Any) -> None:
        if kind == "input":
            self.layers.add(layer)


class Alike(pl.LightningModule):
    """Any model that computes its loss.

    Args:
        make: makes the model.
        loss: of the model and a batch.
        lr: of AdamW.

    Attributes:
        losses: of all steps.
        evaluated: the loss of a validation, behind the last step.
        gradients: names of the parameters that have a gradient in the last step.
        conversion, groups: how the layers and matrices are computed, of which the start-up table is made.
        called: names of the layers that quantize their inputs in validation.
    """

    def __init__(self, make: Make, loss: Loss, lr: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = make()
        self.make, self.loss, self.lr = make, loss, lr
        self.losses: list[float] = []
        self.evaluated = float("nan")
        self.gradients: set[str] = set()
        self.conversion, self.groups = Conversion(), list[Group]()
        self.called: set[str] = set()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(self.model, batch).float()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        engine = getattr(self.trainer.precision_plugin, "engine", None)
        if engine is None:
            self.evaluated = float(self.loss(self.model, batch))
            return
        with engine.observers.watched_by(called := Called()):
            self.evaluated = float(self.loss(self.model, batch))
        self.called = called.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        bad = [name for name, grad in found.items() if not grad.isfinite().all()]
        assert not bad, f"gradients are not finite: {bad}"
        self.gradients = set(found)

    def on_train_end(self) -> None:
        engine = getattr(self.trainer.precision_plugin, "engine", None)
        if engine is not None:
            self.conversion = engine.columns.computation.conversion
            self.groups = groups_of(self, self.conversion)


def fit(model: Alike, case: str | None, batch: Any, accelerator: str = "cpu", saved: Path | None = None) -> Alike:
    """Train ``model`` at a case of ``support.CASES``, or in FP32, then evaluate it and save a checkpoint."""
    options = {} if accelerator == "cpu" or case is None or not level_of(case).has_fp8 else {"backend": "auto"}
    precision = None if case is None else plugin(case, **options)
    callbacks = [] if saved is None else [Saving(saved)]
    fitting = trainer(precision, *callbacks, max_epochs=STEPS, check_val_every_n_epoch=STEPS, accelerator=accelerator)
    fitting.fit(model.train(), replay([batch]), replay([batch]))
    return model


class Saving(pl.Callback):
    """Saves a checkpoint when training ends, while the model is converted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def modules_of(model: nn.Module) -> dict[str, Any]:
    """What a conversion changes of each module: its class, its attributes and the number of its hooks."""
    return {
        name: (
            type(module).__mro__[-1 if parametrize.is_parametrized(module) else 0],  # which has a class of its own
            type(module).__name__, set(module.__dict__), sorted(module._parameters),
            {key: len(value) for key, value in module.__dict__.items() if key.endswith("_hooks")},
        )
        for name, module in model.named_modules()
        if name
    }  # fmt: skip


def assert_alike(plain: Alike, case: str, batch: Any, saved: Path, accelerator: str = "cpu") -> Alike:
    """Train the model of ``plain``, which was trained in FP32, at ``case``; assert what holds for any model.

    The loss follows FP32's: over all steps, the mean difference is at most 2 % of what FP32's loss falls by, with NVFP4
    5 %; in evaluation the difference is at most twice that. Every gradient is finite, and the same parameters have one.
    Every layer that is called converted computes. The checkpoint, saved while the model is converted, has the names of
    the plain model and the values that the trained model has after the run, in the plain model's classes and dtypes.

    Args:
        saved: where the checkpoint goes.

    Returns:
        The model that was trained at ``case``.
    """
    model = fit(Alike(plain.make, plain.loss, plain.lr), case, batch, accelerator, saved)
    bound = 0.05 if level_of(case).compute == "nvfp4" else 0.02
    fall = plain.losses[0] - min(plain.losses)
    assert len(model.losses) == STEPS and fall > 0.2 * plain.losses[0], plain.losses
    far = sum(abs(a - b) for a, b in zip(model.losses, plain.losses, strict=True)) / STEPS / fall
    assert far <= bound, (far, model.losses, plain.losses)
    assert abs(model.evaluated - plain.evaluated) <= 2 * bound * fall, (model.evaluated, plain.evaluated)
    assert model.gradients == plain.gradients
    weights_of = dict(zip(model.conversion.low, model.conversion.weights, strict=True))
    trained = {layer for layer, weight in weights_of.items() if weight in model.gradients}
    unread = sorted(trained - set(model.conversion.left) - model.called)
    assert not unread, f"called converted, and computed by somebody else: {unread}"

    assert not is_converted(model)
    assert_same(modules_of(model), modules_of(plain))
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in plain.state_dict().items()}
    weights = torch.load(saved, weights_only=True, map_location="cpu")["state_dict"]
    assert_same({name: value.to(state[name].dtype) for name, value in weights.items()}, state)
    again = Alike(plain.make, plain.loss, plain.lr)
    again.load_state_dict(weights, strict=True)
    with torch.no_grad():
        assert torch.equal(again.eval().loss(again.model, batch), model.cpu().eval().loss(model.model, batch))
    return model
