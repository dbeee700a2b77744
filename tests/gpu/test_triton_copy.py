"""The fused half copies, and the amaxes that kernels leave for the scales of weights."""

import pytest
import torch
from support import CASES, Overflowing, foreach_adamw, fused_adamw, kernels_or_skip, level_of, plugin, train
from torch import nn

import nemo_lowprec
from nemo_lowprec.compute.weight_scales import WeightScales
from nemo_lowprec.kernels.loader import copy_kernels
from nemo_lowprec.tensors import Fp8Weight, stored_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
DELAYED = [case for case in CASES if level_of(case).scaling == "delayed"]
SIZES = [1, 5, 128, 4096, 4097, 65536, 70001, 300_000]  # a program copies 4,096 elements; 16 of them share a tensor


@pytest.fixture
def copier():
    return kernels_or_skip(copy_kernels()).FusedCopy()


def sources(seed=0, offset=0):
    """Values over many binades, at addresses ``offset`` elements off."""
    torch.manual_seed(seed)
    powers = [torch.exp2(torch.randint(-30, 17, (n + offset,), device="cuda").float()) for n in SIZES]
    return [(torch.randn(len(p), device="cuda") * p)[offset:] for p in powers]


@HALVES
@pytest.mark.parametrize("offset", [0, 1])
def test_copies_are_torchs_and_amaxes_theirs(copier, half, offset):
    targets = [torch.full((n + offset,), -7.0, dtype=half, device="cuda") for n in SIZES]
    for seed in (0, 1):  # the tables of the first are used again
        values = sources(seed, offset)
        values[3][17], values[5][-1] = float("nan"), float("-inf")
        versions = [t._version for t in targets]
        amaxes = copier.copy(values, [t[offset:] for t in targets])
        assert all(t._version > v for t, v in zip(targets, versions, strict=True))
        for value, target, amax in zip(values, targets, amaxes, strict=True):
            want = value.to(half)
            torch.testing.assert_close(target[offset:], want, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(amax, torch.linalg.vector_norm(want.float(), torch.inf), rtol=0, atol=0,
                                       equal_nan=True)  # fmt: skip
            assert (target[:offset] == -7).all()


@HALVES
def test_other_tensors_may_come(copier, half):
    for values in (sources(), sources()[2:5], sources()[::-1]):
        targets = [torch.empty_like(v, dtype=half) for v in values]
        amaxes = copier.copy(values, targets)
        assert all(torch.equal(t, v.to(half)) for t, v in zip(targets, values, strict=True))
        assert torch.equal(amaxes, torch.stack([t.float().abs().max() for t in targets]))


@pytest.fixture
def renewals(monkeypatch):
    """Each renewal of the scales of weights: whether kernels had left all amaxes. Asserts that all are right."""
    renew, seen = WeightScales.renew, []

    def checked(self):
        weights = [scale.weight for scale in self.states.values()]
        plain = [w for w in weights if not isinstance(w, Fp8Weight)]  # an FP8 weight has a scale of its own
        left = all("amax_of_step" in weight.__dict__ for weight in plain)
        renew(self)
        for weight, amax in zip(weights, self.amax, strict=True):
            assert isinstance(weight, Fp8Weight) or amax == stored_data(weight).float().abs().max()
        seen.append(left)

    monkeypatch.setattr(WeightScales, "renew", checked)
    return seen


@pytest.mark.parametrize("optimizer", [fused_adamw, foreach_adamw])
@pytest.mark.parametrize("case", DELAYED)
def test_scales_after_a_step_are_those_of_the_weights(renewals, case, optimizer):
    level = level_of(case)
    train(Overflowing(1, optimizer=optimizer), plugin(case), accelerator="gpu", max_steps=3)
    assert len(renewals) >= 2 and all(left == (level.has_half_weights or level.is_low_bit) for left in renewals)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scales_after_a_step_that_the_kernel_skips(renewals, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    model, optimizer = nemo_lowprec.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    x = torch.randn(32, 64, device="cuda")
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(renewals) == 3 and all(renewals)
