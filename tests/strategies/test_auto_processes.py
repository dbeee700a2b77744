"""``convert="auto"`` on two processes: both decide alike, whatever batches they have, and resume so."""

import pytest
import torch
from torch import nn

import nemo_lowprec
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.gemm_times import FAMILIES
from tests.auto import made_up_times
from tests.processes import on_processes
from tests.support import Net, Samples, loader, plugin, train


def in_fp8(model):
    return sorted(plan.name for m in model.modules() for plan in gemm_plans(m).values() if plan.recipe is not None)


class Seen(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.low = [*getattr(self, "low", []), in_fp8(self)]


def run_strategy(rank, case, strategy, folder):
    # Alone, the first process would leave ``mid``, too. The second one takes longer, and so decides.
    with made_up_times():
        model = Seen()
        options = {"devices": 2, "strategy": strategy, "max_epochs": -1, "use_distributed_sampler": False}
        run = train(model, plugin(case), data=loader((1, 4)[rank]), max_steps=2, **options)
        run.trainer.save_checkpoint(f"{folder}/one.ckpt")
        choice = run.trainer.precision_plugin.engine.amaxes.choice.state_dict()
        FAMILIES["cpu"] = None
        again = Seen()
        train(again, plugin(case), data=loader((1, 4)[rank]), max_steps=3, ckpt=f"{folder}/one.ckpt", **options)
    return {"low": model.low, "again": again.low, "choice": choice, "losses": [*model.losses, *again.losses]}


@pytest.mark.parametrize("strategy", ["ddp", "lowprec_ddp", "lowprec_sharded"])
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "msamp_o3"])
def test_processes_decide_alike(case, strategy, tmp_path):
    first, second = on_processes(2, tmp_path, run_strategy, case, strategy, str(tmp_path))
    assert first["low"] == second["low"] and first["choice"] == second["choice"]
    assert first["low"] == [["inp", "mid"], ["mid"]]
    assert first["again"] == second["again"] == [first["low"][-1]]
    assert all(torch.isfinite(torch.tensor(run["losses"])).all() for run in (first, second))


def run_plain(rank):
    with made_up_times():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        model, optimizer = nemo_lowprec.prepare(model, None, "bf16_with_fp8_mixed", backend="reference")
        wrapped = nn.parallel.DistributedDataParallel(model)
        data, low = Samples(16), []
        for _ in range(3):
            low.append(in_fp8(model))
            rows = (1, 4)[rank]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(wrapped(data.x[:rows]).float(), data.y[:rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"low": low, "weights": {n: p.detach().clone() for n, p in model.state_dict().items()}}


def test_a_plain_loop_under_ddp_decides_alike(tmp_path):
    first, second = on_processes(2, tmp_path, run_plain)
    assert first["low"] == second["low"] == [["0", "2", "4"], ["2"], ["2"]]
    assert all(torch.equal(first["weights"][n], second["weights"][n]) for n in first["weights"])
