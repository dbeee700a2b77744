"""Base of the implementations of the columns Weight and Master weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.column import Column
from nemo_lowprec.compat.transformers import unwrap_save_and_load, wrap_save_and_load


class WeightStore(Column):
    """The parameters of one model. Here each process holds whole FP32 parameters; subclasses store other formats."""

    is_sharded = False

    def __init__(self) -> None:
        self.model = nn.Module()  # an empty module until ``install`` and after ``remove``
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._hooks = ExitStack()

    def install(self, model: nn.Module, training: bool) -> None:
        self.model = model
        wrap_save_and_load(model)
        self._hooks.callback(unwrap_save_and_load, model)

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def remove(self) -> None:
        self._hooks.close()
        self._optimizers.clear()
        self.model = nn.Module()

    def _follow(self, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace old parameters by new ones in the groups and the state of every attached optimizer."""
        for optimizer in self._optimizers if replaced else ():
            for group in optimizer.param_groups:
                group["params"][:] = [replaced.get(p, p) for p in group["params"]]
            for old, new in replaced.items():
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)

    def is_matrix(self, param: Tensor) -> bool:
        """Whether the gradient of ``param``, whole or sharded, is stored in FP8."""
        return False

    def matrices(self) -> Iterable[Tensor]:
        """The parameters whose gradients are stored in FP8, each once and in the model's order."""
        return ()

    def params(self) -> list[Tensor]:
        """The model's parameters, each once."""
        return list(self.named().values())

    def named(self) -> dict[str, Any]:
        """The model's parameters by name, as an optimizer holds them."""
        return dict(self.model.named_parameters())

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter that backward gives a gradient, parameter that an optimizer holds), in the model's order."""
        return [(param, param) for param in self.named().values()]

    def unreduced(self) -> dict[int, Tensor]:
        """Gradients that wait to be reduced onto shards, by the ids of the sharded parameters."""
        return {}

    def meet_root(self) -> None:
        """Called once the parameters of the root module, which are gathered around a whole step, were gathered."""

    def were_written(self) -> None:
        """Called after something else than a step has written the weights, on all processes."""

    def note_frozen(self) -> None:
        """Called after frozen parameters were written together with the copies of their original values."""

    def find_written(self, optimizer: Optimizer) -> Tensor | None:
        """Whether a weight was written through ``.data`` since the last step: a bool scalar; None without masters."""
        return None

    def refuse_written(self) -> None:
        """Raise a RuntimeError that names the weight that ``find_written`` has found."""

    @contextmanager
    def evaluating(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which a closure evaluates the loss in a step of ``optimizer``, with the weights of that moment."""
        yield
