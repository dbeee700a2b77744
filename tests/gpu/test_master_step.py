"""Masters that this package's kernel steps in the place of torch's fused Adam and AdamW."""

import pytest
import torch
from support import watch_masters
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.optim import MasterStep
from nemo_lowprec.weights.saved_form import master_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

KINDS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "no decay": (torch.optim.AdamW, {"weight_decay": 0.0, "maximize": True}),
    "lr tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 33), nn.Linear(33, 16)).cuda()


def prepared(level, cls=torch.optim.AdamW, **options):
    net = model()
    groups = [{"params": net[0].parameters()}, {"params": net[1:].parameters(), "weight_decay": 0.02}]
    return prepare(net, cls(groups, **{"lr": 1e-2, "fused": True, **options}), level)


def run(net, optimizer, steps, bad=()):
    """Losses; the gradients of the steps ``bad`` are not finite."""
    generator, losses = torch.Generator("cuda").manual_seed(1), []
    scaler = torch.amp.GradScaler("cuda", enabled=bool(bad), init_scale=1.0)  # which hands the optimizer its flag
    for step in range(steps):
        x = torch.randn(32, 64, device="cuda", generator=generator)
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x).float().square().mean() * (float("inf") if step in bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "bf16_mixed"])
def test_steps_are_torchs_but_for_roundings(level, kind, monkeypatch):
    cls, options = KINDS[kind]
    found = []
    for ours in (True, False):
        with monkeypatch.context() as patch:
            taken = watch_masters(patch)
            if not ours:
                patch.setattr(MasterStep, "step", lambda *_: [])
            net, optimizer = prepared(level, cls, **options)
            losses = run(net, optimizer, 6, bad=(3,) if kind == "AdamW" else ())
        if ours:
            assert [len(pairs) for pairs in taken] == [0] + [len(list(net.parameters()))] * 5
        masters = [master_of(param) for param in net.parameters()]
        assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(net.parameters(), masters, strict=True))
        if level == "bf16_with_fp8_mixed":
            assert net[0].gemm_plan.weight.amax.item() == net[0].weight.detach().abs().amax().item()
        found.append((losses, [m.detach().clone() for m in masters], optimizer.state_dict()))
    (losses, masters, state), (their_losses, their_masters, their_state) = found
    good = [i for i, loss in enumerate(their_losses) if torch.tensor(loss).isfinite()]
    for i in good:
        assert losses[i] == pytest.approx(their_losses[i], rel=2e-2)
    for ours, theirs in zip(masters, their_masters, strict=True):
        # A weight whose copy is rounded the other way has other gradients, and Adam's steps have the size of lr.
        assert (ours - theirs).norm() < 5e-3 * theirs.norm() + 1e-4
    assert state["state"].keys() == their_state["state"].keys()
    for ours, theirs in zip(state["state"].values(), their_state["state"].values(), strict=True):
        assert ours.keys() == theirs.keys() and torch.equal(ours["step"], theirs["step"])
        assert all(ours[name].dtype == theirs[name].dtype == torch.float32 for name in ours)


def test_one_step_has_torchs_numbers(monkeypatch):
    """From the same masters, states and gradients."""
    found = []
    for ours in (True, False):
        net, optimizer = prepared("bf16_with_fp8_mixed")
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(MasterStep, "step", lambda *_: [])
            generator = torch.Generator("cuda").manual_seed(0)
            for _ in range(2):
                for p in net.parameters():
                    p.grad = torch.randn(p.shape, device="cuda", generator=generator)
                optimizer.step()
        states = optimizer.state_dict()["state"].values()
        found.append([*map(master_of, net.parameters()), *(s[n] for s in states for n in ("exp_avg", "exp_avg_sq"))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("why", ["hook", "closure", "not fused", "amsgrad", "subclass"])
def test_torch_steps_what_the_kernel_does_not(why, monkeypatch):
    class Own(torch.optim.AdamW):
        pass

    options = {"fused": False} if why == "not fused" else {"amsgrad": True} if why == "amsgrad" else {}
    net, optimizer = prepared("bf16_with_fp8_mixed", Own if why == "subclass" else torch.optim.AdamW, **options)
    taken = watch_masters(monkeypatch)
    if why == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    if why == "closure":
        run(net, optimizer, 1)
        taken.clear()

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = net(torch.ones(32, 64, device="cuda")).float().square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
    else:
        losses = run(net, optimizer, 4)
    assert not any(taken) and losses[-1] < losses[0]
