"""The monitor on several processes: their numbers are those of all, and only the first one writes."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from tests.processes import on_processes
from tests.support import Net, loader, plugin, trainer

STRATEGIES = ["lowprec_ddp", "lowprec_sharded"]
CASES = ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2", "msamp_o3", "te_fp8"]
STEPS = 7


class Ending(pl.Callback):
    """The model's state at the end of the training."""

    def on_train_end(self, trainer, pl_module):
        state = trainer.strategy.lightning_module_state_dict().items()
        self.state = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state}


def fit(rank, folder, strategy, cases):
    """Losses and weights of a monitored and of a plain training."""
    found = {}
    for case in cases:
        for watches in (True, False):
            torch.manual_seed(0)
            model = Net()
            callbacks = [PrecisionMonitor(3, Path(folder) / strategy / case)] if watches else []
            options = {"strategy": strategy, "devices": 2, "max_steps": STEPS, "max_epochs": -1}
            ending = Ending()
            run = trainer(plugin(case), *callbacks, ending, **options)
            run.fit(model, loader())
            state = ending.state
            found[f"{case} {watches}"] = (
                {name: value.float().clone() for name, value in state.items()} if rank == 0 else {}
            )
            if watches:
                assert (callbacks[0].path is None) == (rank > 0)
    return found


@pytest.fixture(scope="module", params=STRATEGIES)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first, _ = on_processes(2, folder, fit, str(folder), request.param, CASES)
    return request.param, first, {case: read_run(folder / request.param / case) for case in CASES}


def test_training_is_the_same(runs):
    _, first, _ = runs
    for case in CASES:
        watched, plain = first[f"{case} True"], first[f"{case} False"]
        assert watched and watched.keys() == plain.keys()
        assert all(torch.equal(watched[name], plain[name]) for name in plain), case


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_all_processes(runs, case):
    strategy, _, found = runs
    run = found[case]
    assert run.steps == [2, 3, 6] and run.ended and list(run.loss) == list(range(1, STEPS + 1))
    about = run.about
    assert about["processes"] == 2 and about["engine"] == {"lowprec_ddp": "ddp", "lowprec_sharded": "fsdp2"}[strategy]
    assert about["level"] == case and about["parameters"] == sum(p.numel() for p in Net().parameters())
    names = [name for name, _ in Net().named_parameters()]
    assert [row[0] for row in run.params.rows] == names
    assert all(value is not None and value < 5 for value in run.params.metrics["lost"]["mid.weight",])
    is_low = case.startswith("msamp")
    for metric in ("gradient_sqnr", "first_sqnr"):
        numbers = run.params.metrics[metric]["mid.weight",]
        assert all(25 < value < 40 for value in numbers) if is_low else numbers == [None] * 3
    wire = [sample["wire"]["sqnr"] for sample in run.samples]
    assert all(25 < value < 40 for value in wire) if is_low else wire == [None] * 3
    if case != "bf16_mixed":
        assert {layer for layer, _ in run.operands.rows} >= {"inp", "mid"}
        for kind, least in (("input", 28), ("weight", 28), ("grad_output", 20)):
            numbers = run.operands.metrics["sqnr"]["mid", kind]
            # Weights that are gathered in FP8 are rounded on their shards.
            gathered = kind == "weight" and (strategy, case) == ("lowprec_sharded", "msamp_o3")
            assert numbers == [None] * 3 if gathered else all(least < value < 40 for value in numbers)
    assert all(sample["grad_norm"] > 0 for sample in run.samples)
    assert run.audit is not None and all(finding["agrees"] for finding in run.audit["findings"])
