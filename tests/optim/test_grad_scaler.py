"""torch's GradScaler with the low-bit optimizers: scale, unscale_, step, update."""

import pytest
import torch
from low_bit import all_bits, make_params, set_grads, values
from support import assert_same
from torch.nn.utils import clip_grad_norm_ as torch_clip

from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.optim import AdamW

KINDS = pytest.mark.parametrize("kind", [torch.float32, "fp8"])
SCALE = 1024.0


def make(kind=torch.float32, **options):
    params = make_params(torch.float16)
    return params, AdamW(params, lr=1e-2, **options), torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)


def scaled(params, scaler, step, kind, scale=None):
    scaler.scale(torch.ones(()))  # as a loop does with its loss: the scale gets its tensor
    set_grads(params, step, kind, size=1e-2)
    for param in params:
        if kind == "fp8":
            param.grad.mul_(scaler.get_scale() if scale is None else scale)
        else:
            param.grad *= scaler.get_scale() if scale is None else scale


@KINDS
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_step_is_the_plain_one(kind, unscale):
    params, optimizer, scaler = make()
    twins, plain, _ = make()
    for step in range(3):
        scaled(params, scaler, step, kind)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        set_grads(twins, step, kind)
        plain.step()
    assert_same(all_bits(optimizer), all_bits(plain))
    assert scaler.get_scale() == 2 * SCALE
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@KINDS
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_skips_the_whole_step_and_halves_the_scale(kind, unscale, bad):
    params, optimizer, scaler = make(master_weight_dtype="fp16", stochastic_rounding=True)
    scaled(params, scaler, 0, kind)
    scaler.step(optimizer)
    scaler.update()
    before = all_bits(optimizer)
    scaled(params, scaler, 1, kind)
    params[1].grad[2, 3] = bad
    params[1].grad = params[1].grad if kind != "fp8" else type(params[0].grad).from_float(spoilt(params[1].grad, bad))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_same(all_bits(optimizer), before)
    assert optimizer.state[params[0]]["step"] == 1 and scaler.get_scale() == SCALE / 2
    scaled(params, scaler, 2, kind)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[params[0]]["step"] == 2 and all(values(p).isfinite().all() for p in params)


def spoilt(grad, bad):
    plain = grad.dequantize()
    plain[2, 3] = bad
    return plain


@KINDS
def test_an_overflow_in_the_first_step_of_all(kind):
    params, optimizer, scaler = make()
    before = [values(p) for p in params]
    scaled(params, scaler, 0, kind)
    params[3].grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(values(p), old) for p, old in zip(params, before, strict=True))
    scaled(params, scaler, 0, kind)
    scaler.step(optimizer)
    assert optimizer.state[params[0]]["step"] == 1


@KINDS
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch_clip])
def test_clipping_between_unscale_and_step(kind, clip):
    params, optimizer, scaler = make()
    twins, plain, _ = make()
    scaled(params, scaler, 0, kind)
    scaler.unscale_(optimizer)
    norm = clip(params, 0.05)
    scaler.step(optimizer)
    set_grads(twins, 0, kind)
    assert torch.equal(norm, clip(twins, 0.05)) and norm > 0.05
    plain.step()
    assert_same(all_bits(optimizer), all_bits(plain))


def test_a_disabled_scaler_steps_plainly():
    params, optimizer, _ = make()
    twins, plain, _ = make()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for each in (params, twins):
        set_grads(each, 0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    plain.step()
    assert_same(all_bits(optimizer), all_bits(plain))
