"""Methods of Hugging Face's PEFT at the levels: losses beside those of plain FP32."""

import pytest
import torch
from adapted_models import METHODS, STEPS, TOKENS, Adapted
from support import plugin, replay, trainer

from nemo_lowprec.plugins import LEVELS

ONE = TOKENS[:1].repeat(STEPS, 1, 1)  # one batch, whose loss falls step by step
CASES = [
    *((method, level) for method in ("lora", "dora") for level in LEVELS),
    *zip(("whole head", "adalora", "ia3", "prompt", "prefix"), ["bf16_with_fp8_mixed", "msamp_o2"] * 3, strict=False),
]


def losses(method, level, dtype=torch.float32):
    module = Adapted(method, dtype)
    trainer(plugin(level) if level else None, max_steps=STEPS).fit(module, replay(ONE))
    return module.losses


@pytest.fixture(scope="module")
def plain():
    return {method: losses(method, None) for method in METHODS}


@pytest.mark.parametrize(("method", "level"), CASES)
def test_a_method_learns_as_in_fp32(plain, method, level):
    want, got = plain[method], losses(method, level, torch.bfloat16 if level != "fp16_amp" else torch.float32)
    fell = want[0] - want[-1]
    assert fell > 0.3
    assert got[-1] == pytest.approx(want[-1], abs=max(0.05, (0.15 if "nvfp4" in level else 0.05) * fell))
