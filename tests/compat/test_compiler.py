import sys

import pytest
import torch

from nemo_lowprec.compat import compiler


def test_a_tensor_keeps_its_address():
    tensor = torch.zeros(1)
    compiler.keep_address(tensor)
    assert tensor._dynamo_static_input_type == "unguarded"


def test_cuda_graphs_are_recorded_where_inductors_configuration_says_so():
    config = pytest.importorskip("torch._inductor.config")
    assert not compiler.records_cuda_graphs()
    with config.patch({"triton.cudagraphs": True}):
        assert compiler.records_cuda_graphs()
    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}


def test_without_inductor_no_cuda_graphs_are_recorded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    assert not compiler.records_cuda_graphs()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_hook_runs_outside_of_graphs():
    seen = []

    @compiler.outside_graphs
    def hook(*_):
        seen.append(torch.compiler.is_compiling())

    model = torch.nn.Linear(2, 2)
    model.register_forward_pre_hook(hook)
    model(torch.ones(1, 2))
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    assert seen == [False, False] and hook.__name__ == "hook"


@pytest.mark.usefixtures("fresh_compiler")
def test_code_that_would_have_to_be_compiled_is_an_error():
    compiled = torch.compile(torch.sin, backend="eager", dynamic=False)
    ones = torch.ones(2)
    compiled(ones)
    with compiler.without_compiling():
        assert torch.equal(compiled(ones), ones.sin())
        with pytest.raises(RuntimeError, match="recompile"):
            compiled(torch.ones(3))


def test_inductor_donates_saved_tensors_but_where_they_may_be_overwritten():
    """What then runs is in ``tests/compute/test_compiled.py``."""
    from torch._functorch import config

    assert config.donated_buffer
    with compiler.overwriting_saved_tensors():
        assert not config.donated_buffer
    assert config.donated_buffer
