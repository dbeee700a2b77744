"""Kernels compiled for GPUs that are not at hand: what is counted, what the table says, and which steps are trained."""

import json

import pytest
import torch

from benchmarks import kernel_forms, support_tables
from benchmarks.other_gpus import CAPABILITIES, SHARED, Compiled, reason, summary

FORMS = [{"kernel": "small"}, {"kernel": "large"}, {"kernel": "large"}]


def test_a_summary_counts_errors_and_forms_that_need_too_much_shared_memory():
    found = [Compiled("", 512), Compiled("", 100 * 1024, True), Compiled("TypeError: fp8e4nv not supported")]
    of = summary("8.9", FORMS, found)
    assert (of["kernels"], of["forms"], of["compiled"]) == (2, 3, 2)
    assert of["errors"] == {"TypeError: fp8e4nv not supported": 1}
    assert (of["shared_bytes_max"], of["shared_kernel"], of["over_shared"], of["by_fp16"]) == (102400, "large", 1, 1)
    assert summary("9.0", FORMS, found)["over_shared"] == 0


def test_every_capability_has_a_limit_of_shared_memory():
    assert set(SHARED) == set(CAPABILITIES)


def test_the_table_names_where_all_forms_compile_and_fit(tmp_path):
    large = [Compiled("", 100 * 1024)] * 3
    figures = [{"benchmark": "other_gpus", **summary(capability, FORMS, large)} for capability in ("8.9", "10.0")]
    origin = {
        "command": "python -m benchmarks.other_gpus",
        "date": "2026-11-29",
        "gpu": None,
        "gpus": 0,
        "versions": {},
    }
    path = tmp_path / "other.jsonl"
    path.write_text("\n".join(map(json.dumps, (origin, *figures))))
    table = support_tables.other_gpus(path)
    assert "All 3 forms of 2 Triton kernels compile for compute capability 10.0, and fit" in table
    assert "100 of 99" in table and "100 of 227" in table


@pytest.mark.parametrize("level", ["bf16_mixed", "msamp_o3"])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_the_models_train(level, name):
    torch.manual_seed(0)
    model, batch = kernel_forms.models()[name]
    before = [p.detach().clone() for p in model.parameters()]
    kernel_forms.train(level, model, batch, torch.device("cpu"))
    assert any(not torch.equal(p.detach().float(), b.float()) for p, b in zip(model.parameters(), before, strict=True))


def test_a_reason_is_what_the_assembler_or_the_innermost_error_says():
    assembler = RuntimeError("PTXAS error\nptxas /tmp/x.ptx, line 3; error   : Feature 'f' requires sm_90\nptxas fatal")
    inner = ValueError("at 1:0:\n  x = y\n      ^\ntype fp8e4nv not supported")
    outer = RuntimeError("at 2:0:\n ^")
    outer.__cause__ = inner
    assert reason(assembler) == "RuntimeError: Feature 'f' requires sm_90"
    assert reason(outer) == "ValueError: type fp8e4nv not supported"
    assert reason(RuntimeError()) == "RuntimeError: "
