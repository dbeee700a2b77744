"""Column Optimizer states: FP32 states of any optimizer, or the low-bit states of optimizers that have them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.column import Column
from nemo_lowprec.optim.adopt import adopt, check_adoptable, release
from nemo_lowprec.optim.aside import StatesAside
from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.storage import StateFormats


class OptimizerStates(Column):
    """FP32 states: optimizers are not changed. The states of parameters that are frozen in mid-run are put aside."""

    releases = False

    def __init__(self) -> None:
        self._hooks = ExitStack()
        self._aside = StatesAside()

    def attach(self, optimizer: Optimizer) -> None:
        self._hooks.enter_context(optimizer.register_step_pre_hook(self._aside.before_step))

    def remove(self) -> None:
        self._hooks.close()


class LowBitOptimizerStates(OptimizerStates):
    """States in low-bit formats: attached optimizers become this package's own, in place.

    Args:
        formats: the formats of the moments and of the master weights.
        releases: whether a parameter steps as soon as its gradient is there (``step_at_once``).
    """

    def __init__(self, formats: StateFormats, releases: bool = False) -> None:
        super().__init__()
        self.formats, self.releases = formats, releases
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._stepped: Any = WeakIdKeyDictionary()  # parameters that have stepped in this backward pass

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            check_adoptable(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        adopt(optimizer, self.formats, self.releases)
        self._optimizers.add(optimizer)
        if self.releases:
            self._hooks.enter_context(optimizer.register_step_post_hook(self._after_step_of))

    def step_at_once(self, param: Tensor) -> None:
        """Gradient release: step one parameter and drop its gradient.

        Raises:
            RuntimeError: a second gradient before ``step``.
        """
        if param in self._stepped:
            raise RuntimeError(
                "gradient_release=True has stepped this parameter already, and a second gradient came before the "
                "optimizer's step: leave it out with several backward passes a step, or with reentrant checkpointing "
                "of a layer that is used twice."
            )
        for optimizer in self._optimizers:
            if optimizer.step_param(param):  # type: ignore[attr-defined]
                self._stepped[param] = True
                param.grad = None

    def _after_step_of(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._stepped.pop(param, None)

    def remove(self) -> None:
        """Give attached optimizers their class back, and FP32 states."""
        super().remove()
        self._stepped.clear()
        for optimizer in self._optimizers:
            release(optimizer)
        self._optimizers.clear()


def handles_found_inf(optimizer: Optimizer, sharded: bool) -> bool:
    """Whether the kernels of ``optimizer`` read ``found_inf``, so that the host need not wait before the step."""
    # torch's fused SGD skips a step and leaves its momentum uninitialized. torch's fused optimizers expect a found_inf
    # that is sharded as the parameters are.
    own = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not sharded
    return (own or isinstance(optimizer, LowBitStates)) and getattr(optimizer, "_step_supports_amp_scaling", False)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` evaluates the loss itself, several times a step (LBFGS)."""
    return _demands_closure(type(optimizer).step)


@lru_cache(maxsize=32)
def _demands_closure(step: Any) -> bool:
    closure = signature(step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty
