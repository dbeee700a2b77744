"""One pass of a block as two CUDA graphs, and the autograd function that replays them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from nemo_lowprec.compat.autograd import graph_of, keeps_graph
from nemo_lowprec.compat.capture import end_capture, hidden_capture
from nemo_lowprec.compat.compiler import overwriting_saved_tensors, without_compiling
from nemo_lowprec.compat.modules import is_compiled
from nemo_lowprec.compat.tensors import storage_use_count, tree_unflatten
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.graphs.constants import known_integers_of
from nemo_lowprec.compute.graphs.gradients import WrittenGradients
from nemo_lowprec.compute.graphs.inputs import CONSTANTS, Unfit, described, flatten
from nemo_lowprec.compute.graphs.layers import Layers
from nemo_lowprec.compute.graphs.lent import Lent, Loans
from nemo_lowprec.compute.graphs.pool import GraphPool
from nemo_lowprec.compute.graphs.quantized_gradients import QuantizedGradients
from nemo_lowprec.compute.graphs.twins import grad_buffers, twin_of, with_twins
from nemo_lowprec.kernels.memory import capture_of_zeros
from nemo_lowprec.observers import Observers
from nemo_lowprec.tensors import stored_data

_SAVES_OTHERWISE = "it recomputes or offloads activations"


class CapturedPass:
    """The forward and the backward pass of a block for arguments of one key.

    The pass of a whole model shares its memory with no pass of another block. As without graphs, backward writes
    gradients and temporary tensors into memory that activations have left. The next forward pass overwrites that
    memory: before the forward pass, gradients that parameters still have are copied (``gives_gradients_up``).

    Args:
        run: the block's own forward.
        leaves, structure: the arguments of the call, from ``inputs.flatten``; tensors are copied, not held.
        block: the module.
        layers: of the block. What they read must be the same objects whenever the graphs run.
        pool: of the model.
        is_whole: whether the block is a whole model, of which the host may read what it makes of constants alone.
        observers: of the engine; they are told in the capture, where their kernels are captured, too.
        beside: another pass of the same block. The graphs of the two passes take turns, and share their memory.

    Raises:
        Unfit: the block did what a graph cannot do.

    Attributes:
        params: the block's parameters that require a gradient.
        is_compiled: whether a module of the block is compiled.
        number: counts the passes of the pool, in the order of their capture.
        shares_memory: whether the passes of other blocks have the same memory.
        first: whether the pass is the first one of its memory, or has the memory of a pass that it replaces.
        runs: forward passes so far.
        recomputes: whether backward computes activations anew.
    """

    recomputes = False

    def __init__(
        self,
        run: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        block: nn.Module,
        layers: Layers,
        pool: GraphPool,
        is_whole: bool,
        observers: Observers,
        beside: CapturedPass | None = None,
    ) -> None:
        self.pool, self._all_params = pool, list(block.parameters())
        self.params = [param for param in self._all_params if param.requires_grad]
        self.number = pool.add(self)
        self._leaves = [self._copied(i, leaf) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
        self.is_compiled = any(map(is_compiled, block.modules()))
        self._tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._trained = [i for i in self._tensors if leaves[i].requires_grad]
        self._waits: Any = None  # the token of the pass that waits for its backward pass, held weakly
        self.runs = 0
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # The gradients of arguments would be overwritten, and compiled code writes into what it has saved.
        self.shares_memory = not is_whole or bool(self._trained) or self.is_compiled or self.recomputes
        if self.shares_memory or beside is None:
            self._memory, self._memory_of_backward, self.first = self._take_memory()
            alone = not self.shares_memory
            self._results, self._gradients = (Loans(), Loans()) if alone else (pool.results, pool.gradients)
            self._mates = weakref.WeakSet([self])  # the passes whose graphs take turns
        else:
            self._memory, self._memory_of_backward, self.first = beside._memory, beside._memory_of_backward, True
            self._results, self._gradients, self._mates = beside._results, beside._gradients, beside._mates
            self._mates.add(self)
        self._buffers = list(block.buffers())
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._offset = 0  # of the random numbers of the last forward pass
        twins = [twin_of(param) for param in self._all_params]
        own = [twin for twin in twins if twin.requires_grad]
        # Not in memory that graphs share: they live from backward to the optimizer's step, while other graphs run.
        self._grads: list[Tensor | None] = (
            grad_buffers(own, self.params, layers.beside()) if self.shares_memory else [None] * len(own)
        )
        self._in_fp8 = QuantizedGradients(self.params, observers)
        with self._capturing(), with_twins(block, self._all_params, twins):
            self._capture_forward(run, structure, own, block if is_whole else None)
            self._lent_outputs = Lent(self._outputs)  # before backward frees what forward has saved of them
            self._capture_backward(own)
        self._lent_grads = Lent(self._grad_inputs, self._grad_outputs)
        self._alone: list[int] | None = None  # holders of each gradient's memory, counted at the first backward pass
        self._reads, self._pointers = layers.reads(), self._addresses()

    def _take_memory(self) -> tuple[Any, Any, bool]:
        """(handles of the memory of both graphs, whether no graph was captured there before)."""
        return self.pool.memory(self.shares_memory)

    def _static(self, role: str, place: int, tensor: Tensor) -> Tensor:
        """Memory for a tensor with this place among the arguments, the results, or the gradients of either."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.pool.device)

    def _copied(self, i: int, leaf: Tensor) -> Tensor:
        """A leaf of the capture that holds a copy of an argument."""
        static = self._static("argument", i, leaf)
        static.detach().copy_(leaf.detach())
        return static.requires_grad_(leaf.requires_grad)

    def _placed(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of arguments, where the replay finds them. Within the capture of backward."""
        if self.is_compiled:  # backward may have computed them in memory that the forward pass writes
            return [None if grad is None else grad.clone() for grad in grads]
        return grads

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Context of a capture."""
        collects = gc.isenabled()
        gc.disable()  # to free another model's graph would end the capture
        torch.cuda.synchronize()
        if self.first:
            torch.cuda.empty_cache()  # a capture can neither use nor free the memory that the allocator has cached
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        # A cast that autocast has kept from before would be of this pass for ever.
        torch.clear_autocast_cache()
        try:
            with torch.cuda.stream(self.pool.stream), torch.enable_grad():
                yield
        except Exception as error:
            self.pool.renew()
            if isinstance(error, Unfit):
                raise
            raise Unfit(f"its capture failed ({type(error).__name__}: {str(error).splitlines()[0][:120]})") from error
        finally:
            if collects:
                gc.enable()
            torch.clear_autocast_cache()  # the casts of this pass are in the graph's memory
            torch.cuda.current_stream().wait_stream(self.pool.stream)

    def _capture_forward(
        self, run: Callable[..., Any], structure: Any, own: list[nn.Parameter], whole: nn.Module | None
    ) -> None:
        versions = [self._leaves[i]._version for i in self._tensors]
        args, kwargs = tree_unflatten(self._leaves, structure)
        with (
            _recording(self._forward, self._memory),
            disable_saved_tensors_hooks(_SAVES_OTHERWISE),
            hidden_capture(),
            without_compiling(),
            nullcontext() if whole is None else known_integers_of(whole),
        ):
            result = run(*args, **kwargs)
        if versions != [self._leaves[i]._version for i in self._tensors]:
            raise Unfit("it writes into its arguments")
        self._result, self._structure = flatten(result)
        places = {id(self._leaves[i]): i for i in self._tensors}
        # A result that is an argument is the caller's own.
        self._given = {j: places[id(leaf)] for j, leaf in enumerate(self._result) if id(leaf) in places}
        self._fresh = [j for j, leaf in enumerate(self._result) if isinstance(leaf, Tensor) and j not in self._given]
        self._outputs: list[Tensor] = [self._result[j] for j in self._fresh]
        others = [leaf for leaf in self._result if not isinstance(leaf, Tensor | CONSTANTS)]
        if others:
            raise Unfit(f"it returns {described(others[0])}")
        if any(type(out) is not Tensor or not out.is_cuda for out in self._outputs):
            raise Unfit("it returns a tensor that is not on the GPU, or of a class of its own")
        if len({out.untyped_storage().data_ptr() for out in self._outputs}) != len(self._outputs):
            raise Unfit("its results share their memory")
        known = {id(t) for t in (*own, *(self._leaves[i] for i in self._trained))}
        nodes, trained = graph_of(self._outputs)
        if any(id(leaf) not in known for leaf in trained):
            raise Unfit("it reads a trained tensor that is none of its parameters")
        if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
            raise Unfit(_SAVES_OTHERWISE)

    def _capture_backward(self, own: list[nn.Parameter]) -> None:
        self._with_gradient = [j for j, out in enumerate(self._outputs) if out.requires_grad]
        outputs = [self._outputs[j] for j in self._with_gradient]
        if not outputs:
            raise Unfit("no result has a gradient")
        self._grad_outputs = [self._static("result gradient", i, like(out)).zero_() for i, out in enumerate(outputs)]
        wanted = [*(self._leaves[i] for i in self._trained), *own]
        # The forward pass that captures is under autocast, and loops call ``backward`` outside of it.
        with AutocastOff("cuda"), _recording(self._backward, self._memory_of_backward), overwriting_saved_tensors():
            # Where other graphs share the memory, the graph of autograd is kept, and with it what backward reads.
            found: list[Tensor | None] = list(
                torch.autograd.grad(
                    outputs, wanted, self._grad_outputs, self.shares_memory and not self.recomputes, allow_unused=True
                )
            )
            self._grad_inputs, found = self._placed(found[: len(self._trained)]), found[len(self._trained) :]
            others = [t.data_ptr() for t in (*self._grad_outputs, *self._grad_inputs) if t is not None]
            # The forward graph of a pass that recomputes has the same memory, and would overwrite gradients in it.
            first = self.first and not self.recomputes
            self._written = WrittenGradients(found, self._grads, others, first)
            self._in_fp8.quantize(self._written.written)
        self._grads = self._written.outside()

    # Passes

    def fits(self, reads: list[Any]) -> bool:
        """Whether everything that the graphs read is still where it was."""
        return all(map(is_, reads, self._reads)) and self._pointers == self._addresses()

    def _addresses(self) -> list[int]:
        return [stored_data(param).data_ptr() for param in self._all_params]

    def gives_gradients_up(self) -> bool:
        """Whether the forward pass may run: it overwrites no gradient that somebody holds.

        A parameter whose gradient is of an earlier micro-batch, to which autograd adds, gets a copy of the gradient.
        """
        return self.shares_memory or all([mate._gives_own_gradients_up() for mate in self._mates])

    def _gives_own_gradients_up(self) -> bool:
        self._copy_gradients()
        if self._alone is None:
            return True
        pairs = zip(self._grads, self._alone, strict=True)
        return all(grad is None or storage_use_count(grad) <= alone for grad, alone in pairs)

    def _copy_gradients(self) -> None:
        """Give each parameter whose gradient lies where backward writes a copy of the gradient."""
        for param, grad in zip(self.params, self._grads, strict=True):
            if grad is not None and type(param.grad) is Tensor and param.grad.data_ptr() == grad.data_ptr():
                param.grad = param.grad.clone()

    @property
    def waits(self) -> bool:
        """Whether the last forward pass waits for its backward pass."""
        return self._waits is not None and self._waits() is not None

    def may_run(self) -> bool:
        """Whether the forward pass overwrites nothing that a pass which waits for its backward pass has kept."""
        return not any([mate.waits for mate in self._mates]) and self.pool.may_run(self.number)

    def versions(self) -> list[int]:
        """Versions of the parameters that require a gradient: they count writes."""
        return [param._version for param in self.params]

    def check_unwritten(self, versions: list[int]) -> None:
        """Raises RuntimeError where parameters were written since the forward pass, when they had ``versions``."""
        if versions != self.versions():
            raise RuntimeError(
                "One of the parameters needed for gradient computation has been modified by an inplace operation "
                "since the forward pass of its block."
            )

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the forward pass for these arguments."""
        return self._result_of(_Replay, leaves)

    def _result_of(self, function: Any, leaves: list[Any]) -> Any:
        """The results of the block, by an autograd function that runs the pass."""
        trained = [leaves[i] for i in self._trained]
        outputs = function.apply(self, leaves, *trained, *self.params)
        result = list(self._result)
        for j, out in zip(self._fresh, outputs, strict=True):
            result[j] = out
        for j, i in self._given.items():
            result[j] = leaves[i]
        return tree_unflatten(result, self._structure)

    def run_forward(self, leaves: list[Any]) -> tuple[_Waiting, tuple[Tensor, ...]]:
        """Replay the forward pass. Returns the token of the pass, and the results."""
        self._copy_arguments(leaves)
        self._offset = self._generator.get_offset()
        outputs = self._results.written_by(self.number, self._lent_outputs, self._forward.replay)
        token = _Waiting(self)
        self._waits = weakref.ref(token)
        self.runs += 1
        return token, tuple(outputs)  # type: ignore[arg-type]

    def _copy_arguments(self, leaves: list[Any]) -> None:
        for i in self._tensors:
            self._leaves[i].detach().copy_(leaves[i])

    @contextmanager
    def _as_before(self, offset: int) -> Iterator[None]:
        """Context of a replay of a forward pass that ran before, and whose random numbers began at ``offset``."""
        buffers, now = [buffer.clone() for buffer in self._buffers], self._generator.get_offset()
        self._generator.set_offset(offset)
        yield
        self._generator.set_offset(now)
        for buffer, values in zip(self._buffers, buffers, strict=True):
            buffer.copy_(values)

    def _replay_backward(self) -> list[Tensor | None]:
        """Replay the backward pass. Returns the gradients of the arguments that require one."""
        return self._gradients.written_by(self.number, self._lent_grads, self._backward.replay)

    def run_backward(self, grads: Sequence[Tensor | None], again: bool) -> list[Tensor | None]:
        """Replay the backward pass. Returns the gradients of the arguments that require one, and of the parameters.

        Args:
            grads: of the results.
            again: whether another backward pass may follow.
        """
        for static, j in zip(self._grad_outputs, self._with_gradient, strict=True):
            grad = grads[j]
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        if self._alone is None:
            # Not earlier: right after the capture autograd's thread, which is this one, may still hold the gradients.
            self._alone = [0 if grad is None else storage_use_count(grad) for grad in self._grads]
        held = self._held_gradients(self._alone) if self.shares_memory else [None] * len(self._grads)
        self._in_fp8.hold()
        found = self._replay_backward()
        self._waits = None
        self._written.move()
        for buffer, values in zip(self._grads, held, strict=True):
            if buffer is None or values is None:
                found.append(None if buffer is None else buffer.detach())
            else:
                found.append(buffer.clone())
                buffer.copy_(values)
        if again and not self.shares_memory:
            found = [None if grad is None else grad.clone() for grad in found]
            with self._as_before(self._offset):  # the backward pass has overwritten activations
                self._results.written_by(self.number, self._lent_outputs, self._forward.replay)
        self._in_fp8.offer(found[len(self._trained) :])
        return found

    def _held_gradients(self, alone: list[int]) -> list[Tensor | None]:
        """Copies of those gradients of an earlier pass, in the memory that backward writes, that somebody holds."""
        copies: list[Tensor | None] = []
        self._copy_gradients()
        for buffer, count in zip(self._grads, alone, strict=True):
            held = buffer is not None and storage_use_count(buffer) > count
            copies.append(buffer.clone() if buffer is not None and held else None)
        return copies


class _Waiting:
    """A forward pass that waits for its backward pass, until the graph of autograd that holds this object is freed."""

    def __init__(self, captured: CapturedPass) -> None:
        self.captured, self.run = captured, captured.runs + 1
        self.is_over = False  # no other backward pass may follow
        self.weights = captured.versions()
        captured.pool.begin(captured.number)
        self.end = weakref.finalize(self, captured.pool.end, captured.number)


class _Replay(torch.autograd.Function):
    """(the pass, its arguments, those of them with a gradient, the parameters) to the results."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedPass, leaves: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.token, outputs = captured.run_forward(leaves)
        ctx.mark_non_differentiable(*(o for j, o in enumerate(outputs) if j not in captured._with_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        token: _Waiting = ctx.token
        captured = token.captured
        refuse_second_order()
        if token.run != captured.runs:
            raise RuntimeError(
                "A second backward pass through a block whose CUDA graph has run again since. Pass graphs=False."
            )
        if token.is_over:
            raise RuntimeError(
                "A second backward pass through a block that runs as a CUDA graph. Pass retain_graph=True to the first."
            )
        if captured.is_compiled and not token.end.alive:
            raise RuntimeError(
                "A second backward pass through compiled code, which has overwritten the tensors that it had saved. "
                "Pass graphs=False, and set torch._functorch.config.donated_buffer=False before compilation."
            )
        captured.check_unwritten(token.weights)
        again = keeps_graph()
        found = captured.run_backward(grads, again)
        token.is_over = not again
        token.end()
        return None, None, *found


def refuse_second_order() -> None:
    """Raises RuntimeError where backward is to make a graph of its own."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True reaches a block that runs as a CUDA graph. Pass graphs=False.")


def like(tensor: Tensor) -> Tensor:
    """A tensor without memory that has the shape and the strides of a copy of ``tensor``."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    # Only this thread: others may copy batches to the GPU.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        with capture_of_zeros():
            yield
    except BaseException:
        with suppress(RuntimeError):  # says only that the capture has failed
            end_capture(graph, pool)
        raise
    end_capture(graph, pool)
