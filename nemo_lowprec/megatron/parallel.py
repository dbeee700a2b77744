"""How a model is spread over processes: Megatron-core's parallel sizes, checked before anything is built."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nemo_lowprec.arguments import AtLeast1, check_value


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of Megatron-core's process groups; the world divided by tensor x pipeline x context is data-parallel.

    The attributes are the arguments of ``MegatronStrategy``, such as ``tensor_model_parallel_size``.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_value("sequence_parallel", self.sequence_parallel, bool)
        for argument, size in self.sizes().items():
            if size is not None:
                check_value(argument, size, AtLeast1)
        if self.virtual_pipeline is not None:
            if self.virtual_pipeline < 2:
                raise ValueError(
                    f"virtual_pipeline_model_parallel_size={self.virtual_pipeline} gives each process one part of the "
                    "layers, as without it. Leave it out, or use 2 or more."
                )
            if self.pipeline < 2:
                raise ValueError(
                    f"virtual_pipeline_model_parallel_size={self.virtual_pipeline} interleaves the stages of a "
                    "pipeline, and pipeline_model_parallel_size is 1. Use at least 2, or leave it out."
                )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "sequence_parallel=True shares the sequence among tensor-parallel processes, and "
                "tensor_model_parallel_size is 1. Leave it out."
            )

    def check_world(self, world: int) -> None:
        """Raise ValueError where the sizes do not divide ``world``, the number of processes."""
        # Megatron-core splits each expert over the tensor-parallel processes, too.
        for kind, size in (("context", self.context), ("expert", self.expert)):
            taken = self.tensor * self.pipeline * size
            if world % taken:
                raise ValueError(
                    f"tensor ({self.tensor}) x pipeline ({self.pipeline}) x {kind} ({size}) parallelism takes "
                    f"{taken} processes, which does not divide the {world} of this run."
                )

    def check_micro_batches(self, count: int, what: str) -> None:
        """Raise ValueError where ``what``, a step of ``count`` micro-batches, does not fit the interleaved schedule."""
        if self.virtual_pipeline is not None and count % self.pipeline:
            raise ValueError(
                f"{what} has {count} micro-batches, and the interleaved schedule takes a multiple of "
                f"pipeline_model_parallel_size={self.pipeline}."
            )

    def sizes(self) -> dict[str, int | None]:
        """The sizes under Megatron-core's names."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
        }

    def fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig."""
        fields = {**self.sizes(), "sequence_parallel": self.sequence_parallel}
        if self.virtual_pipeline is not None:
            # As in Megatron-LM: with two stages, a batch of messages would mix up the two directions.
            fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        elif self.pipeline > 1:
            fields["deallocate_pipeline_outputs"] = True  # the next stage has received the outputs
        return fields

    def initialize(self, timeout: timedelta | None = None) -> None:
        """Make Megatron-core's process groups over torch's default group; other groups are destroyed.

        Args:
            timeout: of the groups' collectives; None for Megatron-core's default.
        """
        from megatron.core import parallel_state

        global _groups_of
        sizes = self.sizes()
        if parallel_state.model_parallel_is_initialized():
            if _groups_of == (sizes, timeout):
                return
            if "transformer_engine" in sys.modules:
                # Transformer Engine would go on reducing the amaxes of earlier models over the destroyed groups.
                importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
            parallel_state.destroy_model_parallel()
        waits = {} if timeout is None else {"distributed_timeout_minutes": timeout.total_seconds() / 60}
        parallel_state.initialize_model_parallel(**sizes, **waits)
        _groups_of = sizes, timeout


_groups_of: tuple[dict[str, Any], timedelta | None] | None = None  # the sizes and the timeout of this process's groups
