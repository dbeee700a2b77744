"""The places of half copies in an optimizer's groups and state, which masters take while the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.weights.saved_form import master_of


class Places:
    """The half copies in the groups of one optimizer, and their masters.

    The object is made once, and serves every step before which it ``fits``.

    Args:
        groups: of the optimizer, with the copies in them.
        stepped: the master that is stepped in the place of a parameter; None for a parameter that is stepped itself.

    Attributes:
        pairs: copies and their masters.
        others: the parameters that are stepped themselves.
        taken: whether the masters have the places.
    """

    def __init__(self, groups: list[dict[str, Any]], stepped: Callable[[nn.Parameter], Tensor | None]) -> None:
        self._params = _params(groups)
        found = [(param, stepped(param)) for param in self._params]
        self.pairs = [(param, master) for param, master in found if master is not None]
        self.others = [param for param, master in found if master is None]
        self.taken = False
        self._copies, self._masters = [param for param, _ in self.pairs], [master for _, master in self.pairs]
        self._trained = [param.requires_grad for param in self._copies]
        for param, master in self.pairs:
            master.requires_grad_(param.requires_grad)
        # Both ends of each pair are held above, so that no other tensor gets their ids.
        self._master_by_id = {id(param): master for param, master in self.pairs}
        self._copy_by_id = {id(master): param for param, master in self.pairs}

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether ``groups`` hold the same parameters, with the same masters, and none was frozen or unfrozen."""
        return (
            _are(_params(groups), self._params)
            and _are([master_of(param) for param in self._copies], self._masters)
            and [param.requires_grad for param in self._copies] == self._trained
        )

    def take(self, optimizer: Optimizer) -> None:
        """Put the masters in the copies' places."""
        _rename(optimizer, self._master_by_id)
        self.taken = True

    def leave(self, optimizer: Optimizer) -> None:
        """Put the copies in their places again."""
        _rename(optimizer, self._copy_by_id)
        self.taken = False


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    return [param for group in groups for param in group["params"]]


def _are(some: list[Any], others: list[Any]) -> bool:
    """Whether both lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _rename(optimizer: Optimizer, names: dict[int, Tensor]) -> None:
    """Replace parameters in the lists of the groups, and as keys of the state; ``names`` has the new ones by id."""
    for group in optimizer.param_groups:
        params = group["params"]
        params[:] = map(names.get, map(id, params), params)
    state = optimizer.state
    renamed = dict(zip(map(names.get, map(id, state), state), state.values(), strict=True))
    state.clear()
    state.update(renamed)
