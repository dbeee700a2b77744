"""FP32 weights, which optimizers update directly: fp16_amp and te_fp8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.frozen import FrozenInFp8
from nemo_lowprec.weights.saved_form import install_hooks, remove_hooks
from nemo_lowprec.weights.store import WeightStore
from nemo_lowprec.weights.widened import HALVES, Widened


class Fp32Weights(WeightStore):
    """The parameters of one model in FP32. Half parameters are widened to FP32 once they are trained.

    Frozen parameters keep their dtype, or are stored in FP8. Parameters of another library's tensor class are not
    changed.

    Args:
        scaled_by: name of a level that scales the loss, and so cannot train FP16 parameters; None for other levels.
        frozen: stores frozen weights in FP8.
    """

    def __init__(self, scaled_by: str | None = None, frozen: FrozenInFp8 | None = None) -> None:
        super().__init__()
        self._frozen_fp8 = frozen or FrozenInFp8()
        self._scaled_by = scaled_by
        self._widened = Widened()
        self._marks = Marks("frozen")
        self._frozen = ChosenParams(self._marks.__contains__)

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        for name, param in model.named_parameters() if self._scaled_by is not None else ():
            if param.dtype == torch.float16 and param.requires_grad:
                raise ValueError(
                    f"{self._scaled_by} trains FP32 weights, and {name} is FP16: its step would lose small updates. "
                    "Use fp16_mixed, which has FP32 masters, or model.float()."
                )

    def install(self, model: nn.Module, training: bool) -> None:
        super().install(model, training)
        if training:
            for module in self._frozen_fp8.store(model):
                install_hooks(module)
            for param in model.parameters():
                if type(param.data) is Tensor and param.dtype in HALVES:
                    self._marks.add(param)
            self.before_forward()

    def before_forward(self) -> None:
        """Widen half and FP8 weights that were unfrozen to FP32."""
        self._frozen_fp8.unfrozen(self.model)
        for module, param in self._frozen.of(self.model):
            if param.requires_grad:
                self._marks.discard(param)
                self._widened.add(param)
                self._widened.add_statistics(module)

    def remove(self) -> None:
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        remove_hooks(self.model)
        self._frozen_fp8.remove(self.model, replaced)
        self._follow(replaced)
        for _, param in self._frozen.of(self.model):
            self._marks.discard(param)
        super().remove()
