"""Amaxes of the operands of FP8 GEMMs, from which delayed scaling computes the scales of the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.operands import new_histories, new_weight_scales
from nemo_lowprec.options import Recipe


class AmaxState:
    """The amaxes of one model's layers; none where the layers keep nothing from step to step."""

    histories: Any = None
    weight_scales: Any = None

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        """Follow the model to ``device``.

        Args:
            gathered_as: dtype that weights are gathered in from their shards; None for whole weights.
        """

    def share(self, reduce_amax: Callable[[Tensor], None] | None, of_weights: bool = False) -> None:
        """Scale by the maxima that ``reduce_amax`` makes, in place, of amaxes of several processes; None: of this one.

        Args:
            of_weights: whether processes hold shards of a weight, and none its amax.
        """

    def expect(self, growth: float) -> None:
        """Output gradients come ``growth`` times as large as before: scales from before would saturate larger ones."""

    def nonfinite(self) -> Tensor | None:
        """Whether an amax of this process in this step is not finite: a bool scalar on the device; None without any.

        FP8 casts saturate: an infinity that meets an FP8 GEMM shows in the operand's amax only.
        """
        return None

    def reduce(self, flags: Tensor) -> bool:
        """Let the amaxes' all-reduce make ``flags`` (FP32 [n] of 0 and 1) their maxima, too; whether there was one."""
        return False

    def equalize(self) -> None:
        """Make the amaxes of an unfinished step those of all processes, before a checkpoint keeps them."""

    def after_step(self, skipped: bool) -> None:
        """Enter a step's amaxes into the histories, or forget them."""

    def forget_weights(self) -> None:
        """Measure each weight when its layer runs next. The histories stay: the other operands are of these weights."""

    def restart(self) -> None:
        """Measure each weight when its layer runs next, and start the histories anew."""

    def leave(self) -> None:
        """The layers are converted no more; histories stay for the next conversion of the same model."""

    def state_dict(self) -> dict[str, Any]:
        """Histories and scales as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; what ``state`` lacks starts afresh."""


class DelayedAmaxes(AmaxState):
    """Amax histories and weight scales of the layers that this package has converted.

    Args:
        recipe: with delayed scaling.
        renews: whether weights are measured right after a step; where not, when their layers run next.
    """

    def __init__(self, recipe: Recipe, renews: bool = True) -> None:
        self.histories = new_histories(recipe)
        self.weight_scales = new_weight_scales(recipe)
        self._renews = renews

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        self.histories.to(device)
        self.weight_scales.settle(device, gathered_as)

    def share(self, reduce_amax: Callable[[Tensor], None] | None, of_weights: bool = False) -> None:
        self.histories.reduce_amax = reduce_amax
        self.weight_scales.reduce_amax = reduce_amax if of_weights else None

    def expect(self, growth: float) -> None:
        self.histories.rescale("grad_output", growth)

    def nonfinite(self) -> Tensor | None:
        return self.histories.nonfinite() | self.weight_scales.nonfinite()  # type: ignore[no-any-return]

    def reduce(self, flags: Tensor) -> bool:
        return self.histories.reduce(flags)  # type: ignore[no-any-return]

    def equalize(self) -> None:
        self.histories.equalize()

    def after_step(self, skipped: bool) -> None:
        if skipped:
            self.histories.discard()
            return
        self.histories.update()
        if self._renews:
            self.weight_scales.renew()
        else:
            self.weight_scales.forget()

    def forget_weights(self) -> None:
        self.weight_scales.forget()

    def restart(self) -> None:
        self.weight_scales.restart()

    def leave(self) -> None:
        self.weight_scales.leave()
        self.share(None)

    def state_dict(self) -> dict[str, Any]:
        return {"fp8": self.histories.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "fp8" in state:
            self.histories.load_state_dict(state["fp8"])
            self.weight_scales.forget()


class TEAmaxes(AmaxState):
    """Amax histories that Transformer Engine's own layers keep.

    Args:
        models: that have such layers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models

    def expect(self, growth: float) -> None:
        for model in self._models:
            te_layers.rescale_gradients(model, growth)

    def nonfinite(self) -> Tensor | None:
        flags = [flag for model in self._models if (flag := te_layers.nonfinite_amaxes(model)) is not None]
        return torch.stack(flags).any() if flags else None

    def after_step(self, skipped: bool) -> None:
        if skipped:
            for model in self._models:
                te_layers.forget_nonfinite_amaxes(model)

    def state_dict(self) -> dict[str, Any]:
        return {"te": te_layers.te_state_dict(self._models[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "te" in state:
            te_layers.load_te_state_dict(self._models[0], state["te"])
