"""The tables of docs/support.rst: versions and GPUs, from pyproject.toml and from what results name."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.other_gpus import SHARED
from benchmarks.record import RESULTS, lines, read
from benchmarks.rst import block, origin, rst_table, simple_table

__all__ = ["gpu_tests", "other_gpus", "ran_on", "subject_of", "version_ends", "versions"]

_ROOT = Path(__file__).parent.parent
_OUTCOMES = ("passed", "failed", "skipped")
_SUBJECTS = {  # of tests/gpu, each with beginnings of the names of files; the first that fits counts
    "Kernels in Triton": ("triton", "master_step", "low_bit", "other_gpus"),
    "FP8 layers, backends": ("te", "fp8", "flat", "half", "group", "patches", "weight_cache", "torch", "experts"),
    "CUDA graphs, torch.compile": ("graphs", "compiled"),
    "Trainer, loops, adapters": ("trainer", "faces", "resumed", "peft"),
    "Families of models": ("families",),
    "Several GPUs, a network": ("multi_gpu", "megatron_two", "network", "nccl"),
    "Megatron-core, NeMo": ("megatron", "nemo"),
    "Monitor and commands": ("monitor", "profile", "plan", "doctor", "advise", "auto"),
}
_ENDS = ("torch", "lightning", "transformers", "megatron-core", "accelerate", "hydra-core", "nemo-run")
_SHOWN = ("torch", "lightning", "transformers", "transformer-engine", "megatron-core", "timm")


def versions() -> str:
    """The ranges that a package of this version asks for."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^(\S+)==(\S+)", (_ROOT / "constraints.txt").read_text(), re.MULTILINE))
    asked = [("Python", project["requires-python"], "always")]
    extras = project["optional-dependencies"]
    for extra, requirements in ({"always": project["dependencies"]} | extras).items():
        for text in requirements:
            requirement = Requirement(text)
            if requirement.name != project["name"]:
                when = extra if extra == "always" else f"``[{extra}]``"
                asked.append((requirement.name, str(requirement.specifier) or "any", when))
    rows = [(name, of, when, pinned.get(name, "–")) for name, of, when in asked]
    said = f"``constraints.txt`` pins {len(pinned)} packages to versions that the tests run with on a CPU."
    return block(said, rst_table(("Package", "Range", "Asked for", "constraints.txt"), rows))


def ran_on() -> str:
    """Machines and versions of all files of results."""
    files: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for source in read(path)[0]:
            named = ", ".join(f"{n} {v}" for n in _SHOWN if (v := source["versions"].get(n)))
            gpu = f"{source['gpus']} × {source['gpu']}" if source["gpu"] else "a CPU"
            cuda = source.get("cuda") if source["gpu"] else None  # torch without a GPU can be one built with CUDA
            found = files.setdefault((gpu, cuda or "–", named), [])
            if path.stem not in found:
                found.append(path.stem)
    together: dict[tuple[str, ...], Counter[str]] = {}
    for (gpu, cuda, named), stems in files.items():
        together.setdefault((gpu, cuda), Counter())[named] += len(stems)
    rows = [
        (gpu, cuda, max(of, key=lambda named: of[named]), str(sum(of.values())))
        for (gpu, cuda), of in sorted(together.items(), key=lambda item: -sum(item[1].values()))
    ]
    kinds = sorted({gpu.rpartition("× ")[2] for gpu, *_ in rows if gpu != "a CPU"})
    said = f"Figures come from {len(kinds)} kinds of GPU: {' and '.join(kinds)}."
    return block(said, rst_table(("Machine", "CUDA", "Versions of most files", "Files of results"), rows))


def version_ends() -> str:
    """Outcomes of tests on a CPU with the oldest and the newest versions of the ranges."""
    here: dict[str, Any] = {}
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for line in lines(RESULTS / "version_ends.jsonl"):
        if "command" in line:
            here = line
            continue
        named = (here["python"], *(here["versions"][name].partition("+")[0] for name in _ENDS))
        counts.setdefault(named, Counter()).update({outcome: line[outcome] for outcome in _OUTCOMES})
    rows = [(*named, *(f"{found[of]:,}" for of in _OUTCOMES)) for named, found in counts.items()]
    whole = sum(counts.values(), Counter[str]())
    said = f"With {len(rows)} sets of versions {whole['passed']:,} tests passed on a CPU and {whole['failed']} failed."
    return block(said, simple_table(("Python", *_ENDS, *_OUTCOMES), rows))


def other_gpus(path: Path = RESULTS / "other_gpus.jsonl") -> str:
    """Compute capabilities for which the Triton kernels compile."""
    origins, figures = read(path)
    rows = []
    for f in figures:
        shared = f"{f['shared_bytes_max'] / 1024:.0f} of {SHARED[f['capability']]}"
        rows.append((f["capability"], f"{f['compiled']} of {f['forms']}", shared, str(f["by_fp16"])))
    whole = [f["capability"] for f in figures if f["compiled"] == f["forms"] and not f["over_shared"]]
    takeaway = (
        f"All {figures[0]['forms']} forms of {figures[0]['kernels']} Triton kernels compile for compute capability "
        f"{', '.join(whole)}, and fit into the shared memory there."
    )
    header = ("Compute capability", "forms that compile", "shared KiB", "forms that round twice")
    return block(takeaway, simple_table(header, rows), origin(origins, "triton"))


def gpu_tests() -> str:
    """Outcomes of the tests that need a GPU, by subject."""
    origins, figures = read(RESULTS / "gpu_tests_h200.jsonl")
    counts: dict[str, Counter[str]] = {subject: Counter() for subject in _SUBJECTS}
    for figure in figures:
        if figure["benchmark"] == "gpu_tests":
            found = counts[subject_of(Path(figure["file"]))]
            found.update(files=1, **{outcome: figure[outcome] for outcome in _OUTCOMES})
    whole = sum(counts.values(), Counter[str]())
    dates = sorted({source["date"] for source in origins})
    said = (
        f"On {origins[0]['gpu']}, {', '.join(dates)}, {whole['passed']:,} tests of {whole['files']} files passed "
        f"and {whole['failed']} failed."
    )
    rows = [
        (subject, *(f"{found[of]:,}" for of in ("files", *_OUTCOMES))) for subject, found in counts.items() if found
    ]
    return block(said, simple_table(("Subject", "Files", *_OUTCOMES), rows))


def subject_of(file: Path) -> str:
    """The first subject that the name of a file of tests/gpu belongs to."""
    name = file.stem.removeprefix("test_")
    return next(subject for subject, beginnings in _SUBJECTS.items() if name.startswith(beginnings))
