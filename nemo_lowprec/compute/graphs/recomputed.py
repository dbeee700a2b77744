"""One pass of a block as two CUDA graphs, which keeps only the block's arguments from forward to backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.graphs.captured import CapturedPass, like, refuse_second_order
from nemo_lowprec.compute.graphs.inputs import flatten
from nemo_lowprec.compute.graphs.lent import Lent


class RecomputedPass(CapturedPass):
    """The forward and the backward pass of a block; backward replays the forward pass before.

    The passes of all blocks have the same memory, in which nothing outlives a replay: gradients of parameters are
    copied into their buffers, and arguments and results into tensors that the passes share, too.
    """

    recomputes = True

    def _take_memory(self) -> tuple[Any, Any, bool]:
        return self.pool.memory_for_one(self)

    def _static(self, role: str, place: int, tensor: Tensor) -> Tensor:
        return self.pool.static((role, place), tensor)

    def _capture_forward(self, run: Callable[..., Any], structure: Any, own: Any, whole: Any) -> None:
        def run_and_copy(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            self._copies = {
                j: self._static("result", j, like(leaf)).copy_(leaf.detach())
                for j, leaf in enumerate(flatten(result)[0])
                if isinstance(leaf, Tensor)
            }
            return result

        super()._capture_forward(run_and_copy, structure, own, whole)

    def _capture_backward(self, own: Any) -> None:
        super()._capture_backward(own)
        # The memory of activations and results is for the next capture.
        self._outputs, self._lent_outputs = [], Lent([])
        self._result = [None if isinstance(leaf, Tensor) else leaf for leaf in self._result]

    def _placed(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        return [
            None if grad is None else self._static("argument gradient", i, like(grad)).copy_(grad)
            for i, grad in enumerate(grads)
        ]

    # Passes

    def may_run(self) -> bool:
        return True

    def __call__(self, leaves: list[Any]) -> Any:
        return self._result_of(_Recompute, leaves)

    def run_forward(self, leaves: list[Any]) -> tuple[int, tuple[Tensor, ...]]:  # type: ignore[override]
        """Replay the forward pass. Returns where its random numbers began, and the results."""
        offset = self._generator.get_offset()
        self._replay(leaves)
        self.runs += 1
        return offset, tuple(self._copies[j].clone() for j in self._fresh)

    def run_again(self, tensors: tuple[Tensor, ...], offset: int) -> None:
        """Replay the forward pass for its backward pass, with the tensors among its arguments."""
        leaves: list[Any] = list(self._leaves)
        for i, tensor in zip(self._tensors, tensors, strict=True):
            leaves[i] = tensor
        with self._as_before(offset):
            self._replay(leaves)

    def _replay(self, leaves: list[Any]) -> None:
        self._copy_arguments(leaves)
        self._forward.replay()

    def _replay_backward(self) -> list[Tensor | None]:
        self._backward.replay()
        return [None if grad is None else grad.clone() for grad in self._grad_inputs]


class _Recompute(torch.autograd.Function):
    """(the pass, its arguments, those of them with a gradient, the parameters) to the results."""

    @staticmethod
    def forward(ctx: Any, captured: RecomputedPass, leaves: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured, ctx.weights = captured, captured.versions()
        ctx.offset, outputs = captured.run_forward(leaves)
        ctx.save_for_backward(*(leaves[i] for i in captured._tensors))
        ctx.mark_non_differentiable(*(o for j, o in enumerate(outputs) if j not in captured._with_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        captured: RecomputedPass = ctx.captured
        refuse_second_order()
        captured.check_unwritten(ctx.weights)
        captured.run_again(ctx.saved_tensors, ctx.offset)
        return None, None, *captured.run_backward(grads, again=False)
