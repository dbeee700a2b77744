"""Parallel sizes, Megatron-core's groups of them, and the part of a sequence that a process has."""

from datetime import timedelta

import pytest
import torch

from nemo_lowprec.compat.distributed import timeout_of
from nemo_lowprec.megatron import ParallelLayout
from nemo_lowprec.megatron.context import over_context, part_of_sequence, zigzag
from tests.processes import on_processes

NAMES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}


@pytest.mark.parametrize("value", [0, -2, 1.5, "2", True])
@pytest.mark.parametrize("size", NAMES)
def test_a_size_is_a_positive_integer(size, value):
    with pytest.raises(ValueError, match=f"{NAMES[size]}={value!r} must be an integer of at least 1"):
        ParallelLayout(**{size: value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 2, "sequence_parallel": 1}, "sequence_parallel=1 must be True or False"),
        ({"sequence_parallel": True}, "tensor_model_parallel_size is 1. Leave it out"),
        ({"pipeline": 2, "virtual_pipeline": 1}, "virtual_pipeline_model_parallel_size=1 .*use 2 or more"),
        ({"virtual_pipeline": 2}, "pipeline_model_parallel_size is 1. Use at least 2, or leave it out"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({}, 1),
        ({}, 3),
        ({"tensor": 4, "pipeline": 4, "virtual_pipeline": 5, "context": 2, "sequence_parallel": True}, 64),
        ({"tensor": 2, "expert": 2}, 4),
        ({"context": 2, "expert": 2}, 2),
    ],
)
def test_a_world_that_the_sizes_fit_into(sizes, world):
    ParallelLayout(**sizes).check_world(world)


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tensor": 2}, 1, r"tensor \(2\) x pipeline \(1\) x context \(1\) parallelism takes 2 .* the 1 of this run"),
        ({"tensor": 2, "pipeline": 2, "context": 2}, 12, "takes 8 processes, which does not divide the 12"),
        ({"expert": 2}, 3, r"expert \(2\) parallelism takes 2 processes, which does not divide the 3"),
        ({"tensor": 2, "expert": 2}, 2, r"tensor \(2\) x pipeline \(1\) x expert \(2\) parallelism takes 4"),
    ],
)
def test_a_world_that_they_do_not(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes).check_world(world)


def test_micro_batches_that_interleave():
    layout = ParallelLayout(pipeline=4, virtual_pipeline=2)
    for count in (4, 16, 0):
        layout.check_micro_batches(count, "A step")
    with pytest.raises(ValueError, match=r"A step has 6 micro-batches, .* pipeline_model_parallel_size=4"):
        layout.check_micro_batches(6, "A step")
    ParallelLayout(pipeline=4).check_micro_batches(6, "A step")


def test_pipelines_send_as_megatron_lm_has_it():
    fields = ParallelLayout(pipeline=2, virtual_pipeline=2).fields()
    assert (fields["overlap_p2p_comm"], fields["batch_p2p_comm"]) == (True, False)
    fields = ParallelLayout(pipeline=2).fields()
    assert "overlap_p2p_comm" not in fields and fields["deallocate_pipeline_outputs"]
    assert "deallocate_pipeline_outputs" not in ParallelLayout(tensor=2).fields()


def ranks():
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]


def job(rank):
    """Groups of several sizes, one after the other; and the parts of a batch with and without context parallelism."""
    from megatron.core import parallel_state

    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8) + 1}
    found = {"whole": None, "sizes": [], "kept": [], "counts": [], "timeouts": []}
    for layout in (ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)):
        layout.initialize()
        found["sizes"].append(ranks())
        group = parallel_state.get_model_parallel_group()
        layout.initialize()
        found["kept"].append(parallel_state.get_model_parallel_group() is group)
        found["whole"] = found["whole"] or part_of_sequence(batch)
        found["counts"].append(int(over_context(torch.tensor(rank + 1))))
    part = part_of_sequence(batch)
    for timeout in (timedelta(seconds=77), timedelta(seconds=78)):
        layout.initialize(timeout)
        groups = parallel_state.get_data_parallel_group(), parallel_state.get_context_parallel_group()
        found["timeouts"] += [timeout_of(group, torch.device("cpu")).total_seconds() for group in groups]
    return {**found, "part": part}


def test_groups_are_made_once_for_each_size(tmp_path):
    for rank, found in enumerate(on_processes(2, tmp_path, job)):
        assert found["sizes"] == [[1, 1, 1, 2], [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1]]
        assert found["kept"] == [True] * 4
        assert found["timeouts"] == [77, 77, 78, 78]
        assert found["counts"] == [rank + 1] * 3 + [3]
        assert found["whole"]["input_ids"].tolist() == [list(range(8)), list(range(8, 16))]
        first = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert found["part"]["input_ids"].tolist() == [first, [token + 8 for token in first]]
        assert torch.equal(found["part"]["labels"], found["part"]["input_ids"] + 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_parts_together_are_the_sequence(world):
    sequence = torch.randint(0, 1000, (3, 8 * world))
    parts = [zigzag(sequence, rank, world) for rank in range(world)]
    assert all(part.shape == (3, 8) for part in parts)
    fronts = [part[:, :4] for part in parts]
    backs = [part[:, 4:] for part in reversed(parts)]
    assert torch.equal(torch.cat([*fronts, *backs], dim=1), sequence)


def test_the_parts_are_equal_work():
    position = torch.arange(1, 33)[None]  # with causal attention a token attends to so many
    assert len({int(zigzag(position, rank, 4).sum()) for rank in range(4)}) == 1


def test_a_sequence_that_does_not_divide():
    with pytest.raises(ValueError, match=r"Sequences of 10 tokens .* context_parallel_size=2 "):
        zigzag(torch.zeros(1, 10), 0, 2)
