"""Steps of masters beside torch's, by the reference: what is left to torch, and what the optimizer keeps."""

import pytest
import torch
from support import watch_masters
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.optim import masters
from nemo_lowprec.optim.reference import step_by_reference
from nemo_lowprec.weights.saved_form import master_of


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Let the reference step in the place of the kernel."""

    class Reference:
        def step(self, updates, inputs):
            step_by_reference(updates, inputs)
            for update in updates:
                if update.measures:
                    update.param.amax_of_step = update.param.abs().amax().float()

    monkeypatch.setattr(masters, "FusedStep", Reference)

    def fits(param, master, state, known):
        return master.grad is not None and param.dtype == torch.bfloat16

    monkeypatch.setattr(masters, "_fits", fits)


def prepared(cls=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16))
    return prepare(net, cls(net.parameters(), lr=1e-2, **options), "bf16_with_fp8_mixed")


def train(net, optimizer, steps, scheduler=None):
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(16, 32, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_are_torchs(cls, monkeypatch):
    found = []
    for ours in (True, False):
        if not ours:
            monkeypatch.setattr(masters, "_fits", lambda *_: False)
        taken = watch_masters(monkeypatch)
        net, optimizer = prepared(cls, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = train(net, optimizer, 5, scheduler)
        assert [len(pairs) for pairs in taken] == [0] + [6 * ours] * 4
        assert all(param.grad is None and master_of(param).grad is None for param in net.parameters())
        for param in net.parameters():
            assert torch.equal(param, master_of(param).to(param.dtype))
        found.append((losses, [master_of(p).detach() for p in net.parameters()], optimizer.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)
    for mine, theirs in zip(found[0][2]["state"].values(), found[1][2]["state"].values(), strict=True):
        assert mine.keys() == theirs.keys() and mine["step"] == theirs["step"] == 5
    assert found[0][2]["param_groups"] == found[1][2]["param_groups"]


def test_a_copy_that_was_written_is_taken_over():
    net, optimizer = prepared()
    train(net, optimizer, 2)
    with torch.no_grad():
        net[0].weight.fill_(0.5)
    train(net, optimizer, 1)
    assert (master_of(net[0].weight) - 0.5).abs().max() < 0.02


def test_a_parameter_without_a_gradient_is_left_alone():
    net, optimizer = prepared()
    train(net, optimizer, 2)
    before = master_of(net[2].weight).detach().clone()
    steps = int(optimizer.state[net[2].weight]["step"])
    net[0](torch.randn(4, 32).bfloat16()).float().sum().backward()
    optimizer.step()
    assert torch.equal(master_of(net[2].weight), before) and int(optimizer.state[net[2].weight]["step"]) == steps
    assert int(optimizer.state[net[0].weight]["step"]) == steps + 1


@pytest.mark.parametrize("why", ["hook", "closure", "amsgrad", "subclass"])
def test_torch_steps_what_the_kernel_does_not(why, monkeypatch):
    class Own(torch.optim.AdamW):
        pass

    taken = watch_masters(monkeypatch)
    net, optimizer = prepared(Own if why == "subclass" else torch.optim.AdamW, amsgrad=why == "amsgrad")
    if why == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    if why == "closure":

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.ones(16, 32)).float().square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
    else:
        losses = train(net, optimizer, 4)
    assert not any(taken) and losses[-1] < losses[0]
