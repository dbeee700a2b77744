"""Activations of a micro-batch: one forward and backward pass of the converted model on fake tensors.

Where a model is a list of equal blocks, three of them are traced and the others counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.arguments import AtLeast1, check_value
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.compat.tensors import tree_leaves, tree_map
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.engine import Engine
from nemo_lowprec.lines import one_line
from nemo_lowprec.report.loss import forward_of, outputs_of
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.on_gpu import GpuRules
from nemo_lowprec.report.plan.on_meta import copy_on_meta, settle_on_meta
from nemo_lowprec.report.plan.tracing import Activations, Traced, fake, trace
from nemo_lowprec.report.plan.whole import gradient_of
from nemo_lowprec.report.tensor_storage import as_stored

_TRACED = 3  # equal blocks that are traced


@dataclass(frozen=True)
class Sample:
    """One micro-batch.

    Attributes:
        micro_batch_size, seq_length: sequences, and tokens of each, for a language model of this package.
        batch: an example for any other model: what ``training_step`` takes, or the arguments of a plain module.
    """

    micro_batch_size: int | None = None
    seq_length: int | None = None
    batch: Any = None

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "seq_length"):
            check_value(name, getattr(self, name), AtLeast1 | None)
        if (self.micro_batch_size is None) != (self.seq_length is None):
            raise ValueError("micro_batch_size and seq_length go together: give both, or neither.")
        if self.batch is not None and self.seq_length is not None:
            raise ValueError("Give an example batch, or micro_batch_size and seq_length.")

    def __str__(self) -> str:
        if self.seq_length is None:
            return "the example batch"
        return f"{self.micro_batch_size} × {self.seq_length:,} tokens"


def plan_activations(
    model: nn.Module, engine: Engine, layout: Layout, sample: Sample, keeps_weights: bool, both_choices: bool
) -> Activations | str:
    """Trace ``model``, or say why that cannot be done.

    Args:
        model: as it was before conversion; not changed.
        engine: of the level.
        sample: a micro-batch.
        keeps_weights: whether the layers keep their quantized weights from step to step.
        both_choices: whether the other choice of recomputation is traced, too.
    """
    run = run_of(model, sample)
    if isinstance(run, str):
        return run
    chosen = _recomputes(model)
    choices = [chosen] if chosen is None or not both_choices else [chosen, not chosen]
    try:
        return {choice: _trace(model, engine, layout, run, choice, keeps_weights) for choice in choices}
    except Exception as error:  # what a model does in its forward pass is its own
        return f"this model's forward pass cannot be traced without values ({type(error).__name__}: {one_line(error)})"


def _trace(
    model: nn.Module,
    engine: Engine,
    layout: Layout,
    run: Callable[[nn.Module], Tensor],
    recomputes: bool | None,
    keeps_weights: bool,
) -> Traced:
    on_gpu = layout.accelerator == "gpu"
    twin = copy_on_meta(model)
    if recomputes != _recomputes(twin):
        _set_recomputes(twin, bool(recomputes))
    blocks, times = _blocks(twin, shorten=engine.options.layers in (LayerFilter(), LayerFilter(None), LayerFilter("*")))
    settled = settle_on_meta(twin, engine, False, on_gpu)
    settled.amaxes.weights.keeps = keeps_weights  # as of the whole model, and not of its traced blocks
    if layout.is_sharded and layout.reshard_after_forward:
        for module in twin.modules():
            for plan in gemm_plans(module).values():
                plan.keeps_weight = False
    comes = layout.micro_batches == 1 and not engine.options.low_bit.gradient_release

    def gradient(param: nn.Parameter) -> int:
        if layout.is_sharded and not settled.level.is_low_bit:
            return 4 * param.numel() // layout.shards
        return as_stored(gradient_of(param, settled)).bytes // layout.shards

    rules = GpuRules() if on_gpu else nullcontext()
    return trace(twin, run, engine.half, gradient if comes else None, blocks, times, rules)


def run_of(model: nn.Module, sample: Sample) -> Callable[[nn.Module], Tensor] | str:
    """The forward pass of a micro-batch to its loss, or why there is none."""
    if sample.seq_length is not None:
        if not hasattr(model, "_loss_sum"):
            return (
                f"{type(model).__name__} is no language model of this package: give plan_training an example batch "
                "in the place of micro_batch_size and seq_length"
            )
        shape = sample.micro_batch_size or 1, sample.seq_length
        positions = getattr(getattr(getattr(model, "model", None), "config", None), "max_position_embeddings", None)
        if positions is not None and sample.seq_length > positions:
            raise ValueError(
                f"Samples of {sample.seq_length} tokens are longer than the model's {positions} positions."
            )

        def of_tokens(module: Any) -> Tensor:
            tokens = torch.zeros(shape, dtype=torch.int64)
            return outputs_of(module, {"input_ids": tokens, "labels": tokens.clone()})  # type: ignore[no-any-return]

        return of_tokens
    example = sample.batch
    call: Callable[[Any, Any], Any] = outputs_of
    if example is None:
        example, call = getattr(model, "example_input_array", None), forward_of
    if example is None:
        return (
            "give plan_training micro_batch_size and seq_length (a language model of this package) or an example "
            "batch, or the module an example_input_array"
        )

    def of_example(module: Any) -> Tensor:
        batch = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, example)
        out = call(module, batch)
        out = out["loss"] if isinstance(out, dict) and hasattr(module, "training_step") else out
        leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        return torch.stack([leaf.float().sum() for leaf in leaves]).sum()

    return of_example


def _recomputes(model: nn.Module) -> bool | None:
    inner = getattr(model, "model", None)
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return None
    return any(getattr(module, "gradient_checkpointing", False) is True for module in inner.modules())  # type: ignore[union-attr]


def _set_recomputes(model: nn.Module, recomputes: bool) -> None:
    # transformers has renamed its switch, and warns of the old name.
    which = "enable" if recomputes else "disable"
    new = getattr(model.model, f"activation_checkpointing_{which}", None)
    switch: Any = new or getattr(model.model, f"gradient_checkpointing_{which}")
    switch(*[{"use_reentrant": False}] * recomputes)


# Equal blocks


def _blocks(model: nn.Module, shorten: bool) -> tuple[list[nn.Module], int]:
    """The longest list of equal blocks, of which ``shorten`` leaves three; and how many the last one stands for."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    equal = [m for m in lists if len({_signature(block) for block in m}) == 1]
    if not equal:
        return [], 1
    longest: Any = max(equal, key=lambda m: sum(p.numel() for p in m.parameters()))
    times = max(len(longest) - _TRACED + 1, 1) if shorten else 1
    del longest[len(longest) - times + 1 :]
    return list(longest), times


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """What a block takes for a forward pass follows from this: classes, settings, and shapes of parameters."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | tuple) and k != "layer_idx"}
        found.append((name, type(module), repr(sorted(plain.items()))))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    found += [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    return tuple(found)
