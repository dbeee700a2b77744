"""Makes averages of weights (EMA, SWA) from masters, not from half or FP8 copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nemo_lowprec.tensors import Fp16Weight, QuantizedTensor
from nemo_lowprec.weights.frozen import is_frozen_fp8
from nemo_lowprec.weights.saved_form import master_of
from nemo_lowprec.weights.written import note, take_over_written

_DONE = "_lowprec_exact"


class ExactWeights:
    """Takes a model's place in ``update_parameters``: ``parameters()`` are masters, and FP32 views of FP16 matrices."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[Tensor]:
        """The exact weights, in the model's order."""
        for param in self._model.parameters():
            if is_frozen_fp8(param):
                yield param.frozen_values()
                continue
            master = master_of(param)
            if master is not None and not isinstance(param, QuantizedTensor):
                take_over_written(param, master)
            own = Fp16Weight(param.data_fp16, torch.float32) if isinstance(param, Fp16Weight) else param
            yield own if master is None else master

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the copies from the exact weights, after the exact weights were written."""
        for param in self._model.parameters():
            master = master_of(param)
            if isinstance(param, QuantizedTensor) and not is_frozen_fp8(param):
                param.copy_(param.exact())
            elif master is not None and not isinstance(param, QuantizedTensor):
                param.copy_(master)
                note(param, master)


def average_masters() -> None:
    """Make torch's ``AveragedModel`` read masters, in this process and from now on."""
    original = AveragedModel.update_parameters
    if hasattr(original, _DONE):
        return

    @wraps(original)
    def update_parameters(self: AveragedModel, model: Any) -> None:
        original(self, model if isinstance(model, ExactWeights) else ExactWeights(model))  # type: ignore[arg-type]

    setattr(update_parameters, _DONE, True)
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def averages_in(model: nn.Module) -> set[int]:
    """Ids of the parameters of ``model`` that are averages of other parameters, and stay FP32."""
    averages = [module for module in model.modules() if isinstance(module, AveragedModel)]
    return {id(param) for module in averages for param in module.parameters()}
