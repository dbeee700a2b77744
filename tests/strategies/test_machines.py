"""Gradients averaged over two machines with two processes each, in every form of replicated training."""

import os
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric

from nemo_lowprec.comm.topology import Machines
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.engine import Engine
from tests.comm.test_machines import reference
from tests.initialize.test_distributed import accumulated
from tests.processes import on_processes
from tests.strategies.test_ddp_loops import Overflow, assert_overflow_skipped
from tests.support import Net, Samples, plugin, train, values_of

LEVEL = "msamp_o2"
FORMS = ["ddp", "lowprec_ddp", "fabric"]


def stages_of(engine):
    return {type(b).__name__: len(b.stages) for b in engine.columns.comm.reducer._buckets}


class Stages(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.found = stages_of(trainer.precision_plugin.engine)


def under_trainer(rank, strategy, model):
    precision = plugin(LEVEL, half="fp16", loss_scale=None, initial_loss_scale=256.0, hysteresis=1)
    data = ResumableLoader(Samples(64), 4, 3, rank, 4, global_batch_size=16, stop_at_epoch_end=False)
    stages = Stages()
    observer = train(
        model, precision, stages, data=data, devices=4, strategy=strategy, max_epochs=-1, max_steps=3,
        use_distributed_sampler=False,
    )  # fmt: skip
    steps = {float(s["step"]) for o in observer.state["optimizers"] for s in o["state"].values()}
    rates = [group["lr"] for o in observer.trainer.optimizers for group in o.param_groups]
    return {
        "grads": {n: values_of(g) for n, g in observer.grads[0].items()}, "stages": stages.found, "steps": steps,
        "rates": rates, "weights": observer.state["weights"], "scale": precision.engine.step.loss_scale.scale,
    }  # fmt: skip


def under_fabric(rank):
    made = Fabric(accelerator="cpu", devices=4, strategy="ddp", plugins=plugin(LEVEL))
    made.launch()
    net = Net()
    model = made.setup_module(net)
    made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
    made.backward(model(x).square().mean())
    grads = {n: values_of(p.grad) for n, p in model.named_parameters()}
    return {"grads": grads, "stages": stages_of(Engine.of(net))}


def every_form(rank):
    os.environ["NCCL_HOSTID"] = str(rank // 2)

    def forms():
        return {s: under_trainer(rank, s, Net()) for s in ("ddp", "lowprec_ddp")} | {"fabric": under_fabric(rank)}

    found = {"loops": {k: v for k, v in accumulated(rank, "O2").items() if k != "kinds"}, "machines": forms()}
    found["overflow"] = {s: under_trainer(rank, s, Overflow(stepwise=True)) for s in ("ddp", "lowprec_ddp")}
    with patch.object(Machines, "of", lambda group: None):
        found["at once"] = forms()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(4, tmp_path_factory.mktemp("ranks"), every_form)


def test_plain_loops(ranks):
    """torch's DDP and ``all_reduce_grads``: the mean of machines' means of what each process has stored."""
    for rank in ranks:
        loops = rank["loops"]
        for name, reduced in loops["reduced"].items():
            own = [r["loops"]["own"].get(name) for r in ranks]
            assert torch.equal(loops["ddp"][name], reduced)
            if reduced.dim() > 1:
                assert torch.equal(reduced, reference(own, "in turn"))
            else:
                assert torch.allclose(reduced, torch.stack(own).mean(0), atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_averages_within_machines_first(ranks, form):
    for rank in ranks:
        found, at_once = rank["machines"][form], rank["at once"][form]
        assert found["stages"] == {"Fp8Bucket": 3, "PlainBucket": 2}
        assert at_once["stages"] == {"Fp8Bucket": 2, "PlainBucket": 2}
        for name, grad in found["grads"].items():
            assert torch.equal(grad, ranks[0]["machines"][form]["grads"][name])
            assert (grad - at_once["grads"][name]).norm() <= 0.06 * grad.norm()


@pytest.mark.parametrize("strategy", ["ddp", "lowprec_ddp"])
def test_an_overflow_on_one_process_skips_the_step_on_all(ranks, strategy):
    for rank in ranks:
        assert_overflow_skipped(rank["overflow"][strategy])
        for name, weight in rank["overflow"][strategy]["weights"].items():
            assert torch.equal(weight, ranks[0]["overflow"][strategy]["weights"][name])
