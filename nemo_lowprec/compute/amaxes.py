"""Amaxes of the operands of FP8 GEMMs, from which delayed scaling computes the scales of the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.choice import Choice
from nemo_lowprec.compute.operands import new_histories, operand_of
from nemo_lowprec.compute.weight_scales import WeightScales
from nemo_lowprec.compute.weight_state import WeightStates


class AmaxState:
    """Base: the amaxes of the layers of one model. Here the layers keep no amaxes from step to step.

    Attributes:
        histories: ``DelayedScaling``, the amax histories of inputs and output gradients; None without delayed scaling.
        weights: which weights were written, and the quantized weights; with scales per tensor ``WeightScales``.
        choice: what ``convert="auto"`` has decided; None before it has.
        groups: the names of layers that compute as one (``group.py``).
        learned: the facts that a loaded run has learned (``learned.py``).
        reduce_amax: the argument of ``share``.
    """

    histories: Any = None

    def __init__(self) -> None:
        self.weights = WeightStates()
        self.choice: Choice | None = None
        self.groups: list[tuple[str, ...]] = []
        self.learned: dict[str, dict[str, Any]] = {}
        self.reduce_amax: Callable[[Tensor], None] | None = None

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        """Move the tables to ``device``. FSDP2 gathers weights from shards in ``gathered_as``; None: they are whole."""
        self.weights.settle(device, gathered_as)

    def share(self, reduce_amax: Callable[[Tensor], None] | None, of_weights: bool = False) -> None:
        """Scale by the amaxes of several processes.

        Args:
            reduce_amax: replaces amaxes by their maxima over the processes, in place; None for this process alone.
            of_weights: whether processes hold shards of weights, so that amaxes of weights are reduced, too.
        """
        self.reduce_amax = reduce_amax

    def expect(self, growth: float) -> None:
        """Adapt histories and scales to output gradients that are ``growth`` times as large as before."""

    def nonfinite(self) -> Tensor | None:
        """Whether an amax of this process in this step is not finite: a bool scalar on the device; None without any.

        FP8 casts saturate, so an infinity in an operand of an FP8 GEMM shows in the operand's amax only.
        """
        return None

    def reduce(self, flags: Tensor) -> bool:
        """Reduce the amaxes and, in the same all-reduce, ``flags`` (FP32 [n]) to maxima; whether there was one."""
        return False

    def equalize(self) -> None:
        """Replace the amaxes of an unfinished step by their maxima over all processes, for a checkpoint."""

    @property
    def waits(self) -> bool:
        """Whether ``take_back`` must come before the next forward pass."""
        return False

    def after_step(self, skipped: bool | Tensor) -> None:
        """Enter a step's amaxes into the histories, or forget the amaxes of a step that was skipped.

        Args:
            skipped: see ``Column.after_step``.
        """
        self.weights.renew()

    def take_back(self) -> None:
        """The step that ``after_step`` was told of was skipped on the device."""

    def forget_weights(self) -> None:
        """Measure each weight when its layer runs next. The histories of the other operands stay."""
        self.weights.forget()

    def restart(self) -> None:
        """Measure each weight when its layer runs next, and start the histories anew."""
        self.weights.restart()

    def leave(self) -> None:
        """Called when the layers are reverted. The histories stay for the next conversion of the same model."""
        self.weights.leave()

    def state_dict(self) -> dict[str, Any]:
        """Histories and scales as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; values that ``state`` lacks start afresh."""


class CurrentAmaxes(AmaxState):
    """Weight scales of the layers that this package has converted, with a scale per tensor from the tensor at hand.

    A weight is the same tensor for a whole step, so that all weights are measured, and quantized, in one pass a step.

    Args:
        recipe: the recipe of the level.
        renews: whether weights are measured right after a step, or when their layers run next.
    """

    def __init__(self, recipe: Recipe, renews: bool = True) -> None:
        super().__init__()
        self.weights: WeightScales = WeightScales(operand_of(recipe, "weight").fmt, recipe.fp8_margin)
        self._renews = renews

    def share(self, reduce_amax: Callable[[Tensor], None] | None, of_weights: bool = False) -> None:
        super().share(reduce_amax, of_weights)
        self.weights.reduce_amax = reduce_amax if of_weights else None

    def after_step(self, skipped: bool | Tensor) -> None:
        if skipped is True:
            return
        if self._renews:
            self.weights.renew()
        else:
            self.weights.forget()

    def leave(self) -> None:
        super().leave()
        self.share(None)


class DelayedAmaxes(CurrentAmaxes):
    """``CurrentAmaxes`` with amax histories of the layers' inputs and output gradients: delayed scaling."""

    def __init__(self, recipe: Recipe, renews: bool = True) -> None:
        super().__init__(recipe, renews)
        self.histories = new_histories(recipe)

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        self.histories.to(device)
        super().settle(device, gathered_as)

    def share(self, reduce_amax: Callable[[Tensor], None] | None, of_weights: bool = False) -> None:
        super().share(reduce_amax, of_weights)
        self.histories.reduce_amax = reduce_amax

    def expect(self, growth: float) -> None:
        self.histories.rescale("grad_output", growth)

    def nonfinite(self) -> Tensor | None:
        return self.histories.nonfinite() | self.weights.nonfinite()  # type: ignore[no-any-return]

    def reduce(self, flags: Tensor) -> bool:
        return self.histories.reduce(flags)  # type: ignore[no-any-return]

    def equalize(self) -> None:
        self.histories.equalize()

    @property
    def waits(self) -> bool:
        return any(slot.cold and slot.recorded for slot in self.histories.slots.values())

    def after_step(self, skipped: bool | Tensor) -> None:
        if skipped is True:
            self.histories.discard()
        else:
            self.histories.update(None if skipped is False else skipped)
        super().after_step(skipped)

    def take_back(self) -> None:
        self.histories.take_back()

    def state_dict(self) -> dict[str, Any]:
        return {"fp8": self.histories.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "fp8" in state:
            self.histories.load_state_dict(state["fp8"])
            self.weights.forget()


class TEAmaxes(AmaxState):
    """Amax histories in Transformer Engine's own layers.

    Args:
        model: has such layers; in Megatron-core a list of the chunks of one pipeline stage.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def expect(self, growth: float) -> None:
        te_layers.rescale_gradients(self._model, growth)

    def nonfinite(self) -> Tensor | None:
        return te_layers.nonfinite_amaxes(self._model)

    @property
    def waits(self) -> bool:
        return True  # the layers read their amaxes themselves

    def after_step(self, skipped: bool | Tensor) -> None:
        if skipped is True:
            self.take_back()

    def take_back(self) -> None:
        te_layers.forget_nonfinite_amaxes(self._model)

    def state_dict(self) -> dict[str, Any]:
        return {"te": te_layers.te_state_dict(self._model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "te" in state:
            te_layers.load_te_state_dict(self._model, state["te"])
