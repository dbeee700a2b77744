"""The audit's table for people."""

from io import StringIO

from rich.console import Console

from nemo_lowprec.chart import CHART
from nemo_lowprec.report.engine_look import ShardedLook
from nemo_lowprec.report.findings import AuditReport, Finding
from nemo_lowprec.report.megatron_look import MegatronLook


def lines_of(report):
    console = Console(record=True, width=80, file=StringIO())
    console.print(report.table())
    return console.export_text().splitlines()


def test_the_longest_rows_fit_80_columns_with_whole_words():
    columns = ["Computation (GEMM)", "Comm", "Weight", "Master weight", "Weight gradient", "Optimizer states"]
    totals = dict.fromkeys([*columns[1:], "Comm, gathered weights", "DDP's buckets, beside the gradients"], 2**45)
    for places in ({}, ShardedLook.places, MegatronLook.places):
        findings = [Finding(column, "kept FP32", "fp16+fp8", "fp16+fp8", 12.345) for column in columns]
        findings.append(Finding("Comm", "converted", "fp8", "fp32", None))
        lines = lines_of(AuditReport(CHART["bf16_with_fp8_mixed"], findings, totals, places))
        text = " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= 80 and "…" not in text
        for name in ("bf16_with_fp8_mixed", *columns, "FP16+FP8", "12.35", "kept FP32", "DIFFERS", "33,554,432.0 MiB"):
            assert name in text
        for place in places.values():
            assert all(word in text for word in place.split())
