"""Training under ``torch.set_default_dtype(torch.bfloat16)``: scales, amaxes and factors stay FP32."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import nemo_lowprec
from nemo_lowprec import CHART, prepare

LEVELS = [name for name, level in CHART.items() if level.scaling not in ("mxfp8", "nvfp4")]
MAKERS = {"empty", "empty_strided", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def trained(level, dtype, set_default):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
    batches = torch.randn(6, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_default(dtype)
    model, optimizer = prepare(model, optimizer, level)
    half = torch.float16 if CHART[level].autocast == "fp16" else torch.bfloat16
    losses = []
    for i, batch in enumerate(batches):
        with torch.autocast("cpu", half):
            loss = model(batch).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    set_default(torch.float32)
    return [*losses, *(param.detach().float() for param in model.parameters())]


@pytest.mark.parametrize("level", LEVELS)
def test_a_default_of_bf16_changes_no_number(level, default_dtype):
    expected = trained(level, torch.float32, default_dtype)
    found = trained(level, torch.bfloat16, default_dtype)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("path", sorted(Path(nemo_lowprec.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_each_new_tensor_names_its_dtype(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in MAKERS}]
    without = [call.lineno for call in made if not any(keyword.arg == "dtype" for keyword in call.keywords)]
    assert without == []
