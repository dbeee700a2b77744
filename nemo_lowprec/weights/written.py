"""Finds half copies that the user has written, and takes the written values over into the masters.

A write in place (``copy_``, ``clamp_``, ``nn.init``) changes the copy's version counter; new data
(``param.data = values``, ``vector_to_parameters``) change the copy's address. Version and address are compared before
every step. A write in place through ``.data`` changes neither, and is found by comparing values: all values when
weights are saved or given back and at steps 1, 2, 4, 8 and so on, ``SAMPLE`` values of each weight at every other step.
"""

from __future__ import annotations

from operator import is_

import torch
from torch import Tensor, nn

from nemo_lowprec.tensors import QuantizedTensor

SAMPLE = 512  # elements
_STATE = "_agrees_with"  # attribute of a master: version, address and dtype of the copy at ``note``
_NOTED = "_noted_at"  # attribute of a master: the master's version at ``note``


def note(param: Tensor, master: Tensor) -> None:
    """Note that ``param`` is now the rounded ``master``."""
    setattr(master, _STATE, (param._version, param.data_ptr(), param.dtype))
    setattr(master, _NOTED, master._version)


def was_written(param: Tensor, master: Tensor) -> bool:
    """Whether ``param`` was written, or given other data, since ``note``; an FP8 weight writes its master itself."""
    if isinstance(param, QuantizedTensor):
        return False
    version, address, _ = getattr(master, _STATE)
    return version != param._version or address != param.data_ptr()


def master_was_written(master: Tensor) -> bool:
    """Whether ``master`` was written since ``note``, through a tensor of ``state_dict()`` for example."""
    noted = getattr(master, _NOTED, None)
    return noted is not None and noted != master._version


def moved(param: Tensor, master: Tensor) -> None:
    """Note the new address of ``param``, which was moved to another device; writes before the move are still found."""
    version, _, dtype = getattr(master, _STATE)
    setattr(master, _STATE, (version, param.data_ptr(), dtype))


@torch.no_grad()
def take_over(param: nn.Parameter, master: Tensor) -> None:
    """Give ``master`` the values of ``param``, but for elements of ``param`` that equal the rounded master.

    Elements that an operation in place has not changed so keep the master's bits.
    """
    values, half = param.detach(), getattr(master, _STATE)[2]
    if values.shape == master.shape:
        mine = master.detach().to(values.device)
        changed = values != mine.to(half).to(values.dtype)
        master.copy_(torch.where(changed, values.to(mine.dtype), mine))
    else:
        master.data = values.to(master.device, master.dtype)
    if values.dtype != half:  # after module.float(), for example
        param.data = values.to(half)
    note(param, master)


@torch.no_grad()
def take_over_written(param: nn.Parameter, master: Tensor) -> None:
    """Call ``take_over`` where the values of ``param`` and the rounded master differ; a written master wins."""
    if master_was_written(master) and not was_written(param, master):
        param.copy_(master)
        note(param, master)
    elif was_written(param, master) or not torch.equal(param.detach(), master.detach().to(param.device, param.dtype)):
        take_over(param, master)


def note_frozen(param: nn.Parameter) -> None:
    """Note the version of ``param``, which has no master and was just stored or loaded."""
    param.__dict__[_STATE] = param._version


def frozen_was_written(param: nn.Parameter) -> bool:
    """Whether ``param`` was written since ``note_frozen``."""
    return param.__dict__.get(_STATE) != param._version


def copy_exactly(param: nn.Parameter, master: Tensor) -> None:
    """Make ``copy.deepcopy`` and pickle copy ``param`` as a plain parameter with the master's values.

    Nothing refreshes a deep copy from a master, and an average of weights needs more bits than a half copy has.
    """

    def plain() -> nn.Parameter:
        return nn.Parameter(master.detach().clone(), requires_grad=master.requires_grad)

    param.__dict__["__deepcopy__"] = lambda memo: plain()
    param.__dict__["__reduce_ex__"] = lambda protocol: plain().__reduce_ex__(protocol)


def forget(param: nn.Parameter) -> None:
    """Undo ``copy_exactly``."""
    param.__dict__.pop("__deepcopy__", None)
    param.__dict__.pop("__reduce_ex__", None)


class Comparison:
    """Compares half copies with their rounded masters, without a host wait.

    Args:
        pairs: copies and their masters, each of one dtype and on one device.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        self._sampled = [(p, m) for p, m in pairs if p.numel() and p.is_contiguous() and m.is_contiguous()]
        self._copies = [_middle(param) for param, _ in self._sampled]
        self._masters = [_middle(master) for _, master in self._sampled]
        self._sizes = [len(sample) for sample in self._copies]

    def is_of(self, pairs: list[tuple[Tensor, Tensor]]) -> bool:
        """Whether the comparison was made for ``pairs``, the same tuples."""
        return len(pairs) == len(self._pairs) and all(map(is_, pairs, self._pairs))

    @torch.no_grad()
    def differ(self, samples: bool) -> Tensor | None:
        """Whether a copy differs from its rounded master, as a bool scalar on the device; None without copies.

        Args:
            samples: whether ``SAMPLE`` neighbouring elements of each copy are compared, in place of all.
        """
        self._compared = self._sampled if samples else self._pairs
        if not self._compared:
            return None
        if samples:
            self._found = _differ(torch.cat(self._copies), torch.cat(self._masters))
        else:
            found = [_differ(param.detach(), master.detach()).any() for param, master in self._pairs]
            self._found = torch.stack([copy_differs.to(found[0].device) for copy_differs in found])
        return self._found.any()

    def which(self) -> list[Tensor]:
        """The copies that differed when ``differ`` was called last."""
        found = self._found.split(self._sizes if self._compared is self._sampled else 1)
        return [param for (param, _), differs in zip(self._compared, found, strict=True) if bool(differs.any())]


def _differ(copy: Tensor, master: Tensor) -> Tensor:
    """Where ``copy`` is not the rounded ``master``; a NaN is not compared."""
    return (copy != master.to(copy.device, copy.dtype)) & (copy == copy)


def _middle(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    start = max(0, (flat.numel() - SAMPLE) // 2)
    return flat[start : start + SAMPLE]
