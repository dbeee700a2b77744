"""Base class of the stores of 16-bit and FP8 parameters: checkpoint hooks, frozen and widened parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.weights.averaging import average_masters, averages_in
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.frozen import FrozenInFp8
from nemo_lowprec.weights.memory import check_memory
from nemo_lowprec.weights.recurrent import flatten_recurrent
from nemo_lowprec.weights.saved_form import cover_new_modules, install_hooks, remove_hooks
from nemo_lowprec.weights.store import WeightStore
from nemo_lowprec.weights.widened import Widened

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of the parameters that change their storage


def is_lazy(param: Tensor) -> bool:
    """Whether the first batch will give the parameter its shape; it stays FP32."""
    return isinstance(param, nn.parameter.UninitializedParameter)


class HalfStore(WeightStore):
    """Base of ``MasterWeights`` and ``LowBitWeights``, which store parameters in half precision or FP8.

    A frozen parameter that the user writes, as an average of other weights, becomes FP32 in ``before_forward``: the
    next update of the average would be too small for 16 bits.
    """

    def __init__(self, fp8: Callable[[], list[str]], margin: int, frozen: FrozenInFp8 | None) -> None:
        super().__init__()
        self._frozen_fp8 = frozen or FrozenInFp8()
        self._fp8, self._margin = fp8, margin
        self._training = True
        self._widened = Widened()
        self._came_as = Marks("frozen")  # the dtypes in which frozen parameters came
        self._frozen = ChosenParams(self._came_as.__contains__)

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        if training:
            check_memory(model)

    def install(self, model: nn.Module, training: bool) -> None:
        super().install(model, training)
        self._training, self._widened = training, Widened(training)
        average_masters()
        if training:
            self._frozen_fp8.store(model)
        for module, params in self._own_params():
            if params:
                install_hooks(module)
        for hook in cover_new_modules(model):
            self._hooks.enter_context(hook)

    def _own_params(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """(module, its own parameters) of every module, without parameters that are averages of others."""
        averages = averages_in(self.model)
        for module in self.model.modules():
            yield module, [p for p in module._parameters.values() if p is not None and id(p) not in averages]

    def _add_frozen(self, param: nn.Parameter) -> None:
        self._came_as.add(param, param.dtype)
        self._frozen.renew()

    def stored(self) -> Iterable[nn.Parameter]:
        """The model's parameters that ``remove`` gives back, each once."""
        raise NotImplementedError

    def _give_back(self, param: nn.Parameter, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        """Give ``param`` its values back; a parameter that takes its place is noted in ``replaced``."""
        raise NotImplementedError

    @torch.no_grad()
    def remove(self) -> None:
        """Give the parameters their exact values and their original dtype back."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        remove_hooks(self.model)
        for param in list(self.stored()):
            param.grad = None
            self._give_back(param, replaced)
        self._frozen_fp8.remove(self.model, replaced)
        self._widened.remove()
        flatten_recurrent(self.model)
        for _, param in self._frozen.of(self.model):
            self._came_as.discard(param)
        self._follow(replaced)
        super().remove()
