"""The kernels around attention: rotary embeddings and joined gradients, bit for bit what plain torch gives."""

import itertools

import pytest
import torch
from support import kernels_or_skip
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.modernbert import modeling_modernbert
from transformers.models.qwen2_vl import modeling_qwen2_vl

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import convert_layers
from nemo_lowprec.compute import rotary as rotaries
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.operands import new_histories, operand_of
from nemo_lowprec.compute.patterns.rotary import form_of
from nemo_lowprec.compute.rotary import FusedRotary
from nemo_lowprec.formats import E5M2, cast, compute_amax
from nemo_lowprec.kernels.loader import join_kernels, rotary_kernels
from tests.attention_models import Attention, Window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# (batch, tokens, query heads, key heads, dim, rotary dim)
SIZES = [
    (2, 128, 8, 2, 128, 128),
    (1, 37, 3, 1, 64, 64),
    (3, 5, 2, 2, 80, 80),
    (2, 19, 4, 4, 96, 32),
    (1, 1, 1, 1, 8, 2),
]
LAYOUTS = list(itertools.product(("halves", "pairs"), ("halves", "pairs"), ("halves", "pairs", "first")))


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(rotary_kernels())


@pytest.fixture(scope="module")
def joins():
    return kernels_or_skip(join_kernels())


def tensors_of(size, dtype, factors, batches):
    batch, tokens, heads, key_heads, dim, rotary = size
    torch.manual_seed(tokens)
    q = torch.randn(batch, tokens, heads * dim, device="cuda").to(dtype).view(batch, tokens, heads, dim).transpose(1, 2)
    k = torch.randn(batch, key_heads, tokens, dim, device="cuda").to(dtype)
    cos, sin = (torch.randn(batches, tokens, rotary, device="cuda").to(factors) for _ in range(2))
    return [q, k], cos, sin


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True], ids=["half cos", "FP32 cos"])
@pytest.mark.parametrize("backward", [False, True])
def test_every_form_is_the_definition(kernels, size, dtype, mixed, backward):
    for batches in {1, size[0]}:
        tensors, cos, sin = tensors_of(size, dtype, torch.float32 if mixed else dtype, batches)
        for layouts, rounds, out in itertools.product(LAYOUTS, (True, False), (dtype, torch.float32)):
            if out == torch.float32 and (rounds or backward or not mixed):
                continue  # no model computes so
            how = (1, cos, sin, layouts, rounds, backward, out)
            got = rotaries._rotated(tensors, *how)
            want = [rotaries._by_torch(t, *how) for t in tensors]
            one = rotaries._rotated(tensors[:1], *how)
            for g, w in zip([*got, *one], [*want, want[0]], strict=True):
                assert g.dtype == out and torch.equal(g, w), (layouts, rounds, out, (g.float() - w.float()).abs().max())
                assert g.transpose(1, 2).is_contiguous()


FUNCTIONS = [
    modeling_llama.apply_rotary_pos_emb, modeling_modernbert.apply_rotary_pos_emb,
    modeling_qwen2_vl.apply_rotary_pos_emb_vision,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__module__.rpartition("_")[2])
@pytest.mark.parametrize("mixed", [False, True], ids=["half cos", "FP32 cos"])
def test_models_functions(kernels, function, mixed):
    def refuse(*args):
        raise AssertionError("not fused")

    form = form_of(function)
    tensors, cos, sin = tensors_of(SIZES[0], torch.bfloat16, torch.float32 if mixed else torch.bfloat16, 2)
    tensors = [(t if form.axis == 1 else t.transpose(1, 2)).detach().requires_grad_() for t in tensors]
    got, want = FusedRotary(refuse, form)(*tensors, cos, sin), function(*tensors, cos, sin)
    dy = [torch.randn_like(w) for w in want]
    got_grads, want_grads = (torch.autograd.grad(out, tensors, dy) for out in (got, want))
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)


def test_a_pass_is_one_launch_each_way_without_a_copy(kernels):
    form = form_of(modeling_llama.apply_rotary_pos_emb)
    tensors, cos, sin = tensors_of(SIZES[0], torch.bfloat16, torch.bfloat16, 1)
    sources = [t.transpose(1, 2).flatten(2).detach().requires_grad_() for t in tensors]
    fused = FusedRotary(modeling_llama.apply_rotary_pos_emb, form)

    def step():
        q, k = (s.view(*s.shape[:2], -1, 128).transpose(1, 2) for s in sources)
        out = fused(q, k, cos, sin)
        return torch.autograd.grad(out, sources, [o.detach() for o in out])

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 2 and all("_rotary_kernel" in name for name in launched), launched


JOINED = [(2, 64, 4, 64), (4, 197, 16, 64), (1, 37, 3, 40), (3, 5, 2, 8), (2, 49, 3, 32)]  # batch, tokens, heads, dim


def parts_of(size, dtype=torch.bfloat16):
    batch, tokens, heads, dim = size
    torch.manual_seed(tokens)
    parts = torch.randn(3, batch, tokens, heads, dim, device="cuda").to(dtype).unbind(0)
    # The gradient of k as math attention has it: heads before tokens.
    return [parts[0], parts[1].transpose(1, 2).contiguous().transpose(1, 2), parts[2]]


@pytest.mark.parametrize("size", JOINED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf")])
def test_joined_gradients(joins, size, dtype, special):
    parts = parts_of(size, dtype)
    if special is not None:
        parts[2][0, -1, -1, -1] = special
    want = torch.stack(parts, 2).flatten(2)
    rows = want.view(-1, want.shape[-1])
    assert joins.fits(parts)
    assert torch.equal(joins.join(parts).nan_to_num(-1.0), want.nan_to_num(-1.0))
    scale = torch.tensor([37.123], device="cuda")
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        record = torch.tensor([0.25], device="cuda")
        out, row, col, scale_inv, sums = joins.join_quantized(parts, scale, E5M2, rowwise, columnwise, record, True)
        data = cast(rows.float() * scale, E5M2).float().nan_to_num(-1.0)
        assert torch.equal(out.nan_to_num(-1.0), want.nan_to_num(-1.0))
        assert (row is None) is not rowwise and (col is None) is not columnwise
        if rowwise:
            assert torch.equal(row.float().nan_to_num(-1.0), data)
        if columnwise:
            assert torch.equal(col.float().nan_to_num(-1.0), data.t()) and col.is_contiguous()
        assert torch.equal(scale_inv, scale.reciprocal())
        amax = torch.maximum(compute_amax(rows).reshape(1), torch.tensor([0.25], device="cuda"))
        assert torch.equal(record.nan_to_num(-1.0), amax.nan_to_num(-1.0))
        if special is None:
            torch.testing.assert_close(sums, rows.float().sum(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [Attention, Window])
def test_a_model_trains_as_on_the_reference_backend(joins, kind):
    losses = []
    for backend in (ReferenceBackend(), ScaledMMBackend()):
        torch.manual_seed(0)
        model = nn.ModuleList([kind()]).cuda()
        recipe = Recipe("delayed")
        histories = new_histories(recipe)
        histories.to(torch.device("cuda"))
        convert_layers(model, torch.bfloat16, recipe, backend, None, LayerFilter(), histories)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 16, 48, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                out = model[0](x)
            model.zero_grad()
            out.float().pow(2).sum().backward()
            histories.update()
        losses.append([x.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(*losses, strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2 * want.abs().max().item())


def test_a_backend_joins_in_one_launch(joins):
    histories = new_histories(Recipe("delayed"))
    histories.to(torch.device("cuda"))
    histories.add_all({"x": E5M2})
    operand = operand_of(Recipe("delayed"), "grad_output", histories.slots["x"])
    parts, backend = parts_of((4, 64, 4, 64)), ScaledMMBackend()
    how = {"rowwise": True, "columnwise": True, "record": True, "sums": True}
    backend.join_gradients(parts, operand, **how)  # begins the history
    histories.update()
    for step in range(2):
        parts = [(step + 2) * part for part in parts]
        joined, data, sums = backend.join_gradients(parts, operand, **how)
        again = {**how, "record": False}
        want, _ = ReferenceBackend().quantize_grad(joined.view(-1, joined.shape[-1]), operand, **again)
        assert torch.equal(joined, torch.stack(parts, 2).flatten(2))
        assert torch.equal(data.rowwise.data.float(), want.rowwise.data.float())
        assert torch.equal(data.columnwise.data.float(), want.columnwise.data.float())
        assert torch.equal(operand.slot.amax, compute_amax(joined).reshape(1))
        histories.update()
    assert sums.shape == (3 * 256,)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # no sync
        backend.join_gradients(parts, operand, **how)
    graph.replay()
