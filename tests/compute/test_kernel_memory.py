"""Zeros that kernels write into, where they are captured in a CUDA graph."""

import pytest
import torch

from nemo_lowprec.kernels import memory


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(memory, "is_capturing", lambda: True)
    monkeypatch.setattr(memory, "current_stream", lambda device: 0)
    monkeypatch.setattr(memory, "_on", lambda device: torch.device("cpu"))


def storages(zeros):
    return {zero.untyped_storage().data_ptr() for zero in zeros}


def test_one_launch_of_a_graph_zeroes_many_zeros(capturing):
    with memory.capture_of_zeros():
        zeros = [memory.zero(0) for _ in range(300)]
        assert len(storages(zeros)) == 2 and len({zero.data_ptr() for zero in zeros}) == 300
    with memory.capture_of_zeros():  # another graph does not zero them
        assert not storages([memory.zero(0)]) & storages(zeros)
    assert all(zero.shape == (1,) and zero.item() == 0 and zero.data_ptr() % 16 == 0 for zero in zeros)


def test_in_the_capture_of_others_each_zero_has_its_own_memory(capturing):
    zeros = [memory.zero(0) for _ in range(3)]
    with pytest.raises(ValueError), memory.capture_of_zeros():
        raise ValueError
    zeros += [memory.zero(0) for _ in range(3)]
    assert len(storages(zeros)) == 6
