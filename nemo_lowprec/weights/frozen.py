"""Frozen weights that are stored in E4M3 with one scale: 1 byte a parameter, in the place of 2 or 4.

The numbers of FP32 weights are first rounded to the level's half dtype. Then the amax has so few bits that the values,
saved and loaded in the dtype in which they came, give the same FP8 numbers and the same scale again.

A weight that is unfrozen becomes a plain FP32 parameter of its values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nemo_lowprec.formats import E4M3
from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.tensors.quantized_tensor import MASTER
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.swap import swap, swap_or_replace
from nemo_lowprec.weights.widened import HALVES


def is_frozen_fp8(param: Any) -> TypeGuard[Fp8Weight]:
    """Whether ``param`` is a frozen weight in FP8."""
    return isinstance(param, Fp8Weight) and param.is_frozen


@torch.no_grad()
def store_again(param: Fp8Weight) -> None:
    """Store the values that ``load_state_dict`` has written into ``param`` in FP8 alone."""
    if MASTER in param.__dict__:
        values = param.frozen_values()
        del param.__dict__[MASTER]
        param.quantize_(_rounded(values, param.dtype))


def _rounded(values: Tensor, half: torch.dtype) -> Tensor:
    """``values`` with as few bits as a half number has."""
    if values.dtype in HALVES:
        return values
    return values.to(half if half in HALVES else torch.bfloat16)


class FrozenInFp8:
    """The frozen weights of one model that are stored in FP8.

    Args:
        names: of the parameters that are stored so if they are frozen.
        reads_as: dtype that the weights read as; None for that in which they come.
        margin: scales are divided by 2**margin; a negative one is 0 here, since each rounding would clamp once more.
        device: of the training. Weights are moved there one by one, so that no device holds the model in half precision
            beside the one in FP8.
    """

    def __init__(
        self,
        names: Callable[[], list[str]] = list,
        reads_as: torch.dtype | None = None,
        margin: int = 0,
        device: Callable[[], torch.device] = lambda: torch.device("cpu"),
    ) -> None:
        self._names, self._reads_as, self._margin, self._device = names, reads_as, max(margin, 0), device
        self._params = ChosenParams(is_frozen_fp8)

    @torch.no_grad()
    def store(self, model: nn.Module) -> list[nn.Module]:
        """Store the weights that are frozen now. Returns the modules that hold them."""
        modules = []
        for name in self._names():
            module = model.get_submodule(name.rpartition(".")[0])
            param = model.get_parameter(name)
            if not param.requires_grad and not isinstance(param, Fp8Weight):
                self._store(param)
                modules.append(module)
        self._params.renew()
        return modules

    def _store(self, param: nn.Parameter) -> None:
        device = param.device if param.is_meta else self._device()
        values = param.detach().to(device)
        came_as, reads_as = param.dtype, self._reads_as or param.dtype
        stored = Fp8Weight.from_float(_rounded(values, reads_as), E4M3, reads_as, self._margin)
        stored.__dict__["came_as"] = came_as
        param.grad = None
        swap(param, nn.Parameter(stored, requires_grad=False))

    def of(self, model: nn.Module) -> list[nn.Parameter]:
        """The weights that are stored here."""
        return [param for _, param in self._params.of(model)]

    @torch.no_grad()
    def unfrozen(self, model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
        """Make plain FP32 parameters of the weights that were unfrozen. Returns their modules, and the parameters."""
        found = [(module, param) for module, param in self._params.of(model) if param.requires_grad]
        rounded = [param for _, param in found if MASTER not in param.__dict__]
        for _, param in found:
            values = param.exact()  # type: ignore[attr-defined]
            param.__dict__.pop(MASTER, None)
            swap(param, nn.Parameter(values))
        if rounded:
            name = next((name for name, param in model.named_parameters() if param is rounded[0]), "A weight")
            others = f" and {len(rounded) - 1} more weights were" if len(rounded) > 1 else " was"
            warnings.warn(
                f"{name}{others} stored in FP8 while frozen, and from now on trained from the rounded values. Pass "
                "frozen='half' where weights are unfrozen during training.",
                stacklevel=2,
            )
        if found:
            self._params.renew()
        return found

    @torch.no_grad()
    def remove(self, model: nn.Module, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        """Make plain parameters of all weights, in the dtypes in which they came."""
        for param in self.of(model):
            values = param.frozen_values()  # type: ignore[attr-defined]
            param.__dict__.pop(MASTER, None)
            swap_or_replace(model, param, nn.Parameter(values, requires_grad=param.requires_grad), replaced)
        self._params.renew()
