"""Expected times of steps against those that an H200 took, in ``benchmarks/results``: nothing here is typed in."""

import json
from functools import cache

import pytest
import torch

from benchmarks.llama import BATCH, SEQUENCE, VOCAB, Llama, new_model
from benchmarks.record import RESULTS
from nemo_lowprec.compute.gemm_times import FAMILIES
from nemo_lowprec.compute.speed_filter import Calls
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report import plan_training
from nemo_lowprec.report.advice.passes import Seen
from nemo_lowprec.report.advice.times import StepTimes

H200 = FAMILIES["NVIDIA H200"]
MEASURED = "msamp_o2"  # the level that ``advise`` would measure: the one that takes the least memory
LEVELS = [
    "msamp_o1", "msamp_o3", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "fp16_with_fp8_mixed", "te_fp8", "bf16_mixed", "fp16_mixed", "fp16_amp",
]  # fmt: skip


class Shape(Llama):
    """The model of ``train_step`` without memory."""

    def __init__(self):
        super(Llama, self).__init__()
        self.model = new_model(torch.float32, device="meta")


@cache
def model():
    return Shape()


@cache
def recorded(name):
    lines = [json.loads(line) for line in (RESULTS / "train_step_h200.jsonl").read_text().splitlines()]
    (found,) = [line["ms"] for line in lines if line.get("name") == name]
    return 1e3 * found


@cache
def planned(level):
    tokens = torch.zeros(BATCH, SEQUENCE + 1, dtype=torch.int64)
    return plan_training(model(), LowPrecision(level), batch=tokens)


@cache
def parts():
    calls, layers = Calls(), []
    for name, module in model().named_modules():
        if not isinstance(module, torch.nn.Linear) or module.out_features == VOCAB:  # the head stays in BF16
            continue
        layers.append(name)
        is_first = not name.endswith(("k_proj", "v_proj", "up_proj"))  # which read the tensor of the layer before
        calls.see_traced(name, BATCH * SEQUENCE, module.in_features, module.out_features, is_first)
    calls.close()
    return StepTimes(H200, Seen({}, calls, layers), torch.device("cpu"))


@cache
def rest():
    # Lightning's bf16-true is the plain model in BF16, with an AdamW that moves 7 BF16 numbers a parameter.
    plain = recorded("lightning bf16-true") - 7 * 2 * planned("bf16_mixed").parameters / H200.cast[1]
    step = recorded(f"nemo_lowprec {MEASURED}")
    return parts().rest(plain, step, LowPrecision(MEASURED).parsed, planned(MEASURED))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_takes_what_was_expected_of_it(level):
    expected = parts().step(LowPrecision(level).parsed, planned(level), rest())
    assert expected == pytest.approx(recorded(f"nemo_lowprec {level}"), rel=0.15)
