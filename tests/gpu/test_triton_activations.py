"""The fused kernels of activations: torch's values but for FP32's last bits, and exactly their FP8 forms."""

import pytest
import torch
from support import kernels_or_skip
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import convert_layers
from nemo_lowprec.compute.activations import KINDS, Activation
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.formats import E4M3, E5M2, cast, compute_amax
from nemo_lowprec.kernels.loader import activation_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = [(1, 16), (128, 64), (257, 1040), (1000, 333)]  # a kernel is compiled for each: few seconds count
FORMS = ["plain", "gated", "gate_up", "up_gate"]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(activation_kernels())


def values(rows, cols, dtype, seed, stride=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (3 * torch.randn(rows, cols + stride, generator=generator, device="cuda")).to(dtype)[:, :cols]


def inputs(form, rows, cols, dtype, stride=0):
    widths = {"plain": [cols], "gated": [cols, cols]}.get(form, [2 * cols])
    return tuple(values(rows, width, dtype, seed, stride) for seed, width in enumerate(widths))


def assert_fp8(got, want):
    """Equal bits, except that a NaN may be any NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    same = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
    assert (same | (got.float().isnan() & want.float().isnan())).all(), f"{(~same).sum()} of {same.numel()} differ"


def assert_made(made, target, fmt, scale):
    """The FP8 data, the scale and the amax are those of the kernel's own half values."""
    want = cast(made.half.float() * scale, fmt)
    assert (made.row is None, made.col is None) == (not target.rowwise, not target.columnwise)
    if made.row is not None:
        assert_fp8(made.row, want)
    if made.col is not None:
        assert_fp8(made.col, want.t())
        assert made.col.is_contiguous()
    assert torch.equal(made.scale_inv, scale.reciprocal())
    if target.record is not None:
        assert torch.equal(target.record, compute_amax(made.half).reshape(1))
    if target.sums:
        exact = made.half.double().sum(0)
        bound = 1e-5 * made.half.double().abs().sum(0) + 1e-6
        assert ((made.sums.double() - exact).abs() <= bound).all()


def assert_half(got, want, share=2e-3, backward=False, steps=1, counted=None):
    """Equal but for a step of the half format in few places, where FP32 values lie near a tie.

    ``steps``: two for a product of which a factor is rounded to half, too. ``counted``: where the places are counted.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    different = got != want if counted is None else (got != want)[counted]
    # Far out in GELU's tail an FP32 rounding of 1 + tanh is all that is left.
    relative, absolute = (2**-7, 1e-6) if got.dtype == torch.bfloat16 else (2**-10, 2**-20)
    absolute = 2e-5 if backward else absolute  # a derivative's terms have other signs
    torch.testing.assert_close(got, want, rtol=steps * relative, atol=steps * absolute)
    assert different.float().mean() <= share, f"{different.float().mean():.2%} differ"


def core_of(kind, gate, width):
    """Where torch's own result has the digits that it is compared in, [rows, width].

    Below -3 a step of CUDA's erf near -1 is many steps of GELU: half of the tail's values may differ (see
    ``test_every_half_value``).
    """
    core = gate > -3 if kind == "gelu" else torch.ones_like(gate, dtype=torch.bool)
    return core if width == gate.shape[1] else torch.cat((core, core), 1)


def assert_forward(kernels, form, shape, kind="silu", dtype=torch.bfloat16):
    activation = Activation(kind, form)
    scale, amax = torch.tensor([37.123], device="cuda"), torch.zeros(1, device="cuda")
    for stride in (0, 7):
        tensors = inputs(form, *shape, dtype, stride)
        target = kernels.Target(scale, E4M3, True, True, amax.zero_())
        made = kernels.activate(kind, activation.parts(tensors), target)
        # Few values of GELU lie near a tie, but many of the inputs may have one of these values.
        share = 2e-2 if kind == "gelu" else 2e-3
        core = core_of(kind, activation.parts(tensors)[0], shape[1])
        assert_half(made.half, activation.forward(tensors), share, steps=1 + (form != "plain"), counted=core)
        assert_made(made, target, E4M3, scale)


def assert_backward(kernels, form, shape, kind="silu", dtype=torch.bfloat16):
    activation = Activation(kind, form)
    for stride in (0, 7):
        tensors, grad = inputs(form, *shape, dtype, stride), values(*shape, dtype, 9)
        wanted = activation.backward(grad, tensors)
        scales = [torch.tensor([11.5 + i], device="cuda") for i in range(len(wanted))]
        targets = [kernels.Target(s, E5M2, True, True, torch.zeros(1, device="cuda"), True) for s in scales]
        made = kernels.activate_backward(
            kind, grad, activation.parts(tensors), targets, activation.joint, form != "up_gate"
        )
        assert len(made) == len(wanted)
        for got, want, target, scale in zip(made, wanted, targets, scales, strict=True):
            core = core_of(kind, activation.parts(tensors)[0], want.shape[1])
            assert_half(got.half, want, 1e-2, True, steps=1 + (form != "plain"), counted=core)
            assert_made(got, target, E5M2, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forward(kernels, form, shape):
    assert_forward(kernels, form, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_backward(kernels, form, shape):
    assert_backward(kernels, form, shape)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_gated_activations(kernels, kind, dtype):
    assert_forward(kernels, "gated", (128, 64), kind, dtype)
    assert_backward(kernels, "gated", (128, 64), kind, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_orientations_and_gradients_that_nobody_wants(kernels, form):
    activation, scale = Activation("silu", form), torch.tensor([3.0], device="cuda")
    tensors, grad = inputs(form, 64, 96, torch.bfloat16), values(64, 96, torch.bfloat16, 9)
    parts, wanted = activation.parts(tensors), activation.backward(grad, tensors)
    for rowwise, columnwise in ((True, False), (False, True)):
        target = kernels.Target(scale, E4M3, rowwise, columnwise, None)
        assert_made(kernels.activate("silu", parts, target), target, E4M3, scale)
        for chosen in ([0], [len(wanted) - 1], []):
            targets = [target if i in chosen else None for i in range(len(wanted))]
            made = kernels.activate_backward("silu", grad, parts, targets, activation.joint, form != "up_gate")
            for got, want, aim in zip(made, wanted, targets, strict=True):
                assert_half(got.half, want, 1e-2, True, steps=2)
                if aim is None:
                    assert got.row is None and got.col is None and got.sums is None
                else:
                    assert_made(got, aim, E4M3, scale)


@pytest.mark.parametrize("shape", [(256, 1024), (130, 72)], ids=str)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_half_values_may_be_left_out(kernels, form, sums, shape):
    activation = Activation("silu", form)
    parts, grad = activation.parts(inputs(form, *shape, torch.bfloat16)), values(*shape, torch.bfloat16, 9)

    def run(half):
        def target(fmt, sums=False):
            scale, amax = torch.tensor([7.5], device="cuda"), torch.zeros(1, device="cuda")
            return kernels.Target(scale, fmt, True, True, amax, sums)

        targets = [target(E4M3), *(target(E5M2, sums) for _ in range(1 if activation.joint else len(parts)))]
        made = [kernels.activate("silu", parts, targets[0], half=half)]
        made += kernels.activate_backward(
            "silu", grad, parts, targets[1:], activation.joint, form != "up_gate", half=half
        )
        assert all((m.half is not None) is half for m in made)
        return [t for m in made for t in m[1:]] + [t.record for t in targets]

    for got, want in zip(run(False), run(True), strict=True):
        assert got is want is None or torch.equal(got, want)
    # A gradient that is not quantized has to be there, and the one beside it is.
    made = kernels.activate_backward(
        "silu", grad, parts, [None] * (1 if activation.joint else len(parts)), activation.joint, half=False
    )
    assert all(m.half is not None for m in made)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_half_value(kernels, kind, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(256, 256)
    scale, x, activation = torch.ones(1, device="cuda"), bits.view(dtype), Activation(kind)
    target = kernels.Target(scale, E4M3, True, True, None)
    made = kernels.activate(kind, (x,), target)
    want = activation.forward((x,))
    assert torch.equal(made.half.isnan(), want.isnan())
    # Of 65,536: as many as lie within the error of the GPU's functions of a tie. Below 2**-126 they give zero. Far out,
    # a step of CUDA's own tanh or erf near -1 is many steps of the result.
    different = (made.half != want) & (x > -3) & (want.float().abs() >= 2.0**-120)
    assert different.sum() <= (16 if dtype == torch.bfloat16 else 200), f"{different.sum()} differ: {x[different][:9]}"
    assert_half(made.half.nan_to_num(0.0), want.nan_to_num(0.0), 2e-2)
    assert_made(made, target, E4M3, scale)
    grads = torch.randn(256, 256, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    targets = [kernels.Target(scale, E5M2, True, True, None)]
    (got,) = kernels.activate_backward(kind, grads, (x,), targets)
    (want,) = activation.backward(grads, (x,))
    assert torch.equal(got.half.isnan(), want.isnan())
    core = (x.float().abs() < 30) & want.isfinite()
    assert_half(got.half.where(core, 0), want.where(core, 0), 1e-2, True)
    assert_made(got, targets[0], E5M2, scale)


@pytest.mark.parametrize("bits", [[0x7F80, 0xFF80, 0x7F7F, 0xFF7F], [0x7FC0]], ids=["largest", "nan"])
def test_gradients_that_are_not_finite(kernels, bits):
    grad = torch.ones(64, 128, dtype=torch.bfloat16, device="cuda")
    grad.view(torch.int16)[::9, ::7] = (
        torch.tensor(bits, device="cuda").to(torch.int16).repeat(160)[: 8 * 19].view(8, 19)
    )
    x = values(64, 128, torch.bfloat16, 3)
    for fmt in (E4M3, E5M2):
        target = kernels.Target(torch.ones(1, device="cuda"), fmt, True, True, torch.zeros(1, device="cuda"))
        (made,) = kernels.activate_backward("relu", grad, (x,), [target])
        (want,) = Activation("relu").backward(grad, (x,))
        assert_fp8(made.row, cast(want.float(), fmt))
        assert_fp8(made.col, cast(want.float(), fmt).t())
        assert torch.equal(target.record.isnan(), want.isnan().any().view(1))


@pytest.mark.parametrize("tile", [(32, 128, 4), (64, 64, 8), (128, 64, 8), (64, 128, 4, True, False)], ids=str)
def test_tiles(kernels, tile):
    activation, scale = Activation("silu", "gated"), torch.tensor([3.0], device="cuda")
    tensors, grad = inputs("gated", 256, 1040, torch.bfloat16), values(256, 1040, torch.bfloat16, 9)
    target = kernels.Target(scale, E4M3, True, True, None)
    assert_made(kernels.activate("silu", tensors, target, kernels.Tile(*tile)), target, E4M3, scale)
    targets = [kernels.Target(scale, E5M2, True, True, torch.zeros(1, device="cuda"), True) for _ in range(2)]
    made = kernels.activate_backward("silu", grad, tensors, targets, tile=kernels.Tile(*tile))
    for got, want, aim in zip(made, activation.backward(grad, tensors), targets, strict=True):
        assert_half(got.half, want, 1e-2, True, steps=2)
        assert_made(got, aim, E5M2, scale)


def test_the_kernels_compute_an_activation_once(kernels, monkeypatch):
    """Triton may compute a tile again for each layout in which it is stored, which takes twice as long."""
    made = []

    class Watched(kernels.Launcher):
        def __call__(self, device, key, programs, args, constants):
            made.append(self._kernel[(programs,)](*args, **constants(), **self._options))

    monkeypatch.setattr(kernels, "_launcher", lambda kernel, warps: Watched(kernel, num_warps=warps))
    x, scale = values(256, 1024, torch.bfloat16, 1), torch.ones(1, device="cuda")
    target = kernels.Target(scale, E4M3, True, True, torch.zeros(1, device="cuda"))
    kernels.activate("gelu", (x,), target)
    kernels.activate("silu", (x, x), target)
    kernels.activate_backward("gelu", x, (x,), [target._replace(sums=True)])
    kernels.activate_backward("silu", x, (x, x), [target, target])
    powers = [kernel.asm["ttgir"].count("math.exp2") for kernel in made]
    assert powers == [1, 1, 2, 1 + kernels.GATED_BACKWARD_TILE.reads_twice]


class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 128), act, nn.Linear(128, 64)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("name", ["gelu", "silu", "gated"])
def test_a_model_trains_as_on_the_reference(kernels, backend, name, monkeypatch):
    make = {"gelu": lambda: MLP(nn.GELU()), "silu": lambda: MLP(nn.SiLU()), "gated": Gated}[name]
    if backend == "te":
        pytest.importorskip("transformer_engine")
    results, launches = [], []
    # Transformer Engine's GEMMs join no layers: "gate" and "up" scale their gradients one by one there.
    monkeypatch.setattr(ReferenceBackend, "joins", backend == "torch")
    for own in (backend, "reference"):
        torch.manual_seed(0)
        model = nn.Sequential(make(), make()).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"backend": own, "convert": None, "graphs": False}
        model, optimizer = prepare(model, optimizer, "bf16_with_fp8_mixed", **options)
        seen = []
        with monkeypatch.context() as patch:
            forward = kernels.activate
            patch.setattr(kernels, "activate", lambda *a, f=forward, o=own, **k: launches.append(o) or f(*a, **k))
            for step in range(4):
                x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step)).cuda().requires_grad_()
                with torch.autocast("cuda", torch.bfloat16):
                    out = model(x)
                out.float().square().mean().backward()
                seen += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        results.append(seen)
    assert launches == [backend] * 6  # of two modules in all steps but the first
    for got, want in zip(*results, strict=True):
        assert (got.float() - want.float()).norm() <= 0.1 * want.float().norm()


def test_a_step_with_kernels_needs_no_sync(kernels):
    model, recipe = nn.Sequential(MLP(nn.GELU()), Gated()).cuda(), Recipe("delayed")
    histories = new_histories(recipe)
    histories.to(torch.device("cuda"))
    convert_layers(model, torch.bfloat16, recipe, ScaledMMBackend(), None, LayerFilter(), histories)
    x = torch.randn(128, 64, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            model(x).float().square().mean().backward()

    for _ in range(3):
        step()
        histories.update()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum("_forward_kernel" in name for name in names) == 2
    assert sum("_backward_kernel" in name for name in names) == 2
    assert not any("gelu" in name.lower() or "silu" in name.lower() for name in names), names
