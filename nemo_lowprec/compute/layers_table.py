"""The start-up table of a model's layers and matrices, and the warning where hardly any is converted."""

from __future__ import annotations

from collections import Counter

from torch import nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.coverage import Group, as_globs, groups_of, too_little
from nemo_lowprec.lines import WIDTH, name_lines, text_lines

_NAMED = 8  # layers of a group
_INDENT = 26
_ARE = {
    "te": "{low}, by Transformer Engine",
    "norm": "norm with half output",
    "fused": "fused",
    "unfused": "computed layer by layer",
    "left": "half precision",
    "half": "half precision",
    "asked": "half precision",
    "router": "FP32",
    "embedding": "no GEMM",
}


def layers_table(groups: list[Group], low: str, note: str = "") -> str:
    """One row for each group of layers: count, shares of all matrices, computation and reason; then names.

    The shares are those of the elements, and of the products of a token with them.

    Lines have at most 80 characters. Layers are named by globs, which ``convert`` and ``skip`` take.

    Args:
        low: how converted layers compute, for example ``FP8 (delayed, te)``.
        note: more of them.
    """
    lines = [_row("Layers", "Weights", "FLOP", "Are")[0], " " + "─" * (WIDTH - 2)]
    total, products = sum(group.elements for group in groups), sum(group.products for group in groups)
    for group in groups:
        kind, reason, _ = group.fate
        reason = note if kind == "low" else reason
        share = f"{100 * group.elements / total:.1f} %" if group.elements else ""
        flop = f"{100 * group.products / products:.1f} %" if group.products else ""
        what = low if kind == "low" else _ARE[kind].format(low=low.partition(" ")[0])
        lines += _row(f"{len(group.names):,}", share, flop, f"{what}: {reason}" if reason else what)
        others = [name for other in groups if other is not group for name in other.names]
        found = [glob or "the module itself" for glob in as_globs(group.names, others)]
        lines += name_lines(found[:_NAMED], _INDENT + 2)
        if len(found) > _NAMED:
            lines.append(" " * (_INDENT + 2) + f"and {len(found) - _NAMED} more")
    if not any(group.is_low for group in groups):
        lines += _row("0", "", "", f"{low}: no layer can be converted")
    return "\n".join(lines)


def describe_layers(
    model: nn.Module,
    conversion: Conversion,
    level: PrecisionLevel,
    how: str,
    activations: str | None = None,
    note: str = "",
    problem: str | None = None,
) -> tuple[str, str | None]:
    """The table of a converted model, and a warning where too little is converted, else None.

    Args:
        how: scaling and backend of the GEMMs.
        activations: the level's argument.
        note: more of the converted layers.
        problem: the warning, where ``convert="auto"`` has decided.
    """
    groups = groups_of(model, conversion)
    if problem is None and not conversion.left:
        problem = too_little(groups)
    table = layers_table(groups, f"{level.compute.upper()} ({how})", note)
    if activations is not None:
        table = "\n".join([table, *_row(f"{len(conversion.keeping):,}", "", "", _kept(conversion, activations))])
    return table, problem and f"{level.name}: {problem}"


def _kept(conversion: Conversion, activations: str) -> str:
    kinds = Counter(conversion.keeping.values())
    found = ", ".join(f"{count:,} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())
    form = "in FP8" if "fp8" in activations else "as they are"
    behind = ", and the linear layers behind them keep no input" if "recompute" in activations else ""
    return f"keep for backward their inputs alone, {form}{behind}: {found}"


def _row(count: str, share: str, flop: str, text: str) -> list[str]:
    lines = text_lines(text, _INDENT)
    return [f" {count:>6}  {share:>7} {flop:>7}  {lines[0].lstrip()}", *lines[1:]]
