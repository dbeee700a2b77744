"""One forward and backward pass on fake tensors, which have shapes and no memory, with a count of the bytes alive.

Every storage that an operation makes is counted until it is freed. Storages of parameters and buffers are not counted,
and a parameter's gradient is counted until the level stores it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nemo_lowprec.compat.autograd import run_backward
from nemo_lowprec.compat.tensors import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.formats import floats, gemm_block_scaling
from nemo_lowprec.report.tensor_storage import format_of
from nemo_lowprec.tensors import QuantizedTensor, gradient


@dataclass(frozen=True)
class Traced:
    """Bytes of one micro-batch.

    Attributes:
        kept: that autograd keeps between forward and backward.
        in_blocks: the most that is alive at a time in forward until the blocks are done, with what is kept by then.
        after_blocks: the same from then until the loss.
        backward: the same in backward, with the parameters' gradients that are there by then and without all of them:
            in forward those of the step before are there. Negative where they are the larger part.
        formats: of what is kept, but for formats of less than a hundredth.
    """

    kept: int
    in_blocks: int
    after_blocks: int
    backward: int
    formats: set[str]

    @property
    def most(self) -> int:
        """The most bytes alive at a time, over forward and backward."""
        return max(self.in_blocks, self.after_blocks, self.backward)


class _Alive(TorchDispatchMode):
    """Bytes of the storages that operations have made, and the most of them since ``most`` was set."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.now = self.most = self.gradients = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._known = {storage_key(t.untyped_storage()) for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented  # it reads its storage by operations that come here again
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: Tensor) -> None:
        if isinstance(tensor, QuantizedTensor):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._known or key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = weakref.ref(storage, lambda _: self._free(key)), size
        self.now += size
        self.most = max(self.most, self.now + self.gradients)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)[1]

    def size(self, tensor: Tensor) -> int:
        """Bytes of a tensor's storage; 0 for one that was there before."""
        found = self._sizes.get(storage_key(tensor.untyped_storage()))
        return 0 if found is None else found[1]


def fake(tensor: Tensor) -> Tensor:
    """A fake tensor of the CPU of the same shape, strides and class; within a ``FakeTensorMode``."""
    if isinstance(tensor, QuantizedTensor):
        return tensor._each(fake)  # type: ignore[no-any-return]
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _with_fake_tensors(model: nn.Module) -> None:
    """Give ``model`` fake parameters and buffers; remove amaxes and scales, whose values a layer would read."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                new = nn.Parameter(fake(param.detach()), requires_grad=param.requires_grad)
                if param.requires_grad and param.is_leaf and param.grad_dtype != param.dtype:
                    new.grad_dtype = param.grad_dtype
                made[id(param)] = new
            module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
        for plan in gemm_plans(module).values():
            plan.operands = {kind: copy.copy(operand) for kind, operand in plan.operands.items()}
            for operand in plan.operands.values():
                operand.slot = None


def trace(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    half: torch.dtype,
    stored_as: Callable[[nn.Parameter], int] | None,
    blocks: list[nn.Module],
    times: int,
    rules: Any,
) -> Traced:
    """Trace one micro-batch.

    Args:
        model: converted and settled, on torch's meta device; it has fake tensors afterwards.
        run: the forward pass of a micro-batch to its loss, a scalar.
        half: dtype of autocast.
        stored_as: bytes in which a parameter's gradient is stored, for those that come during backward; None where all
            are there already, or do not count.
        blocks: the equal blocks that are left in ``model``; the last of them stands for ``times`` ones.
        times: see ``blocks``.
        rules: a context for the forward and the backward pass.
    """
    saved: dict[int, tuple[torch.dtype, int]] = {}
    with _no_table_stays(), FakeTensorMode(allow_non_fake_inputs=True), _one_sequence():
        _with_fake_tensors(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        sizes = {} if stored_as is None else {id(p): stored_as(p) for p in trained}
        alive = _Alive(part for m in (model.parameters(), model.buffers()) for t in m for part in _parts(t))

        def pack(tensor: Tensor) -> Tensor:
            for part in _parts(tensor):
                saved[storage_key(part.untyped_storage())] = part.dtype, alive.size(part)
            return tensor

        entered: list[int] = []  # bytes at each block's begin
        until_last: list[int] = []  # the most in backward until the last block's is done

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(alive.now)
            if module is blocks[-1]:
                found = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad)
                for x in found:
                    x.register_hook(leave)
                    break

        in_blocks: list[int] = []

        def leave(_: Tensor) -> None:
            until_last.append(alive.most)
            alive.most = 0

        def end(*_: Any) -> None:
            in_blocks.append(alive.most)
            alive.most = alive.now

        def store(param: Tensor) -> None:
            alive.gradients += sizes.get(id(param), 0)
            param.grad = None

        entering: list[Any] = [b.register_forward_pre_hook(enter, with_kwargs=True, prepend=True) for b in blocks]
        entering += [block.register_forward_hook(end) for block in blocks[-1:]]
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(store)  # type: ignore[arg-type]
        with alive, rules:
            with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", dtype=half):
                loss = run(model)
            after_blocks, alive.most = alive.most, alive.now
            for hook in entering:
                hook.remove()
            # As ``loss.backward()``, within which ``rules`` would be off, and recomputation would follow others.
            run_backward(loss)
        kept = sum(size for _, size in saved.values())
    # What every block but the last has added.
    more = (times - 1) * (entered[-1] - entered[-2]) if times > 1 else 0
    coming = (times - 1) * sum(sizes.get(id(p), 0) for p in blocks[-1].parameters()) if times > 1 else 0
    ends = [alive.most] if not until_last else [until_last[0] + more - coming, alive.most]
    by_format: dict[str, int] = {}
    for dtype, size in saved.values():
        if dtype.is_floating_point:
            by_format[format_of(dtype)] = by_format.get(format_of(dtype), 0) + size
    formats = {name for name, size in by_format.items() if size > kept / 100}
    inside = in_blocks[0] if in_blocks else after_blocks
    return Traced(kept + more, inside + more, after_blocks + more, max(ends) - alive.gradients, formats)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.parts() if isinstance(tensor, QuantizedTensor) else (tensor,)


@contextmanager
def _no_table_stays() -> Iterator[None]:
    """Forget the constants that formats keep: those that are made meanwhile have no values."""
    try:
        yield
    finally:
        for table in (floats._table, gemm_block_scaling._grid, gradient._one):
            table.cache_clear()


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Have transformers not look for several sequences in a row of a batch: it reads positions, which are fake."""
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    name = "find_packed_sequence_indices"
    own = getattr(masking_utils, name, None)
    if own is None:
        yield
        return
    setattr(masking_utils, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, own)
