"""Who learns of a capture, and that nothing stays behind."""

import types

import pytest
import torch

from nemo_lowprec.compat.capture import end_capture, hidden_capture, is_capturing

ASK = "import torch\ndef ask(): return torch.cuda.is_current_stream_capturing()"


def module(name):
    made = types.ModuleType(name)
    exec(ASK, made.__dict__)
    return made


def test_only_torch_triton_and_this_package_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with hidden_capture():
        told = {
            name: module(name).ask()
            for name in ("torch.optim.adam", "triton", "nemo_lowprec.x", "transformers.y", "torchx")
        }
    assert told == {
        "torch.optim.adam": True, "triton": True, "nemo_lowprec.x": True, "transformers.y": False, "torchx": False
    }  # fmt: skip
    assert module("transformers.y").ask()


def test_the_answer_is_put_back_after_an_error():
    before = torch.cuda.is_current_stream_capturing
    with pytest.raises(ValueError), hidden_capture():
        raise ValueError
    assert torch.cuda.is_current_stream_capturing is before


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(), reason="asks a driver that is not there"
)
def test_no_stream_is_captured():
    assert not is_capturing()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_stream():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert is_capturing()
        with hidden_capture():
            assert is_capturing()
    assert not is_capturing()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_torch_learns_of_a_capture_that_has_failed():
    """The allocator frees cached memory and the memory of the graph, and the generator gives random numbers."""
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        values = torch.ones(2**26, device="cuda")
        with pytest.raises(RuntimeError):
            values.sum().item()
        with pytest.raises(RuntimeError):
            end_capture(graph, pool)
    del values
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 2**22
    assert torch.isfinite(torch.rand(8, device="cuda")).all()
