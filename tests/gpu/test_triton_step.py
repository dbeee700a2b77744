"""The fused steps against the reference on the same GPU: states bit for bit, weights within one unit in the last
place, in one of 10,000 elements at most.

The reference goes on from the kernel's result after every step, so that each is compared by itself.
"""

from functools import partial
from itertools import product

import pytest
import torch
from support import kernels_or_skip
from torch import nn

import nemo_lowprec
from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.optim import SGD, Adam, AdamW, Lion, Muon
from nemo_lowprec.optim.reference import read, step_by_reference
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, GradientTensor, QuantizedTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = "cuda"
# Rows of whole blocks go another way through the kernel than ragged ones; 128 blocks make a group of tiles.
SHAPES = [(257, 384), (300, 333), (37, 129), (5, 3), (3, 5, 7, 9), (1, 128), (1000,), (1,), (), (0, 4)]
FORMATS = ("fp32", "bf16", "fp16", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def kernels():
    return kernels_or_skip(block_kernels())


def randn(shape, seed, binades=0):
    """Values over many binades, so that the formats' subnormals and zeros all occur."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if binades:
        values *= torch.exp2(torch.randint(-binades, 4, tuple(shape), generator=generator).float())
    return values.to(DEVICE)


def make_params(weight=torch.float16, shapes=SHAPES, margin=0, power_of_two=True):
    """Parameters whose matrices are stored as ``weight`` says: a dtype, ``cast`` or ``fp8`` (with an FP16 master)."""
    params = []
    for i, shape in enumerate(shapes):
        values = randn(shape, 100 + i) * 0.1
        if weight == "cast" and len(shape) > 1:
            param = nn.Parameter(Fp16Weight.from_float(values, torch.bfloat16))
        elif weight == "fp8" and len(shape) > 1 and values.numel():
            master = BlockScaledTensor.from_float(values, FP16)
            stored = Fp8Weight.from_float(master.dequantize(), E4M3, torch.bfloat16, margin, power_of_two)
            param = nn.Parameter(stored)
            param.master_weight = master
        else:
            param = nn.Parameter(values.to(weight if isinstance(weight, torch.dtype) else torch.float32))
        param.grad_dtype = None
        params.append(param)
    return params


def set_grads(params, step, kind="fp8", bad=False, factor=1.0):
    """Gradients that are a function of the step; ``kind`` is a dtype, or ``fp8`` for stored ones of matrices."""
    for i, param in enumerate(params):
        grad = randn(param.shape, 1000 * step + i, binades=30) * 1e-2
        if grad.dim() > 1 and grad.numel():
            grad[0] = 0.0
            grad[1:2] *= 1e-12
            if bad:
                grad.view(-1)[::97], grad.view(-1)[5::131], grad.view(-1)[9::141] = NAN, INF, -INF
        if kind == "fp8" and grad.dim() > 1:
            param.grad = GradientTensor.from_float(grad)
            if factor != 1:
                param.grad.mul_(factor)
        else:
            param.grad = (grad * factor).to(torch.float32 if kind == "fp8" else kind)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def parts(tensor):
    return tensor.parts() if isinstance(tensor, QuantizedTensor) else (tensor.detach(),)


def tensors_of(optimizer):
    """(whether it takes the updates, tensor) of everything that a step changes."""
    for param in params_of(optimizer):
        yield True, param
        if hasattr(param, "master_weight"):
            yield True, param.master_weight
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            yield key == "master_weight", value


def snapshot(optimizer):
    return [part.clone() for _, tensor in tensors_of(optimizer) for part in parts(tensor)]


def ordered(tensor):
    """Integers in the order of the numbers; all NaNs are one."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.contiguous().view(kind).long()
    if tensor.dtype == torch.uint8:
        return bits
    top = 2 ** (8 * tensor.element_size() - 1)
    bits = bits & (2 * top - 1)
    bits = torch.where(bits >= top, top - bits - 1, bits)
    return torch.where(tensor.float().isnan(), 2**40, bits)


def assert_part(actual, expected, exact):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    distance = (ordered(actual) - ordered(expected)).abs()
    count = int(distance.count_nonzero())
    if exact:
        assert count == 0, f"{count} of {distance.numel()} differ"
    elif count:
        assert distance.max() <= 1 and count <= max(1, 1e-4 * distance.numel()), f"{count}, by {distance.max()}"


def assert_as_the_reference(ours, reference):
    pairs = list(zip(tensors_of(ours), tensors_of(reference), strict=True))
    assert len(pairs) > len(params_of(ours))
    for (updated, a), (_, b) in pairs:
        for x, y in zip(parts(a), parts(b), strict=True):
            assert_part(x, y, exact=not updated)


def assert_equal(ours, other):
    for a, b in zip(snapshot(ours), snapshot(other), strict=True):
        assert_part(a, b, exact=True)


@torch.no_grad()
def follow(target, source):
    for (_, a), (_, b) in zip(tensors_of(target), tensors_of(source), strict=True):
        for x, y in zip(parts(a), parts(b), strict=True):
            x.copy_(y)


@torch.no_grad()
def reference_step(optimizer, grad_scale=None):
    for group, updates in optimizer._updates():
        step_by_reference(updates, optimizer._inputs(group, grad_scale))


OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "seed": 5}


def compare(
    cls=AdamW, weight=torch.float16, grad="fp8", steps=3, bad_at=None, factor=0.37, make=make_params, **options
):
    """Step both ways and compare after each step; returns the kernel's optimizer."""
    ours, reference = (cls(make(weight), **{**OPTIONS, **options}) for _ in range(2))
    for step in range(steps):
        for optimizer in (ours, reference):
            set_grads(params_of(optimizer), step, grad, step == bad_at, factor)
        ours.step()
        reference_step(reference)
        assert_as_the_reference(ours, reference)
        follow(reference, ours)
    return ours


@pytest.mark.parametrize("first,second", list(product(FORMATS, FORMATS)))
def test_every_pair_of_state_formats(first, second):
    ours = compare(exp_avg_dtype=first, exp_avg_sq_dtype=second)
    for param, start in zip(params_of(ours)[:5], make_params(), strict=False):
        assert (param.detach().float() - start.detach().float()).abs().max() > 1e-4
    assert all(s["step"] == 3 for p, s in ours.state.items() if p.numel())
    assert all(s["step"].is_cuda == (DEVICE == "cuda") for s in ours.state.values())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9999), (0.999, 0.9)], ids=str)
@pytest.mark.parametrize("first,second", [(f, f) for f in FORMATS[1:]])
def test_moments_that_would_not_fade_are_rounded_stochastically(betas, first, second):
    """And second moments are zero in blocks of zeros only."""
    weights = ((torch.float16, None, True), (torch.float32, None, False), (torch.bfloat16, "fp16", True))
    for weight, master, stochastic in weights:
        ours = compare(
            weight=weight, betas=betas, exp_avg_dtype=first, exp_avg_sq_dtype=second, master_weight_dtype=master,
            stochastic_rounding=stochastic,
        )  # fmt: skip
        for param in params_of(ours):
            if second != "bf16" and param.dim() > 1 and param.numel():
                kept = ours.state[param]["exp_avg_sq"].data_blocks.float()
                assert kept[2:].count_nonzero() == kept[2:].numel() and kept[:1].count_nonzero() == 0


@pytest.mark.parametrize("first,second", [("fp32", "fp32"), ("fp8", "fp16"), ("bf16", "fp8"), ("fp16", "bf16")])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_with_and_without_l2(first, second, weight_decay):
    ours = compare(Adam, exp_avg_dtype=first, exp_avg_sq_dtype=second, weight_decay=weight_decay)
    plain = compare(Adam, exp_avg_dtype=first, exp_avg_sq_dtype=second, weight_decay=0.0)
    moments = [read(optimizer.state[params_of(optimizer)[0]]["exp_avg"]) for optimizer in (ours, plain)]
    assert torch.equal(*moments) == (weight_decay == 0)  # the L2 term is part of the moments


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("master", [None, "fp16", "fp32"])
@pytest.mark.parametrize("weight", [torch.float16, torch.bfloat16])
def test_masters(weight, master, stochastic):
    ours = compare(weight=weight, master_weight_dtype=master, stochastic_rounding=stochastic)
    param = params_of(ours)[0]
    kept = ours.state[param].get("master_weight")
    assert (kept is None) == (master is None) and isinstance(kept, BlockScaledTensor) == (master == "fp16")
    if kept is not None:  # the weight is its master, rounded
        assert torch.equal(param.detach(), read(kept).to(weight)) and not torch.equal(
            param.detach().float(), read(kept)
        )


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("weight", [torch.float32, "cast", "fp8"])
def test_weights_of_every_storage(weight, stochastic):
    ours = compare(weight=weight, stochastic_rounding=stochastic)
    if weight != "fp8":
        return
    for param in params_of(ours):
        if isinstance(param, Fp8Weight):
            want = Fp8Weight.from_float(param.master_weight.dequantize(), E4M3, torch.bfloat16, power_of_two=True)
            assert_part(param.data_fp8, want.data_fp8, exact=True)
            assert_part(param.scale_inv, want.scale_inv, exact=True)


def test_fp8_weights_with_a_margin():
    ours = compare(weight="fp8", make=lambda weight: make_params(weight, margin=2))
    for param in params_of(ours):
        if isinstance(param, Fp8Weight):  # the largest weight lies at a quarter of the format's, or a binade below
            assert param.margin == 2 and 448 / 8 <= float(param.data_fp8.float().abs().max()) <= 448 / 4


def test_fp8_weights_whose_scale_changes_are_written_again():
    """Steps that double weights, and steps so small that no scale changes."""
    for lr, moves in ((0.3, True), (1e-6, False)):
        make = partial(make_params, shapes=[s for s in SHAPES if len(s) > 1 and s[0] > 1])
        start = [p.scale_inv.clone() for p in make("fp8")]
        ours = compare(weight="fp8", lr=lr, make=make)
        now = [p.scale_inv for p in params_of(ours)]
        assert [not torch.equal(a, b) for a, b in zip(now, start, strict=True)] == [moves] * len(start)


def test_fp8_weights_with_scales_that_are_no_powers_of_two():
    ours = compare(weight="fp8", make=lambda weight: make_params(weight, power_of_two=False))
    for param in params_of(ours):
        if isinstance(param, Fp8Weight):
            want = Fp8Weight.from_float(param.master_weight.dequantize(), E4M3, torch.bfloat16)
            assert_part(param.data_fp8, want.data_fp8, exact=True)


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", [torch.float16, torch.float32, "fp8"])
def test_gradients_of_every_dtype(weight, grad):
    ours = compare(weight=weight, grad=grad)
    for param, start in zip(params_of(ours)[:5], make_params(weight), strict=False):
        assert param.grad.dtype == grad and not torch.equal(*(read(p.detach()) for p in (param, start)))


@pytest.mark.parametrize("grad", ["fp8", torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("weight,master", [(torch.float16, None), (torch.bfloat16, "fp16"), ("fp8", None)])
def test_gradients_that_are_not_finite(weight, master, stochastic, grad):
    """And what is left of them in later steps."""
    options = {"weight": weight, "master_weight_dtype": master, "stochastic_rounding": stochastic, "grad": grad}
    ours = compare(**options, bad_at=1, steps=4)
    param = params_of(ours)[0]
    assert read(getattr(param, "master_weight", param).detach()).view(-1)[::97].isnan().all()
    assert read(ours.state[param]["exp_avg"]).view(-1)[::97].isnan().all()
    assert not read(ours.state[param]["exp_avg"]).isnan().all()


@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"betas": (0.0, 0.5), "eps": 1e-3},
        {"betas": (0.95, 0.9999), "eps": 1e-12, "weight_decay": 1.0},
        {"lr": 0.0},
        {"lr": 123.0, "weight_decay": 0},
    ],
    ids=str,
)
def test_settings(cls, options):
    ours = compare(cls, **options)
    moved = [not torch.equal(p, q) for p, q in zip(params_of(ours)[:5], make_params(), strict=False)]
    assert moved == [options.get("lr") != 0] * 5
    if options.get("maximize"):
        other = compare(cls)
        first = [read(optimizer.state[params_of(optimizer)[0]]["exp_avg"]) for optimizer in (ours, other)]
        assert cls is Adam or torch.equal(first[0], -first[1])  # Adam's L2 term keeps its sign


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_the_learning_rate_as_a_tensor(cls):
    compare(cls, lr=torch.tensor(3e-3, device=DEVICE))
    compare(cls, lr=torch.tensor(3e-3))
    params, twins = make_params(), make_params()
    rate = torch.tensor(1e-3, device=DEVICE)
    one, other = AdamW(params, lr=rate, weight_decay=0.0), AdamW(twins, lr=1e-3, weight_decay=0.0)
    for step in range(3):
        for each in (params, twins):
            set_grads(each, step)
        one.step()
        other.step()
        for p, q in zip(params, twins, strict=True):  # an FP32 rate is not quite 1e-3
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-6)
        rate.mul_(0.5)
        other.param_groups[0]["lr"] *= 0.5


def test_late_steps():
    """Bias corrections and random streams of high counts."""
    ours, reference = (AdamW(make_params(), **OPTIONS, stochastic_rounding=True) for _ in range(2))
    for count in (0, 9, 999, 123_456, 2**24 - 2):
        for optimizer in (ours, reference):
            set_grads(params_of(optimizer), count % 7)
            for state in optimizer.state.values():
                state["step"].fill_(count)
        ours.step()
        reference_step(reference)
        assert_as_the_reference(ours, reference)
        follow(reference, ours)
        assert all(s["step"] == count + 1 for p, s in ours.state.items() if p.numel())


def test_groups_and_parameters_that_come_and_go():
    def make():
        params = make_params()
        groups = [
            {"params": params[::2], "lr": 1e-2, "betas": (0.5, 0.6), "eps": 1e-4},
            {"params": params[1::2], "weight_decay": 0.0, "maximize": True},
        ]
        return AdamW(groups, **OPTIONS, stochastic_rounding=True)

    ours, reference = make(), make()
    for step, missing in enumerate([(), (0, 3), (1,), (), tuple(range(9))]):
        for optimizer in (ours, reference):
            set_grads(params_of(optimizer), step)
            for i in missing:
                params_of(optimizer)[i].grad = None
        ours.step()
        reference_step(reference)
        assert_as_the_reference(ours, reference)
        follow(reference, ours)


@pytest.mark.parametrize("weight", [torch.float16, torch.float32])
@pytest.mark.parametrize("grad", ["fp8", torch.float32, torch.bfloat16])
def test_views_that_begin_anywhere(weight, grad):
    def make(weight):
        params = []
        for param in make_params(weight):
            base = torch.empty(param.numel() + 1, dtype=param.dtype, device=DEVICE)
            base[1:] = param.detach().reshape(-1)
            params.append(nn.Parameter(base[1:].view(param.shape)))
            params[-1].grad_dtype = None
        return params

    ours = compare(weight=weight, grad=grad, make=make)
    assert params_of(ours)[0].data_ptr() % 16
    # And gradients that do.
    params, twins = make_params(weight), make_params(weight)
    optimizers = [AdamW(p, **OPTIONS) for p in (params, twins)]
    for step in range(2):
        for each in (params, twins):
            set_grads(each, step, torch.float32)
        for param in params:
            base = torch.cat([torch.zeros(1, device=DEVICE), param.grad.reshape(-1)])
            param.grad = base[1:].view(param.shape)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(*optimizers)


@pytest.mark.parametrize("weight", [torch.float16, torch.float32, "cast"])
@pytest.mark.parametrize("grad", ["fp8", torch.float32])
def test_channels_last_weights_and_gradients_are_stepped_by_value(weight, grad):
    shapes = [(16, 8, 3, 3), (4, 128, 1, 1), (64, 128)]

    def make(last):
        params = []
        for i, shape in enumerate(shapes):
            values = randn(shape, i) * 0.1
            if last and len(shape) == 4:
                values = values.to(memory_format=torch.channels_last)
            stored = Fp16Weight.from_float(values, torch.bfloat16) if weight == "cast" else values.to(weight)
            params.append(nn.Parameter(stored))
            params[-1].grad_dtype = None
        return params

    for weights_last, grads_last in ((True, True), (True, False), (False, True)):
        params, twins = make(weights_last), make(False)
        ours, plain = (AdamW(p, **OPTIONS, stochastic_rounding=True) for p in (params, twins))
        for step in range(3):
            for p, q in zip(params, twins, strict=True):
                values = randn(p.shape, 50 + step) * 1e-2
                given = values.to(memory_format=torch.channels_last) if grads_last and p.dim() == 4 else values
                p.grad = GradientTensor.from_float(given) if grad == "fp8" else given
                q.grad = GradientTensor.from_float(values) if grad == "fp8" else values
            ours.step()
            reference_step(plain)
            assert_as_the_reference(ours, plain)
            follow(plain, ours)


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
@pytest.mark.parametrize("weight", [torch.float16, "cast", "fp8"])
def test_grad_scale_and_found_inf(weight, scale):
    ours, reference = (AdamW(make_params(weight), **OPTIONS, stochastic_rounding=True) for _ in range(2))
    scale_tensor = torch.tensor(scale, device=DEVICE)
    for step in range(3):
        for optimizer in (ours, reference):
            set_grads(params_of(optimizer), step, factor=scale)
        # A skipped step first: nothing may change, the count included.
        ours.grad_scale = scale_tensor
        ours.found_inf = torch.tensor(1.0, device=DEVICE)
        if step:
            before = snapshot(ours)
            ours.step()
            for a, b in zip(snapshot(ours), before, strict=True):
                assert_part(a, b, exact=True)
        else:
            weights = [parts(p)[0].clone() for p in params_of(ours)]
            ours.step()
            for param, old in zip(params_of(ours), weights, strict=True):
                assert_part(parts(param)[0], old, exact=True)
            assert all(s["step"] == 0 for s in ours.state.values())
        ours.found_inf = torch.tensor(0.0, device=DEVICE)
        ours.step()
        del ours.grad_scale, ours.found_inf
        reference_step(reference, scale_tensor)
        assert_as_the_reference(ours, reference)
        follow(reference, ours)
    assert all(s["step"] == 3 for p, s in ours.state.items() if p.numel())


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale):
    params, twins = make_params(), make_params()
    optimizer, plain = AdamW(params, **OPTIONS), AdamW(twins, **OPTIONS)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for step in range(4):
        bad = step == 2
        scale = scaler.get_scale()
        scaler.scale(torch.ones((), device=DEVICE))
        set_grads(params, step, bad=bad, factor=scale)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale / (2 if bad else 1)
        if not bad:
            set_grads(twins, step)
            plain.step()
        assert_equal(optimizer, plain)


def without_waiting(action):
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return action()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "weight,master", [(torch.float16, None), (torch.bfloat16, "fp16"), ("cast", None), ("fp8", None)]
)
def test_a_step_does_not_wait_for_the_device(weight, master):
    params = make_params(weight)
    rate = torch.tensor(1e-3, device=DEVICE)
    optimizer = AdamW(params, **{**OPTIONS, "lr": rate}, master_weight_dtype=master, stochastic_rounding=True)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    without_waiting(optimizer.step)
    set_grads(params, 2)  # other addresses than before
    without_waiting(optimizer.step)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.ones((), device=DEVICE))
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    without_waiting(lambda: (scaler.step(optimizer), scaler.update()))
    assert all(s["step"] == 7 for p, s in optimizer.state.items() if p.numel())


@pytest.mark.parametrize("weight", [torch.float16, "cast", "fp8"])
def test_a_step_needs_no_memory(weight):
    params = make_params(weight, [(1024, 4096), (1000, 333), (4096,)])
    optimizer = AdamW(params, **OPTIONS, stochastic_rounding=True)
    set_grads(params, 0)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**14 and torch.cuda.memory_allocated() == before
    stored = sum(t.stored_bytes() for t in optimizer.state[params[0]].values() if isinstance(t, BlockScaledTensor))
    assert stored <= 3.1 * params[0].numel()


@pytest.mark.parametrize("weight", [torch.float16, "cast", "fp8"])
def test_a_captured_step_replays_as_eager_ones(weight):
    params, twins = make_params(weight), make_params(weight)
    rates = [torch.tensor(1e-3, device=DEVICE) for _ in range(2)]
    captured, eager = (
        AdamW(p, **{**OPTIONS, "lr": lr}, stochastic_rounding=True)
        for p, lr in zip((params, twins), rates, strict=True)
    )

    def new_grads(each, step):
        """In place, where the graph reads them."""
        fresh = make_params(weight)
        set_grads(fresh, step)
        for param, source in zip(each, fresh, strict=True):
            if param.grad is None:
                param.grad = source.grad
            else:
                for a, b in zip(parts(param.grad), parts(source.grad), strict=True):
                    a.copy_(b)

    found = [torch.zeros((), device=DEVICE) for _ in range(2)]
    for optimizer, each, flag in zip((captured, eager), (params, twins), found, strict=True):
        optimizer.found_inf = flag
        for step in range(2):
            new_grads(each, step)
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    assert_equal(captured, eager)  # capturing runs nothing
    for step in range(2, 6):
        for each, rate, flag in zip((params, twins), rates, found, strict=True):
            new_grads(each, step)
            rate.mul_(0.5)
            flag.fill_(float(step == 4))
        graph.replay()
        eager.step()
        assert_equal(captured, eager)
    assert all(s["step"] == 5 for p, s in captured.state.items() if p.numel())


def test_stepping_each_parameter_by_itself_is_the_step_of_all():
    whole, apart = (AdamW(make_params("cast"), **OPTIONS, stochastic_rounding=True) for _ in range(2))
    for step in range(3):
        for optimizer in (whole, apart):
            set_grads(params_of(optimizer), step)
        whole.step()
        for param in reversed(params_of(apart)):
            apart.step_param(param)
        assert_equal(whole, apart)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradient_release_changes_no_bit(level):
    runs = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
        model, optimizer = nemo_lowprec.initialize(
            model.to(DEVICE), opt_level=level, backend="reference", stochastic_rounding=True, gradient_release=release
        )
        for step in range(4):
            model(randn((32, 64), step)).square().mean().backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        runs.append(optimizer)
    assert_equal(*runs)
    assert all(s["step"] == 4 for s in runs[0].state.values())


def test_the_cpu_does_the_same():
    """From the same gradients and weights, within what a division is off."""
    here, there = (
        AdamW(make_params(), **OPTIONS),
        AdamW([nn.Parameter(p.detach().cpu()) for p in make_params()], **OPTIONS),
    )
    for step in range(3):
        set_grads(params_of(here), step)
        for p, q in zip(params_of(here), params_of(there), strict=True):
            q.grad_dtype = None
            q.grad = p.grad.to("cpu")
        here.step()
        there.step()
    for p, q in zip(params_of(here), params_of(there), strict=True):
        torch.testing.assert_close(p.detach().cpu().float(), q.detach().float(), rtol=1e-3, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            a, b = here.state[p][key], there.state[q][key]
            for x, y in zip(parts(a), parts(b), strict=True):
                assert_part(x.cpu(), y, exact=True)


def test_states_saved_here_load_on_the_cpu_and_back():
    optimizer = AdamW(make_params(), **OPTIONS, master_weight_dtype="fp16")
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    on_cpu = AdamW(
        [nn.Parameter(p.detach().cpu()) for p in params_of(optimizer)], **OPTIONS, master_weight_dtype="fp16"
    )
    on_cpu.load_state_dict(optimizer.state_dict())
    assert all(not t.is_cuda for s in on_cpu.state.values() for t in s.values())
    back = AdamW(make_params(), **OPTIONS, master_weight_dtype="fp16")
    back.load_state_dict(on_cpu.state_dict())
    assert all(t.device.type == DEVICE for s in back.state.values() for t in s.values())
    follow(back, optimizer)
    set_grads(params_of(optimizer), 1)
    set_grads(params_of(back), 1)
    optimizer.step()
    back.step()
    assert_equal(optimizer, back)


RATE = {"lr": 1e-3, "weight_decay": 0.1, "seed": 5}


@torch.no_grad()
def step_without_kernels(optimizer, monkeypatch):
    """A step by the reference, also of Muon, whose step has two halves."""
    list(optimizer._updates())  # makes the states where the kernels would have them
    with monkeypatch.context() as patch:
        patch.setattr("nemo_lowprec.optim.low_bit.block_kernels", lambda: None)
        optimizer.step()


def assert_rule_as_the_reference(make, monkeypatch, grad="fp8", steps=3, bad_at=None, factor=0.37):
    """Step both ways and compare after each step; returns the kernel's optimizer."""
    ours, reference = make(), make()
    for step in range(steps):
        for optimizer in (ours, reference):
            set_grads(params_of(optimizer), step, grad, step == bad_at, factor)
        ours.step()
        step_without_kernels(reference, monkeypatch)
        assert_as_the_reference(ours, reference)
        follow(reference, ours)
    return ours


@pytest.mark.parametrize("weight", [torch.float32, torch.float16, "cast", "fp8"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.95, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.0, "maximize": True},
    ],
    ids=str,
)
def test_sgd(monkeypatch, options, fmt, weight):
    ours = assert_rule_as_the_reference(
        lambda: SGD(make_params(weight), momentum_dtype=fmt, stochastic_rounding=True, **{**RATE, **options}),
        monkeypatch,
    )
    assert all(("momentum_buffer" in s) == ("momentum" in options) for p, s in ours.state.items() if p.numel())


@pytest.mark.parametrize("grad", ["fp8", *DTYPES], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.float16, "fp8"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_lion(monkeypatch, fmt, weight, grad):
    for options in ({}, {"betas": (0.5, 0.7), "maximize": True, "weight_decay": 0.0, "stochastic_rounding": True}):
        make = lambda options=options: Lion(make_params(weight), exp_avg_dtype=fmt, **{**RATE, **options})  # noqa: E731
        assert_rule_as_the_reference(make, monkeypatch, grad)
    ours = assert_rule_as_the_reference(make, monkeypatch, grad, bad_at=1)
    param = params_of(ours)[0]
    assert read(ours.state[param]["exp_avg"]).isnan().any()


MATRICES = [(256, 384), (257, 130), (256, 384), (64, 512), (3, 64, 128), (33, 7)]


def make_muon(weight, fmt, **options):
    matrices, rest = make_params(weight, MATRICES), make_params(weight, [(128, 256), (1000,)])
    groups = [{"params": matrices}, {"params": rest, "use_muon": False}]
    return Muon(groups, 2e-2, exp_avg_dtype=fmt, exp_avg_sq_dtype="fp16" if fmt != "fp32" else fmt, seed=5, **options)


@pytest.mark.parametrize("weight", [torch.float32, torch.float16, "cast", "fp8"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_muon(monkeypatch, fmt, weight):
    for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "stochastic_rounding": True}):
        assert_rule_as_the_reference(lambda options=options: make_muon(weight, fmt, **options), monkeypatch)


def test_muon_with_the_learning_rate_as_a_tensor(monkeypatch):
    rate = torch.tensor(2e-2, device=DEVICE)
    assert_rule_as_the_reference(
        lambda: Muon(make_params(torch.float16, MATRICES), rate, exp_avg_dtype="fp8"), monkeypatch
    )


@pytest.mark.parametrize("kind", ["sgd", "lion", "muon"])
def test_the_other_rules_skip_without_a_host_sync(kind):
    make = {
        "sgd": lambda: SGD(make_params(), momentum=0.9, **RATE),
        "lion": lambda: Lion(make_params(), exp_avg_dtype="fp8", **RATE),
        "muon": lambda: make_muon(torch.float16, "fp8"),
    }[kind]
    ours = make()
    set_grads(params_of(ours), 0)
    ours.step()
    before = snapshot(ours)
    ours.found_inf, ours.grad_scale = torch.ones((), device=DEVICE), torch.full((), 8.0, device=DEVICE)
    set_grads(params_of(ours), 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.step()
        ours.found_inf = torch.zeros((), device=DEVICE)  # a fill, no copy
        for a, b in zip(snapshot(ours), before, strict=True):
            assert a.shape == b.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(snapshot(ours), before, strict=True):
        assert_part(a, b, exact=True)
    ours.step()
    assert any(not torch.equal(a, b) for a, b in zip(snapshot(ours), before, strict=True))


def test_muon_steps_as_torchs():
    """In FP32, against torch's Muon on the same GPU; a product in BF16 may round the other way."""
    shapes = MATRICES[:4]
    params, twins = make_params(torch.float32, shapes), make_params(torch.float32, shapes)
    ours, torchs = Muon(params, 2e-2), torch.optim.Muon(twins, 2e-2)
    for step in range(3):
        for each in (params, twins):
            set_grads(each, step, torch.float32)
        ours.step()
        torchs.step()
    for p, q in zip(params, twins, strict=True):
        assert (p - q).abs().max() <= 3 * 2e-2 * 2.0**-6


@pytest.mark.parametrize("grad", ["fp8", torch.float32], ids=str)
def test_states_of_eight_bits_keep_what_is_not_finite(monkeypatch, grad):
    """E5M3 and E2M5 have a code for NaN; a matrix with one is NaN as a whole after Newton–Schulz."""
    ours = compare(exp_avg_sq_dtype="fp8", grad=grad, bad_at=1)
    assert read(ours.state[params_of(ours)[0]]["exp_avg_sq"]).isnan().any()
    ours = assert_rule_as_the_reference(lambda: make_muon(torch.float16, "fp8"), monkeypatch, grad, bad_at=1)
    param = params_of(ours)[0]
    kept = read(ours.state[param]["momentum_buffer"])
    assert kept.isnan().any() and not kept.isnan().all() and param.isnan().all()
