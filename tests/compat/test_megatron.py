"""Megatron-core's buckets of gradients, and its checkpoints."""

import inspect

import pytest

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.param_and_grad_buffer import partition_buckets

from nemo_lowprec.compat import megatron


def test_buckets_are_reduced_by_groups_of_this_class():
    assert megatron.BucketGroup.__name__ in inspect.getsource(partition_buckets)
    for method in ("start_grad_sync", "finish_grad_sync", "register_grad_ready", "reset"):
        assert callable(getattr(megatron.BucketGroup, method))


def test_writers_report_through_a_queue_of_this_process():
    make = getattr(filesystem_async, "get_write_results_queue", None)  # since 0.19
    make = make or filesystem_async._get_write_results_queue
    with megatron.written_by_this_process():
        queue = make()
        queue.put("written")
        assert make() is queue and make().get() == "written"
    assert getattr(filesystem_async, "_results_queue", None) is not queue
