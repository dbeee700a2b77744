"""One forward and backward pass on fake tensors, which have shapes and no memory, with a count of the bytes alive.

Every storage that an operation makes is counted until it is freed. Storages of parameters and buffers, and of quantized
weights that layers keep, are not counted, and a parameter's gradient is counted until the level stores it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nemo_lowprec.compat.autograd import run_backward
from nemo_lowprec.compat.tensors import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.backends.base import QuantizedOperand
from nemo_lowprec.formats import floats, gemm_block_scaling
from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.report.plan.kept_weights import kept_operands, parts_of_operand, parts_of_tensor
from nemo_lowprec.report.tensor_storage import format_of
from nemo_lowprec.tensors import QuantizedTensor, gradient
from nemo_lowprec.tensors.gradient import compute_gradient_as, computed_dtype

# The most bytes alive at a time: in forward until the last block is done, from then until the loss, and in backward.
Phases = tuple[int, int, int]


@dataclass(frozen=True)
class Traced:
    """Bytes of one micro-batch.

    Attributes:
        kept: that autograd keeps between forward and backward.
        alive: with what is kept by then. In backward with the parameters' gradients that are there by then and without
            all of them, as in forward those of the step before are there: negative where they are the larger part.
        formats: of what is kept, but for formats of less than a hundredth.
    """

    kept: int
    alive: Phases
    formats: set[str]


# By whether blocks are recomputed in backward (None: no choice of the model); first as the model is set up.
Activations = dict[bool | None, Traced]


class _Alive(TorchDispatchMode):
    """Bytes of the storages that operations have made, and the most of them since ``most`` was set."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = self.gradients = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._known = {storage_key(t.untyped_storage()) for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented  # it reads its storage by operations that come here again
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, QuantizedTensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
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
        return self._sizes.get(storage_key(tensor.untyped_storage()), (None, 0))[1]


def fake(tensor: Tensor) -> Tensor:
    """A fake tensor of the CPU of the same shape, strides and class; within a ``FakeTensorMode``."""
    if isinstance(tensor, QuantizedTensor):
        return tensor._each(fake)  # type: ignore[no-any-return]
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class _Kept:
    """In the place of a layer's ``WeightState``: a weight that is never written, and whose operand is there."""

    keeps = True
    gathered = False

    def __init__(self, operand: QuantizedOperand) -> None:
        self._operand = operand

    def follow(self, weight: Tensor, training: bool) -> None:
        """As of ``WeightState``."""

    def kept(self, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        """As of ``WeightState``."""
        return self._operand


def _with_fake_tensors(model: nn.Module) -> list[Tensor]:
    """Give ``model`` fake parameters, buffers and kept operands; returns the parts of all of them.

    Amaxes and scales, whose values a layer would read, are removed.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                new = nn.Parameter(fake(param.detach()), requires_grad=param.requires_grad)
                if param.requires_grad and param.is_leaf and param.grad_dtype != param.dtype:
                    new.grad_dtype = param.grad_dtype
                if computed_dtype(param) != computed_dtype(new):
                    compute_gradient_as(new, computed_dtype(param))
                made[id(param)] = new
            module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    there = [part for tensors in (model.parameters(), model.buffers()) for t in tensors for part in parts_of_tensor(t)]
    kept = {id(plan): operand for plan, _, operand in kept_operands(model)}
    for plan in (plan for module in model.modules() for plan in gemm_plans(module).values()):
        plan.operands = {kind: replace(operand, slot=None) for kind, operand in plan.operands.items()}
        operand = kept.get(id(plan))
        plan.weight = None if operand is None else _Kept(operand)  # type: ignore[assignment]
        there += [] if operand is None else parts_of_operand(operand)
    return there


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
        rules: a context for the forward and the backward pass.
    """
    saved: dict[int, tuple[torch.dtype, int]] = {}
    with ExitStack() as stack:
        for table in (floats._table, gemm_block_scaling._grid, gradient._one):
            stack.callback(table.cache_clear)  # constants that formats keep: those that are made here have no values
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # transformers would look for several sequences in a row of a batch by the values of positions.
        masking_utils = sys.modules.get("transformers.masking_utils")  # its models have imported it
        if masking_utils is not None:
            replace_attribute(stack, masking_utils, "find_packed_sequence_indices", lambda positions: None)
        there = _with_fake_tensors(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        sizes = {} if stored_as is None else {id(p): stored_as(p) for p in trained}
        alive = _Alive(there)

        def pack(tensor: Tensor) -> Tensor:
            for part in parts_of_tensor(tensor):
                saved[storage_key(part.untyped_storage())] = part.dtype, alive.size(part)
            return tensor

        entered: list[int] = []  # bytes at each block's begin
        in_blocks: list[int] = []  # the most in forward until the last block is done
        until_last: list[int] = []  # the most in backward until the last block's is done

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(alive.now)
            if module is blocks[-1]:
                leaves = tree_leaves((args, kwargs))
                inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
                for x in inputs[:1]:
                    x.register_hook(leave)

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
        for param in trained:
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
    by_format: Counter[str] = Counter()
    for dtype, size in saved.values():
        if dtype.is_floating_point:
            by_format[format_of(dtype)] += size
    formats = {name for name, size in by_format.items() if size > kept / 100}
    inside = in_blocks[0] if in_blocks else after_blocks
    phases = inside + more, after_blocks + more, max(ends) - alive.gradients
    return Traced(kept + more, phases, formats)
