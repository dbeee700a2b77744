"""The norm kernels against FP64 and torch's norms, and the autograd function around them."""

import pytest
import torch
import torch.nn.functional as F
from support import kernels_or_skip
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec import prepare
from nemo_lowprec.compute import residual
from nemo_lowprec.compute.backends.base import NormKind, plain_norm
from nemo_lowprec.compute.norm_function import fused_norm
from nemo_lowprec.compute.patterns.norms import LowPrecisionLayerNorm
from nemo_lowprec.compute.residual import BranchOutput, as_branch
from nemo_lowprec.kernels.loader import norm_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [(12608, 1024), (8192, 4096), (16384, 768), (70, 48), (1, 16), (33, 1000), (2, 16384), (130, 5120)]
SMALL = [(70, 48), (256, 1024), (33, 1000)]
DTYPES = [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]
IDS = ["fp32-bf16", "fp32-fp16", "bf16", "fp16"]
# (LayerNorm?, has a weight, has a bias, is zero-centered)
KINDS = {
    "layer": (True, True, True, False),
    "layer-no-bias": (True, True, False, False),
    "layer-plain": (True, False, False, False),
    "rms": (False, True, False, False),
    "rms-plain": (False, False, False, False),
    "rms-zero-centered": (False, True, False, True),
}
EPS = 1e-5

by_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=IDS)
# Each compiled variant takes seconds: all sizes with two kinds of norm, all kinds at one size.
CASES = [(kind, dtypes, shape) for shape in SIZES for kind, dtypes in (("layer", (FP32, BF16)), ("rms", (BF16, BF16)))]
CASES += [(kind, dtypes, (256, 1024)) for kind in KINDS for dtypes in DTYPES]
by_case = pytest.mark.parametrize(("kind", "dtypes", "shape"), CASES, ids=str)


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(norm_kernels())


class Case:
    """A norm's input and parameters, and how the kernels are called with them."""

    def __init__(self, kernels, kind, shape, dtypes, param_dtype=FP32):
        self.layer, has_weight, has_bias, self.zero_centered = KINDS[kind]
        self.kernels, (self.dtype, self.out) = kernels, dtypes
        generator = torch.Generator("cuda").manual_seed(sum(shape))

        def values(*size):
            return torch.randn(size, device="cuda", generator=generator)

        rows, cols = shape
        self.x = (values(rows, cols) * 3 + 0.5).to(self.dtype)
        self.grad = values(rows, cols).to(self.out)
        center = 0.0 if self.zero_centered else 1.0
        self.weight = (values(cols) * 0.3 + center).to(param_dtype) if has_weight else None
        self.bias = values(cols).to(param_dtype) if has_bias else None
        self.kind = NormKind((cols,), EPS, self.layer, self.zero_centered)

    def forward(self, **how):
        return self.kernels.forward(
            self.x, self.weight, self.bias, EPS, self.layer, self.zero_centered, self.out, True, **how
        )

    def backward(self, stats, **how):
        needs = True, self.weight is not None, self.bias is not None
        dtypes = tuple(None if p is None else p.dtype for p in (self.weight, self.bias))
        return self.kernels.backward(
            self.grad, self.x, self.weight, self.bias, stats, self.layer, self.zero_centered, needs, dtypes, **how
        )

    def leaves(self, dtype):
        """Input and parameters as leaves in ``dtype``; the parameters are rounded to the input's dtype, as in torch."""
        rounded = (t if t is None else t.to(self.dtype).to(dtype) for t in (self.x, self.weight, self.bias))
        return [t if t is None else t.requires_grad_() for t in rounded]

    def exact(self, x, weight, bias):
        factor = 1 + weight if self.zero_centered else weight
        if self.layer:
            return F.layer_norm(x, x.shape[-1:], factor, bias, EPS)
        return F.rms_norm(x, x.shape[-1:], factor, EPS)


def assert_same_bits(got, want):
    """Equal bits, except that a NaN may be any NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    same = got.contiguous().view(bits) == want.contiguous().view(bits)
    same |= got.float().isnan() & want.float().isnan()
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


def assert_rounded(got, exact, dtype, slack):
    """``got`` lies within half a unit in the last place of ``dtype``, and FP32's ``slack``, of ``exact`` (FP64)."""
    unit = torch.finfo(dtype).eps / 2 if dtype != FP32 else 0.0
    error = (got.double() - exact).abs() - unit * exact.abs()
    assert error.max() <= slack, f"{error.max():.2e} at {divmod(error.argmax().item(), error.shape[-1])}"


@by_case
def test_result(kernels, kind, dtypes, shape):
    case = Case(kernels, kind, shape, dtypes)
    y, stats = case.forward()
    assert y.dtype == case.out and y.shape == case.x.shape and stats.shape == (1 + case.layer, shape[0])
    with torch.no_grad():
        assert_rounded(y, case.exact(*case.leaves(torch.float64)), case.out, 2e-5)
        # Torch's own result: where FP32 sums differ in their last bit, a rounding to half may be another.
        plain = plain_norm(case.x, case.weight, case.bias, case.kind, case.out)
    unit = torch.finfo(case.out).eps
    torch.testing.assert_close(y.float(), plain.float(), rtol=unit, atol=2e-5)
    assert (y != plain).float().mean() < 5e-3


@pytest.mark.parametrize("blocks", [(1, 4, 1), (2, 8, 4), (8, 4, 2)], ids=str)
def test_every_cut_gives_the_same_result(kernels, blocks):
    for shape in [(12608, 1024), (33, 1000)]:
        case = Case(kernels, "layer", shape, (FP32, BF16))
        cut = kernels.Blocks(*blocks)
        y, stats = case.forward(blocks=cut)
        with torch.no_grad():
            assert_rounded(y, case.exact(*case.leaves(torch.float64)), case.out, 2e-5)
        for got, want in zip(case.backward(stats, blocks=cut), case.backward(stats), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_parameters_may_lie_anywhere(kernels):
    """The launcher must not run the variant of aligned parameters where one of them lies at an odd address."""
    case = Case(kernels, "layer", (256, 1024), (FP32, BF16))
    first = case.forward()
    gradients = case.backward(first[1])
    weight, bias = case.weight, case.bias
    for odd in [("weight",), ("bias",), ("weight", "bias")]:
        case.weight, case.bias = weight, bias
        for name in odd:
            buffer = torch.empty(1025, device="cuda")
            buffer[1:] = getattr(case, name)
            setattr(case, name, buffer[1:])
        y, stats = case.forward()
        assert_same_bits(y, first[0])
        for got, want in zip(case.backward(stats), gradients, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 0.0], ids=str)
@by_dtype
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_special_rows(kernels, kind, dtypes, special):
    """A row with NaN or an infinity spoils no other row; a row of zeros stays finite."""
    for shape in SMALL:
        case = Case(kernels, kind, shape, dtypes)
        clean = case.forward()[0]
        if special == 0.0:
            case.x[5] = 0.0
        else:
            case.x[5, 7] = special
        plain = plain_norm(case.x, case.weight, case.bias, case.kind, case.out)
        y = case.forward()[0]
        torch.testing.assert_close(y.float(), plain.float(), rtol=torch.finfo(case.out).eps, atol=2e-5, equal_nan=True)
        others = torch.arange(shape[0], device="cuda") != 5
        assert_same_bits(y[others], clean[others])


@by_dtype
def test_a_large_mean_cancels_nothing(kernels, dtypes):
    for shape in [(256, 1024), (130, 5120)]:
        case = Case(kernels, "layer", shape, dtypes)
        case.x = (case.x.float() + 300).to(case.dtype)
        y, stats = case.forward()
        with torch.no_grad():
            exact = case.exact(*case.leaves(torch.float64))
        assert_rounded(y, exact, case.out, 1e-3)
        torch.testing.assert_close(stats[0].double(), case.x.double().mean(1), rtol=1e-6, atol=0)


@by_case
def test_gradients(kernels, kind, dtypes, shape):
    case = Case(kernels, kind, shape, dtypes)
    stats = case.forward()[1]
    leaves = case.leaves(torch.float64)
    case.exact(*leaves).backward(case.grad.double())
    found = case.backward(stats)
    for name, got, leaf, param in zip(
        ("x", "weight", "bias"), found, leaves, (case.x, case.weight, case.bias), strict=True
    ):
        if leaf is None:
            assert got is None, name
            continue
        assert got.dtype == param.dtype and got.shape == param.shape, name
        # A sum over the rows in FP32 loses some bits of its largest terms.
        slack = 3e-6 * leaf.grad.abs().max() + (0 if name == "x" else 2e-7 * shape[0] ** 0.5)
        assert_rounded(got, leaf.grad, case.dtype, slack)


@pytest.mark.parametrize("shape", [(12608, 1024), (130, 5120), (33, 1000)], ids=str)
@pytest.mark.parametrize("branch", [None, BF16, FP16])
@by_dtype
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_with_one_from_past_the_norm(kernels, kind, dtypes, branch, shape):
    case = Case(kernels, kind, shape, dtypes)
    stats = case.forward()[1]
    total = torch.randn(shape, device="cuda").to(case.dtype)
    half = torch.empty(shape, device="cuda", dtype=branch) if branch is not None else None
    plain, got = case.backward(stats), case.backward(stats, total=total, half=half)
    want = plain[0] + total
    if case.dtype == FP32:  # the kernel may round once where torch rounds twice
        torch.testing.assert_close(got[0], want, rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(got[0], want)
    for g, w in zip(got[1:], plain[1:], strict=True):
        assert g is w is None or torch.equal(g, w)
    if half is not None:
        assert_same_bits(half, got[0].to(branch))
    odd = torch.empty(total.numel() + 1, device="cuda", dtype=case.dtype)[1:].view(shape).copy_(total)
    assert_same_bits(case.backward(stats, total=odd)[0], got[0])


class Residual(nn.Module):
    """A residual block as models write it."""

    def __init__(self, norm, width=256):
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 512), nn.Linear(512, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Shift(nn.Module):
    """Adds a vector, which MS-AMP's levels keep in FP32, as the stream is then."""

    def __init__(self, width=256):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x + self.vector


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_model_trains_as_with_torchs_sums(kernels, norm, level, monkeypatch):
    found, calls = [], []
    whole = residual._apply
    monkeypatch.setattr(residual, "_apply", lambda *args: calls.append(1) or whole(*args))
    for sums in (True, False):
        if not sums:
            monkeypatch.setattr(residual, "_handed_out", lambda source: None)
        torch.manual_seed(0)
        model = nn.Sequential(Shift(), *(Residual(norm) for _ in range(3)), norm(256)).cuda()
        _, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, graphs=False)
        x, target = torch.randn(2, 64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        losses = []
        for _ in range(6):
            with torch.autocast("cuda", BF16):
                loss = F.mse_loss(model(x).float(), target)
            loss.backward()
            losses += [loss.detach(), model[1].norm.weight.grad.clone()]
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert len(calls) == 5 * 3
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize("param_dtype", [BF16, FP32])
def test_gradients_are_close_to_those_of_torch(kernels, param_dtype):
    """Torch's own backward in the same dtypes, whose roundings are the same."""
    case = Case(kernels, "layer", (8192, 1024), (BF16, BF16), param_dtype)
    leaves = [t.detach().requires_grad_() for t in (case.x, case.weight, case.bias)]
    plain_norm(*leaves, case.kind, case.out).backward(case.grad)
    for got, leaf in zip(case.backward(case.forward()[1]), leaves, strict=True):
        assert got.dtype == leaf.grad.dtype
        torch.testing.assert_close(got, leaf.grad, rtol=2**-7, atol=1e-3 * leaf.grad.abs().max().item())


def test_gradients_that_are_not_needed(kernels):
    case = Case(kernels, "layer", (70, 48), (FP32, BF16))
    stats = case.forward()[1]
    full = case.backward(stats)
    for needs in [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]:
        found = kernels.backward(case.grad, case.x, case.weight, case.bias, stats, True, False, needs, (FP32, FP32))
        for got, want, need in zip(found, full, needs, strict=True):
            if need:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
            else:
                assert got is None


@pytest.mark.parametrize("shape", [(12608, 1024), (16384, 768), (33, 1000)], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_two_runs_give_equal_bits(kernels, kind, shape):
    case = Case(kernels, kind, shape, (FP32, BF16))
    runs = []
    for _ in range(2):
        y, stats = case.forward()
        runs.append([y, stats, *(g for g in case.backward(stats) if g is not None)])
    for a, b in zip(*runs, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtypes", DTYPES[::2], ids=IDS[::2])
def test_cuda_graph(kernels, dtypes):
    case = Case(kernels, "layer", (256, 1024), dtypes)

    def everything():
        y, stats = case.forward()
        return [y, stats, *case.backward(stats)]

    everything()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    case.x.mul_(-2).add_(1)
    graph.replay()
    got = [t.clone() for t in captured]
    for a, b in zip(got, everything(), strict=True):
        assert_same_bits(a, b)


def test_what_does_not_fit(kernels):
    case = Case(kernels, "layer", (32, 64), (FP32, BF16))
    x, weight, bias, half = case.x, case.weight, case.bias, BF16
    assert kernels.fits(x, weight, bias, half) and kernels.fits(nn.Parameter(x), nn.Parameter(weight), None, half)
    assert not kernels.fits(x, weight, bias, torch.float32)
    assert not kernels.fits(x.half(), weight, bias, half)
    assert not kernels.fits(x, weight.cpu(), bias, half)
    assert not kernels.fits(x, weight, bias[:1].expand(64), half)
    assert not kernels.fits(x, weight.double(), bias, half)
    assert not kernels.fits(x[:, :8].contiguous(), weight[:8], None, half)
    assert not kernels.fits(x[:0], weight, bias, half)


# The autograd function


def both(function, kind, needs=(True, True, True)):
    """What ``function`` (norm, leaves) returns of the fused norm and of torch's operations."""
    case = Case(norm_kernels(), kind, (40, 96), (FP32, BF16))
    for fused in (True, False):
        params = zip((case.x, case.weight, case.bias), needs, strict=True)
        leaves = [t if t is None else t.clone().requires_grad_(need) for t, need in params]

        def norm(x, weight, bias, fused=fused):
            if fused:
                return fused_norm(case.kernels, x, weight, bias, case.kind, BF16)
            return plain_norm(x, weight, bias, case.kind, BF16)

        yield function(norm, leaves)


def assert_alike(pair, limit=1e-2):
    for got, want in zip(*pair, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got.double() - want.double()).norm() <= limit * want.double().norm() + 1e-6


def trained(leaves):
    return [t for t in leaves if t is not None and t.requires_grad]


@pytest.mark.parametrize("kind", ["layer", "rms", "rms-zero-centered"])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, True), (True, False, False)])
def test_gradients_by_autograd(kernels, kind, needs):
    def gradients(norm, leaves):
        y = norm(*leaves)
        return [y, *torch.autograd.grad(y.float().pow(3).sum(), trained(leaves))]

    assert_alike(list(both(gradients, kind, needs)))


@pytest.mark.parametrize("kind", ["layer", "rms", "rms-zero-centered"])
def test_second_derivatives_and_batches_of_gradients(kernels, kind):
    def twice(norm, leaves):
        found = torch.autograd.grad(norm(*leaves).float().pow(3).sum(), trained(leaves), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in found), trained(leaves)[:2])

    def batch(norm, leaves):
        grads = torch.randn(3, 40, 96, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        y = norm(*leaves)
        return torch.autograd.grad(y, trained(leaves), grads, is_grads_batched=True)

    assert_alike(list(both(twice, kind)))
    assert_alike(list(both(batch, kind)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_strides_and_expanded_gradients(kernels, reentrant):
    def recomputed(norm, leaves):
        x = leaves[0].detach().t().contiguous().requires_grad_()
        y = checkpoint(lambda x, *params: norm(x.t(), *params), x, *leaves[1:], use_reentrant=reentrant)
        y.sum().backward()
        return [y.detach(), leaves[1].grad, leaves[2].grad]

    assert_alike(list(both(recomputed, "layer")))


class Block(nn.Module):
    def __init__(self, norm, width=128):
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.first(x)
        x = x + torch.tanh(self.q(y) * self.k(y)) * self.v(y)
        return x + self.down(F.gelu(self.up(self.second(x))))


def losses(norm, backend, steps=20, device="cuda"):
    torch.manual_seed(0)
    model = nn.Sequential(Block(norm), Block(norm)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = prepare(model, optimizer, "bf16_with_fp8_mixed", backend=backend, convert=["*"], graphs=False)
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(4, 64, 128, device=device, generator=generator)
    target = x.flip(-1)
    found = []
    for _ in range(steps):
        loss = (model(x) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_prepared_model_trains_as_on_the_reference_backend(kernels, norm, monkeypatch):
    calls = []
    forward, add_forward = kernels.forward, kernels.add_forward
    monkeypatch.setattr(kernels, "forward", lambda *args: calls.append("norm") or forward(*args))
    monkeypatch.setattr(kernels, "add_forward", lambda *args: calls.append("sum") or add_forward(*args))
    got = losses(norm, "torch")
    assert len(calls) == 4 * 20 and calls.count("sum") == 19  # of one sum; the first pass shows the norm behind it
    want = losses(norm, "reference")
    assert got[-1] < 0.9 * got[0]
    torch.testing.assert_close(got, want, rtol=0.02, atol=0)


@pytest.mark.parametrize("name,expected", [("LayerNorm", "LowPrecisionLayerNorm"), ("RmsNorm", "LowPrecisionRMSNorm")])
def test_norms_of_timm_are_converted(kernels, name, expected):
    layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(getattr(layers, name)(64), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    want = model[0](x)
    model, _ = prepare(model, None, "bf16_with_fp8_mixed", convert=["*"])
    assert type(model[0]).__name__ == expected
    torch.testing.assert_close(model[0](x), want, rtol=1e-5, atol=1e-5)
    images = nn.Sequential(layers.LayerNorm2d(3), nn.Flatten(), nn.Linear(48, 16)).cuda()
    images, _ = prepare(images, None, "bf16_with_fp8_mixed", convert=["*"])
    assert isinstance(images[0], layers.LayerNorm2d) and not isinstance(images[0], LowPrecisionLayerNorm)


@pytest.mark.parametrize("shape", [(8192, 4096), (12608, 1024), (33, 1000), (1, 16)], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms", "rms-zero-centered"])
@pytest.mark.parametrize(("first", "second", "out"), [(FP32, BF16, BF16), (BF16, BF16, BF16), (FP16, FP32, FP16)])
def test_a_sum_and_its_norm_have_the_bits_of_both_passes(kernels, first, second, out, kind, shape):
    case = Case(kernels, kind, shape, (first, out))
    branch = torch.randn(shape, device="cuda").to(second)
    assert kernels.fits_sum(case.x, branch, case.weight, case.bias, out)
    total, y, stats = kernels.add_forward(
        case.x, branch, case.weight, case.bias, EPS, case.layer, case.zero_centered, out
    )  # fmt: skip
    want = case.x + branch
    assert total.dtype == want.dtype and torch.equal(total, want)
    case.x = want
    assert all(map(torch.equal, (y, stats), case.forward()))
    assert not kernels.fits_sum(want, branch[:, ::2], case.weight, case.bias, out)
    assert not kernels.fits_sum(want, branch.double(), case.weight, case.bias, out)


def test_the_output_of_a_branch_is_normalized_by_the_kernels(kernels):
    """A model's first layer, whose output is a term of the first sum, is learned to end a branch."""
    x = torch.randn(64, 256, device="cuda", dtype=BF16)
    branch = x.clone().requires_grad_() + 0.0
    assert type(as_branch(branch, None)) is BranchOutput
    assert kernels.fits(branch, None, None, BF16)
    y = kernels.forward(branch, None, None, EPS, True, False, BF16, False)[0]
    assert type(y) is torch.Tensor and torch.equal(y, kernels.forward(x, None, None, EPS, True, False, BF16, False)[0])


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_computes_norms_with_the_sums_before_them(level, graphs, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from nemo_lowprec.kernels import triton_norm

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    found, counts = [], []
    for fused in (True, False):
        calls = {"add_forward": 0, "forward": 0}
        with monkeypatch.context() as patch:
            for name, own in (("add_forward", triton_norm.add_forward), ("forward", triton_norm.forward)):

                def counted(*args, own=own, name=name, calls=calls):
                    calls[name] += 1
                    return own(*args)

                patch.setattr(triton_norm, name, counted)
            if not fused:
                patch.setattr(triton_norm, "fits_sum", lambda *_: False)
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).cuda()
            model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, graphs=graphs)
            generator, losses = torch.Generator("cuda").manual_seed(1), []
            for step in range(8):
                before = dict(calls)
                tokens = torch.randint(256, (2, 64), device="cuda", generator=generator)
                with torch.autocast("cuda", BF16):
                    losses.append(model(input_ids=tokens, labels=tokens).loss)
                if step == 1:
                    counts.append(tuple(calls[name] - before[name] for name in calls))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.stack(losses).tolist())
    assert counts == [(6, 1), (0, 7)] and found[0] == found[1]
