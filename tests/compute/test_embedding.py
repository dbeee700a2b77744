"""Embeddings whose table's gradient has another dtype than the looked-up rows."""

import pytest
import torch
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.compute.embedding import LowPrecisionEmbedding, table_gradient

LEVELS = ["bf16_with_fp8_mixed", "msamp_o2", "msamp_o3"]


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(40, 32, **options)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        return self.head(self.hidden(self.table(tokens)))


def prepared(level, **options):
    torch.manual_seed(0)
    model = Model(**options)
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)


def tokens(seed=0):
    return torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_sums_in_fp32(padding, dtype):
    torch.manual_seed(0)
    grad, index = torch.randn(200, 24).bfloat16(), torch.randint(10, (200,))
    exact = torch.ops.aten.embedding_dense_backward(
        grad.double(), index, 10, -1 if padding is None else padding, False
    )  # fmt: skip
    out = torch.full((10, 24), 3.0, dtype=dtype)
    found = table_gradient(grad, index, 10, padding, dtype, out)
    assert found.data_ptr() == out.data_ptr() and found.dtype == dtype
    assert torch.equal(found, exact.float().to(dtype))
    assert torch.equal(table_gradient(grad, index, 10, padding, dtype), found)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("padding", [None, 7])
def test_gradients_are_those_of_torch_but_for_roundings(level, padding, monkeypatch):
    found = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(LowPrecisionEmbedding, "_sums_gradient", lambda *_: False)
        model, _ = prepared(level, padding_idx=padding)
        assert isinstance(model.table, LowPrecisionEmbedding)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(tokens())
        assert (model.table(tokens()).grad_fn.name() == "_LookupBackward") is own
        out.float().square().mean().backward()
        found.append(model.table.weight.grad.float())
    ours, theirs = found
    assert ours.dtype == theirs.dtype and theirs.count_nonzero()
    torch.testing.assert_close(ours, theirs, rtol=0.13 if level.startswith("msamp") else 2**-7, atol=1e-7)
    if padding is not None:
        assert ours[padding].count_nonzero() == 0


def test_a_gradient_of_the_gradient():
    model, _ = prepared("bf16_with_fp8_mixed")
    grad = torch.ones(4, 12, 32, dtype=torch.bfloat16, requires_grad=True)
    rows = model.table(tokens())
    (found,) = torch.autograd.grad(rows, model.table.weight, grad, create_graph=True)
    (again,) = torch.autograd.grad(found.square().sum(), grad)
    count = torch.bincount(tokens().flatten(), minlength=40)[tokens()]
    assert torch.equal(again.float(), (2.0 * count)[..., None].expand_as(again).bfloat16().float())


@pytest.mark.parametrize("how", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_what_the_table_does_otherwise_stays_with_torch(how):
    model, _ = prepared("bf16_with_fp8_mixed", **how)
    assert model.table(tokens()).grad_fn.name() != "_LookupBackward"


def test_without_a_gradient_torch_looks_up():
    model, _ = prepared("bf16_with_fp8_mixed")
    with torch.no_grad():
        assert model.table(tokens()).grad_fn is None
    model.table.weight.requires_grad_(False)
    assert model.table(tokens()).grad_fn is None
