"""attention="cudnn" holds for the passes of its model, and for nothing else in the process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec import initialize
from nemo_lowprec.compute import attention, computation
from nemo_lowprec.plugins import LEVELS


class Attends(nn.Module):
    """Notes which kernels come first whenever its attention runs, in forward and in the recomputation of backward."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.seen = []

    def attend(self, x):
        self.seen.append(first())
        return F.scaled_dot_product_attention(*[self.proj(x)[None, None].float()] * 3)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)


def first():
    return torch._C._get_sdp_priority_order()[0]


CUDNN = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """cuDNN's kernels are preferred without a GPU, too, where torch takes the kernels that it has."""
    monkeypatch.setattr(computation, "check_attention", lambda *_: None)
    before = first()
    assert before != CUDNN
    yield
    assert first() == before


def test_an_engine_prefers_cudnn_in_its_passes_only():
    model, engine = Attends(), LEVELS["bf16_with_fp8_mixed"](attention="cudnn").engine
    engine.convert(model, torch.device("cpu"))
    engine.settle()
    plain = first()
    with engine.forward_context():
        loss = model(torch.randn(4, 16)).sum()
    assert first() == plain != CUDNN
    with engine.backward_context():
        loss.backward()
    assert model.seen == [CUDNN, CUDNN] and first() == plain


def test_a_plain_loop_prefers_cudnn_in_its_passes_only():
    model = Attends()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2", attention="cudnn")
    plain = first()
    for _ in range(2):
        loss = model(torch.randn(4, 16)).sum()
        assert first() == plain != CUDNN
        loss.backward()
        optimizer.step()
    assert model.seen == [CUDNN] * 4
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 3))
    assert first() == plain
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 16))
    assert first() == plain


def test_torchs_own_choice_stays_where_nobody_asks_for_cudnn():
    model = Attends()
    attention.prefer_attention_in(model, "auto")
    assert not model._forward_pre_hooks and not model._forward_hooks
