"""Averages of weights (EMA, SWA) are made of masters, not of half or FP8 copies.

``torch.optim.swa_utils.AveragedModel`` reads ``model.parameters()``, and nothing tells a parameter why it is read. So
its ``update_parameters`` is given, for a model whose parameters have masters, a stand-in whose parameters are these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nemo_lowprec.tensors import Fp16Weight, QuantizedTensor
from nemo_lowprec.weights.saved_form import master_of
from nemo_lowprec.weights.written import note, take_over_written

_DONE = "_lowprec_exact"


class ExactWeights:
    """Stands for a model: its parameters are the masters where there are any; FP16 matrices read as FP32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[Tensor]:
        """The exact weights, in the model's order."""
        for param in self._model.parameters():
            master = master_of(param)
            if master is not None and not isinstance(param, QuantizedTensor):
                take_over_written(param, master)
            own = Fp16Weight(param.data_fp16, torch.float32) if isinstance(param, Fp16Weight) else param
            yield own if master is None else master

    @torch.no_grad()
    def refresh(self) -> None:
        """After writing to the exact weights: round the copies from them."""
        for param in self._model.parameters():
            master = master_of(param)
            if isinstance(param, QuantizedTensor):
                param.copy_(param.exact())
            elif master is not None:
                param.copy_(master)
                note(param, master)


def average_masters() -> None:
    """Let torch's ``AveragedModel`` read masters, from now on and in this process."""
    original = AveragedModel.update_parameters
    if hasattr(original, _DONE):
        return

    @wraps(original)
    def update_parameters(self: AveragedModel, model: Any) -> None:
        original(self, model if isinstance(model, ExactWeights) else ExactWeights(model))  # type: ignore[arg-type]

    setattr(update_parameters, _DONE, True)
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def averages_in(model: nn.Module) -> set[int]:
    """Ids of the parameters of ``model`` that are averages of others, and stay FP32."""
    averages = [module for module in model.modules() if isinstance(module, AveragedModel)]
    return {id(param) for module in averages for param in module.parameters()}
