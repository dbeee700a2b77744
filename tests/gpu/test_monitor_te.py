"""The monitor of Transformer Engine's own layers: in a model of the user's, and in Megatron-core's."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nemo_lowprec import CHART, PrecisionMonitor
from nemo_lowprec.compat.transformer_engine import import_te
from nemo_lowprec.compute.backends import te as backend
from nemo_lowprec.plugins import LEVELS as LEVEL_PLUGINS
from nemo_lowprec.report.monitor import read_run
from nemo_lowprec.report.monitor.operands import KINDS
from tests.megatron_cases import OWN, results
from tests.support import trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LEVELS = ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed"]
MEGATRON = ["bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params", "msamp_o2+fp16", "msamp_o3+fp16",
            "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed"]  # fmt: skip
LEAST = {"input": 26, "weight": 26, "grad_output": 18}  # dB; E4M3 gives Gaussian data 31.5, and E5M2 25.6


class Model(pl.LightningModule):
    def __init__(self, norm):
        super().__init__()
        te, options = import_te(), {"params_dtype": torch.float32}
        self.first = te.Linear(128, 256, **options)
        self.middle = te.LayerNormLinear(256, 256, normalization=norm, zero_centered_gamma=norm == "RMSNorm", **options)
        self.last = nn.Linear(256, 128)
        self.losses = []

    def training_step(self, batch, index):
        x = self.last(nn.functional.gelu(self.middle(self.first(batch))))
        loss = x.float().pow(2).mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("level", LEVELS)
def test_layers_of_transformer_engine(level, norm, tmp_path):
    if backend._import_error():
        pytest.skip("needs Transformer Engine")
    losses = []
    data = torch.randn(7, 256, 128, generator=torch.Generator().manual_seed(1))
    for watches in (False, True):
        torch.manual_seed(0)
        model = Model(norm)
        callbacks = [PrecisionMonitor(3, tmp_path)] if watches else []
        options = {"accelerator": "gpu", "max_steps": 7}
        trainer(LEVEL_PLUGINS[level](), *callbacks, **options).fit(model, DataLoader(list(data), batch_size=None))
        losses.append(torch.stack(model.losses).tolist())
    assert losses[0] == losses[1]
    run = read_run(tmp_path)
    assert run.steps == [2, 3, 6] and list(run.loss.values()) == pytest.approx(losses[0], rel=1e-4)
    assert {("first", kind) for kind in KINDS} | {("middle", kind) for kind in KINDS} <= set(run.operands.rows)
    for layer in ("first", "middle"):
        for kind, least in LEAST.items():
            assert all(value is not None and least < value < 40 for value in run.operands.metrics["sqnr"][layer, kind])


@pytest.fixture(scope="module")
def runs(megatron_weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    jobs = {}
    for case in MEGATRON:
        for kind, weights in (("gpt", megatron_weights), ("any", None)):
            if kind == "any" and case not in OWN:
                continue
            job = {"case": case, "sizes": {}, "weights": weights, "kind": kind}
            jobs[f"{kind} {case}"] = job
            jobs[f"{kind} {case} watched"] = {**job, "watched": str(folder / kind / case)}
    return folder, results(1, folder, jobs)


@pytest.mark.parametrize("kind", ["gpt", "any"])
@pytest.mark.parametrize("case", MEGATRON)
def test_models_on_megatron_core(kind, case, runs):
    if kind == "any" and case not in OWN:
        pytest.skip("a level of Megatron-core's own layers")
    folder, found = runs
    plain, watched = found(f"{kind} {case}"), found(f"{kind} {case} watched")
    assert watched["losses"] == plain["losses"]
    assert all(torch.equal(values, plain["weights"][name]) for name, values in watched["weights"].items())
    run = read_run(folder / kind / case)
    assert run.steps == [2, 4, 6] and run.ended and run.about["engine"] == "megatron"
    assert list(run.loss.values()) == pytest.approx(plain["losses"], rel=1e-4)
    level = CHART[case.partition("+")[0]]
    assert all(finding["agrees"] for finding in run.audit["findings"])
    lost = [value for numbers in run.params.metrics["lost"].values() for value in numbers]
    assert lost and all(value is not None for value in lost)
    if level.is_low_bit:
        first = [number for numbers in run.params.metrics["first_sqnr"].values() for number in numbers]
        assert any(value is not None and 25 < value < 40 for value in first)
    if not level.has_fp8:
        return
    rows, sqnr = set(run.operands.rows), run.operands.metrics["sqnr"]
    layers = {layer for layer, _ in rows}
    assert len(layers) >= 4 * 4  # four blocks
    in_fp8 = "fp8_params" in case or (kind == "gpt" and case.startswith("msamp_o3"))
    for layer in layers:
        for operand, least in LEAST.items():
            if operand == "weight" and in_fp8:
                continue
            values = sqnr.get((layer, operand))
            known = values is not None and None not in values
            assert known and all(least < value < 40 for value in values), (layer, operand)
