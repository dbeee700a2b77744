"""The documents' tables of measurements, made from benchmarks/results/: ``python -m benchmarks.tables`` prints them.

``python -m benchmarks.tables --write`` puts them into README.rst and docs/, between the comments that name them, and
draws the pictures.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks import (
    bar_pictures,
    choice_tables,
    convergence_tables,
    everyday_tables,
    expert_tables,
    face_tables,
    fault_tables,
    headline_tables,
    kernel_tables,
    level_tables,
    lora_tables,
    loss_tables,
    megatron_tables,
    memory_tables,
    muon_tables,
    nemo_tables,
    numerics,
    parallel_tables,
    part_pictures,
    step_tables,
    support_tables,
    watch_tables,
)
from benchmarks.levels import HOPPER
from benchmarks.pictures import Picture
from benchmarks.record import RESULTS
from benchmarks.rst import block, simple_table
from nemo_lowprec.chart import CHART, COLUMNS

_ROOT = Path(__file__).parent.parent
_DOCS = _ROOT / "docs"
README, MEASURED = _ROOT / "README.rst", _DOCS / "measured.rst"
_MADE = ("from_accelerate", "from_msamp", "from_nemo")
_PAGES = (
    "figures", "convergence", "watching", "profiling", "advising", "which_level", "numerics", "support", "megatron",
    *_MADE,
)  # fmt: skip
LEVEL_PAGES = tuple(_DOCS / "levels" / f"{name}.rst" for name in ("index", *CHART))
DOCUMENTS = (README, MEASURED, *(_DOCS / f"{name}.rst" for name in _PAGES), *LEVEL_PAGES)


def chart() -> str:
    """The precision chart, without the rows that no GPU has run."""
    others = " and ".join(f"``{name}``" for name in CHART if name not in HOPPER)
    said = (
        f"These {len(HOPPER)} of {len(CHART)} levels run on Hopper GPUs; {others} need a Blackwell GPU and have run "
        "on the reference backend only."
    )
    return block(said, _rows(HOPPER))


def levels_chart() -> str:
    """The precision chart."""
    return block(f"A row for each of the {len(CHART)} levels.", _rows(CHART))


def _rows(names: Iterable[str]) -> str:
    rows = [CHART[name] for name in names]
    return simple_table(COLUMNS, [[f"``{r.name}``", *list(r.columns().values())[1:]] for r in rows])


PICTURES: dict[str, Callable[[], Picture]] = {
    "everyday_picture": everyday_tables.everyday_picture,
    "throughput_picture": step_tables.throughput_picture,
    "fastest_picture": step_tables.fastest_picture,
    "curves_picture": loss_tables.curves_picture,
    "msamp_picture": loss_tables.msamp_picture,
    "others_picture": loss_tables.others_picture,
    "replicated_picture": parallel_tables.replicated_picture,
    "sharded_picture": parallel_tables.sharded_picture,
    "convergence_picture": convergence_tables.curves_picture,
    "megatron_parity_picture": megatron_tables.parity_picture,
    "megatron_seeds_picture": megatron_tables.seeds_picture,
    **bar_pictures.PICTURES,
    **part_pictures.PICTURES,
    **numerics.PICTURES,
}


def _shown(name: str, folder: str) -> Callable[[], str]:
    return lambda: PICTURES[name]().rst(folder)


TABLES: dict[str, Callable[[], str]] = {
    "chart": chart,
    "levels_chart": levels_chart,
    "which_level": choice_tables.which_level,
    "formats_table": numerics.formats_table,
    "accelerate_settings": face_tables.accelerate_settings,
    "msamp_refused": face_tables.msamp_refused,
    "aliases": face_tables.aliases,
    "watched": watch_tables.watched,
    "lost": watch_tables.lost,
    "versions": support_tables.versions,
    "version_ends": support_tables.version_ends,
    "ran_on": support_tables.ran_on,
    "gpu_tests": support_tables.gpu_tests,
    "other_gpus": support_tables.other_gpus,
    **level_tables.LEVEL_TABLES,
    "headlines": headline_tables.headlines,
    "headline_models": _shown("everyday_picture", "benchmarks/results"),
    "headline_loss": _shown("convergence_picture", "benchmarks/results"),
    "headline_picture": _shown("throughput_picture", "../benchmarks/results"),
    "everyday": everyday_tables.everyday,
    "everyday_others": everyday_tables.others,
    "everyday_8b": everyday_tables.large,
    "experts": expert_tables.experts,
    "experts_columns": expert_tables.experts_columns,
    "lora": lora_tables.lora,
    "host": kernel_tables.host,
    "recomputed_layers": kernel_tables.recomputed_layers,
    "throughput": step_tables.throughput,
    "fastest": step_tables.fastest,
    "rowwise": step_tables.rowwise,
    "parity": loss_tables.parity,
    "image_parity": loss_tables.image_parity,
    "convergence_gaps": convergence_tables.gaps,
    "convergence_chance": convergence_tables.chance,
    "convergence_kinds": convergence_tables.by_kind,
    "convergence_ablation": convergence_tables.ablation,
    "optimizer_step": kernel_tables.optimizer_step,
    "muon_bytes": muon_tables.muon_bytes,
    "muon_step": muon_tables.muon_step,
    "muon_parity": muon_tables.muon_parity,
    "backends": kernel_tables.backends,
    "casts": kernel_tables.casts,
    "patch_embedding": kernel_tables.patch_embedding,
    "memory": memory_tables.memory,
    "llama_8b": memory_tables.llama_8b,
    "gradient_sync": parallel_tables.gradient_sync,
    "gradient_sync_links": parallel_tables.gradient_sync_links,
    "gradient_sync_machines": parallel_tables.gradient_sync_machines,
    "gradient_sync_machines_gpus": partial(
        parallel_tables.gradient_sync_machines, RESULTS / "gradient_sync_machines_h200.jsonl", 64
    ),
    "steps_over_links": parallel_tables.steps_over_links,
    "replicated": parallel_tables.replicated,
    "sharded": parallel_tables.sharded,
    "parallel_single": parallel_tables.parallel_single,
    "parallel_parity": parallel_tables.parallel_parity,
    "megatron_step": megatron_tables.megatron_step,
    "megatron_parity": megatron_tables.megatron_parity,
    "megatron_seeds": megatron_tables.megatron_seeds,
    "nemo_recipe": nemo_tables.nemo_recipe,
    "faults": fault_tables.faults,
    "faults_gpus": partial(fault_tables.faults, RESULTS / "faults_h200.jsonl"),
    "monitor": watch_tables.monitor,
    "profiles": watch_tables.profiles,
    "profiles_small": partial(watch_tables.profiles, RESULTS / "profile_h200.jsonl"),
    "advice_80": partial(watch_tables.advice, RESULTS / "advise_h100.jsonl"),
    "advice_141": watch_tables.advice,
    "advice_12_layers": partial(watch_tables.advice, case="llama_8b_12_layers"),
    "advice_100m": partial(watch_tables.advice, case="llama_100m"),
    **{name: _shown(name, "../benchmarks/results") for name in PICTURES},
}


def fill(text: str) -> str:
    """``text`` with every block ``.. NAME begins`` to ``.. NAME ends`` made anew."""
    for name, make in TABLES.items():
        place = rf"(?s)(\.\. {name} begins\n\n).*?(\n\n\.\. {name} ends)"
        text = re.sub(place, lambda m, make=make: m[1] + make() + m[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the documents")
    if parser.parse_args().write:
        for document in DOCUMENTS:
            document.write_text(fill(document.read_text()))
        for picture in PICTURES.values():
            picture().draw(RESULTS)
        return
    for make in TABLES.values():
        try:
            print(make(), end="\n\n")
        except FileNotFoundError as missing:
            print(f"No {Path(missing.filename).name} yet.", end="\n\n")


if __name__ == "__main__":
    main()
