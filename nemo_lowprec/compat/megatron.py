"""Megatron-core's buckets of gradients, and its checkpoints."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import param_and_grad_buffer

BucketGroup = param_and_grad_buffer._ParamAndGradBucketGroup


@contextmanager
def written_by_this_process() -> Iterator[None]:
    """Make Megatron-core's writing processes report through a queue of this process, which waits for them.

    Megatron-core's own queue lives in one more process, for writing in the background. That process takes seconds to
    start, and outlives a kill of this process.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
