"""``activations`` on a GPU: the kernels against the reference, gradients, and the memory of a stack of blocks."""

import pytest
import torch
import torch.nn.functional as F
from support import kernels_or_skip
from torch import nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import BACKENDS, ReferenceBackend
from nemo_lowprec.engine import Engine
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.plugins import LEVELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

D, HEADS, ROWS, TOKENS, BLOCKS = 1024, 16, 16, 256, 6
CHOICES = ["fp8", "recompute", "fp8+recompute"]
SHAPES = [(33, 128), (4, 197, 384), (5, 3), (37, 129), (3, 1000), (1, 1), (2, 3, 4, 56)]


def assert_same(ours, theirs):
    """Equal values, of which a NaN may be any NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous()
    torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_give_the_references_bits(shape, dtype):
    kernels = kernels_or_skip(block_kernels())
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * torch.exp2(torch.randint(-7, 7, shape, device="cuda").float())).to(dtype)
    x.view(-1)[0] = float("inf")
    backend, plain = ReferenceBackend(), ReferenceBackend()
    on_gpu, on_cpu = backend.compress(x), plain.compress(x.cpu())
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert_same(ours, theirs)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        assert_same(backend.decompress(on_gpu, out), plain.decompress(on_cpu, out))
    slanted = x.flatten(0, -2).t().contiguous().t()  # not contiguous
    for ours, theirs in zip(backend.compress(slanted), on_cpu, strict=True):
        assert_same(ours.view(theirs.shape), theirs)
    assert kernels.dequantize(on_gpu[0][:0], on_gpu[1][:0], dtype).numel() == 0


class Block(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(D), nn.RMSNorm(D)) if gated else (nn.LayerNorm(D), nn.LayerNorm(D))
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = Gated() if gated else nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(rows, tokens, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, D))
        return x + self.mlp(self.norm2(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def start(activations, gated=False, level="bf16_with_fp8_mixed", backend="torch", **options):
    reason = BACKENDS[backend].unavailable(Recipe("delayed"))
    if reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(gated) for _ in range(BLOCKS))).cuda()
    options.setdefault("graphs", False)
    engine = LEVELS[level](backend=backend, weight_cache=False, activations=activations, **options).engine
    engine.convert(model, torch.device("cuda"))
    engine.settle()
    return model, engine


def batch():
    return torch.randn(ROWS, TOKENS, D, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()


def one_pass(model, engine):
    for p in model.parameters():
        p.grad = None
    x = batch().requires_grad_()
    with engine.forward_context():
        loss = model(x).float().pow(2).mean()
    kept = torch.cuda.memory_allocated()
    with engine.backward_context():
        engine.step.scale(loss).backward()
    return kept, [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients(gated, backend):
    found = {}
    for choice in (None, *CHOICES):
        model, engine = start(choice, gated, backend=backend)
        for _ in range(3):
            _, found[choice] = one_pass(model, engine)
    for exact, want in zip(found["recompute"], found[None], strict=True):
        # The same kernels, but for sums of a decomposed norm.
        assert torch.equal(exact, want) or (exact - want).norm() < 2e-2 * want.norm()
    for choice in ("fp8", "fp8+recompute"):
        for got, want in zip(found[choice], found[None], strict=True):
            assert (got - want).norm() < 0.2 * want.norm()


# Bytes of a token and feature that one block keeps: norms 2, inputs of qkv, proj and the MLP 1 each, q, k, v and the
# output of attention 8, and the MLP's.
UNITS = [(None, False, 2 * 2 + 3 + 8 + 8 + 4), ("fp8", False, 2 + 2 + 8 + 4 + 4), ("fp8", True, 2 + 2 + 8 + 8 + 4)]
UNITS += [("recompute", False, 2 * 2 + 8 + 8), ("recompute", True, 2 * 2 + 8 + 16)]
UNITS += [("fp8+recompute", False, 2 + 8 + 4), ("fp8+recompute", True, 2 + 8 + 8)]


@pytest.mark.parametrize("gated", [False, True])
def test_the_memory_of_a_stack_of_blocks(gated):
    unit = ROWS * TOKENS * D
    peaks, kept = {}, {}
    for choice in (None, *CHOICES):
        model, engine = start(choice, gated)
        for _ in range(2):
            one_pass(model, engine)
        for p in model.parameters():
            p.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        now, _ = one_pass(model, engine)
        peaks[choice], kept[choice] = torch.cuda.max_memory_allocated() - before, now - before
        del model, engine
    print({choice: (kept[choice] >> 20, peaks[choice] >> 20) for choice in kept})
    columnwise = sum(p.numel() for p in Block(gated).parameters() if p.dim() > 1)  # bytes of FP8 weights
    for choice, units in [(choice, units) for choice, of_gated, units in UNITS if of_gated is gated]:
        weights = 0 if choice is not None and "recompute" in choice else columnwise
        block = (kept[choice] - 4 * unit) / BLOCKS - weights  # without the input of the stack and its result
        assert units * unit <= block <= units * unit * 1.06, f"{choice}: {block / unit:.2f} in the place of {units}"
    for choice in CHOICES:
        assert peaks[choice] < 0.85 * peaks[None]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_that_run_as_cuda_graphs(choice, gated):
    plain, graphed = start(choice, gated), start(choice, gated, graphs=True)
    for _ in range(8):
        (_, want), (_, got) = one_pass(*plain), one_pass(*graphed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    blocks = [m for m in graphed[0].modules() if isinstance(m, Block)]
    assert all(type(block.__dict__.get("forward")).__name__ == "GraphedForward" for block in blocks)


@pytest.mark.parametrize("choice", CHOICES)
def test_no_pass_waits_for_the_gpu(choice):
    model, engine = start(choice, True)
    for _ in range(3):
        one_pass(model, engine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, found = one_pass(model, engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(values.float().isfinite().all() for values in found)


@pytest.mark.parametrize("level", ["msamp_o2", "msamp_o3", "te_fp8", "bf16_with_fp8_current_scaling_mixed"])
def test_levels(level):
    want = one_pass(*start(None, level=level))[1]
    for choice in CHOICES:
        got = one_pass(*start(choice, level=level))[1]
        pairs = [(torch.as_tensor(a.float()), torch.as_tensor(b.float())) for a, b in zip(got, want, strict=True)]
        assert all((a - b).norm() < (2e-2 if choice == "recompute" else 0.25) * b.norm() for a, b in pairs)
    assert Engine.of(start("fp8", level=level)[0]) is not None
