"""The tables that the Trainer prints at its start: the level, its layers, and the bytes of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from rich.console import Console
from torch import nn
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compat import lightning as compat
from nemo_lowprec.compute import Computation
from nemo_lowprec.engine import Engine
from nemo_lowprec.lines import pair_lines, text_lines
from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard
from nemo_lowprec.weights import is_frozen_fp8


def level_table(
    level: PrecisionLevel, fp8_params: bool, modules: Iterable[nn.Module], graphs: str | None = None
) -> str:
    """The chart's row, a column a line, and the number of parameters of the model's parts ``modules``.

    Args:
        graphs: what is said of CUDA graphs; None says nothing.
    """
    rows = {column: cell for column, cell in level.columns(fp8_params).items() if column != "Level"}
    if graphs is not None:
        rows["CUDA graphs"] = graphs
    params = {id(p): p for module in modules for p in module.parameters() if not isinstance(p, UninitializedParameter)}
    count = sum(p.numel() for p in params.values())
    trained = sum(p.numel() for p in params.values() if p.requires_grad)
    rows["Parameters"] = f"{count:,}" + (f", of which {trained:,} are trained" if trained != count else "")
    in_fp8 = sum(p.numel() for p in params.values() if is_frozen_fp8(p))
    if in_fp8:
        rows["Frozen weights"] = f"{in_fp8:,} parameters in FP8, 1 byte each; the others as the level stores weights"
    return "\n".join(pair_lines(rows.items()))


@rank_zero_only
def print_tables(
    title: object, tables: Iterable[str | None], problem: str | None, heading: str = "Precision: "
) -> None:
    """Print the level and its arguments, then ``tables``, and warn of ``problem``; on the first process only.

    Args:
        title: the arguments' text.
        heading: before the title.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print("\n".join(text_lines(f"{heading}{title}", hanging=2)), style="bold")
    for table in filter(None, tables):
        console.print("\n" + table)
    console.print()
    if problem:
        rank_zero_warn(problem)


def print_summary(engine: Engine, title: object) -> None:
    """Print the tables of a model that is about to be trained, and warn if few of its layers are converted."""
    assert engine.model is not None
    fp8_params = engine.recipe is not None and engine.recipe.fp8_params
    computation = engine.columns.computation
    layers, problem = computation.describe() or (None, None)
    row = level_table(engine.level, fp8_params, [engine.model], graphs_row(computation))
    print_tables(title, [row, layers], problem)
    computation.when_decided = partial(print_choice, computation)


def graphs_row(computation: Computation) -> str | None:
    """What the table says of CUDA graphs; None on a CPU."""
    if computation.device.type != "cuda":
        return None
    obstacle = computation.no_graphs()
    return "of the model or its blocks, after a few passes" if obstacle is None else f"off, {obstacle}"


def print_choice(computation: Computation) -> None:
    """Print the table of layers once ``convert="auto"`` has decided."""
    layers, problem = computation.describe() or (None, None)
    print_tables('convert="auto" has decided', [layers], problem, heading="")


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters as they are stored now, with scales, without masters and optimizer states.

    A sharded parameter counts with the bytes of all its shards.
    """
    total = 0.0
    for param in module.parameters():
        if isinstance(param, UninitializedParameter) or not param.numel():
            continue
        local: Any = local_shard(param)
        if isinstance(local, QuantizedTensor) and local.numel():
            total += param.numel() * local.stored_bytes() / local.numel()
        else:
            total += param.numel() * param.element_size()
    return round(total)


def summarize_true_size(trainer: pl.Trainer, undo: ExitStack) -> None:
    """Make Lightning's ModelSummary print the bytes of the weights at this level, until ``undo`` is closed.

    Lightning (2.6) counts 4 bytes a parameter at a precision that is not its own, and warns that the count is not
    accurate.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            replace_attribute(undo, callback, compat.SUMMARY_METHOD, MethodType(_with_true_size, callback))


def _with_true_size(callback: ModelSummary, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"Precision {trainer.precision} is not supported by the model summary")
        summary = compat.summarize(callback, trainer, module)
    count = summary.total_parameters
    compat.set_bytes_per_parameter(summary, weight_bytes(module) / count if count else 0.0)
    return summary
