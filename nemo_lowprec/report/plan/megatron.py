"""The plan of a process on Megatron-core: ``lowprec_megatron`` with a Llama-family model that it builds.

Of pipeline stages the one with the largest share is planned: the first has the embedding and the most micro-batches
under way, the last has the head and the loss. The distributed optimizer's masters and states, and the gradients that
it steps on, are cut over the data-parallel processes, context-parallel ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.comm.planned import Message
from nemo_lowprec.formats.block_scale_128 import BLOCK
from nemo_lowprec.megatron import MegatronSettings, ParallelLayout
from nemo_lowprec.megatron.settings import DTYPES
from nemo_lowprec.report.parts import CONVERTED, VECTORS
from nemo_lowprec.report.plan.activations import Sample
from nemo_lowprec.report.plan.columns import PlannedColumn, PlannedProcess, columns_of_chart
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.megatron_layers import Layers
from nemo_lowprec.report.plan.tracing import Activations, Traced
from nemo_lowprec.report.tensor_storage import as_stored, format_of
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.marks import mark_part_of_matrix

_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PLAIN = {*_RECOMPUTED, "recompute_modules", "attention_backend", "hidden_dropout", "attention_dropout"}


def plan_megatron(
    model: Any, settings: MegatronSettings, layout: Layout, sample: Sample
) -> tuple[list[PlannedProcess], int]:
    """A process of each pipeline stage, and the parameters of the whole model.

    Raises:
        ValueError: a model, or a field of its TransformerConfig, that is not planned; sizes that do not divide.
    """
    if not callable(getattr(model, "transformers_config", None)):
        raise ValueError(
            f"No plan for {type(model).__name__} on Megatron-core: only MegatronGPT has one. Plan a MegatronGPT of its "
            "size, or the same architecture as a CausalLM with strategy='lowprec_sharded'."
        )
    from nemo_lowprec.models.megatron_gpt import check_sizes
    from nemo_lowprec.models.megatron_llama import gpt_architecture

    architecture = gpt_architecture(model.transformers_config())
    own = dict(model.hparams["transformer"])
    if model.hparams["activation_checkpointing"]:
        own = _RECOMPUTED | own
    _check_fields(own)
    sizes = layout.sizes
    if sample.batch is not None:
        raise ValueError("A plan of MegatronGPT takes micro_batch_size and seq_length, and no example batch.")
    check_sizes(architecture, {**own, **layout.sizes.fields()}, sample.seq_length)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if architecture.transformer[name] % sizes.tensor:
            raise ValueError(
                f"{name}={architecture.transformer[name]} does not divide among tensor_model_parallel_size="
                f"{sizes.tensor} processes, which has no plan. Use a size that divides it."
            )
    if architecture.gpt["vocab_size"] % sizes.tensor:
        raise ValueError(
            f"A vocabulary of {architecture.gpt['vocab_size']} does not split over {sizes.tensor} tensor-parallel "
            "ranks: pad it."
        )
    rows = (sample.micro_batch_size or 0) * (sample.seq_length or 0) // sizes.context
    tied = architecture.gpt["share_embeddings_and_output_weights"]
    layers = Layers(architecture.transformer, architecture.gpt["vocab_size"], tied, settings, sizes, rows)
    count = replace(layers, sizes=ParallelLayout()).of_stage(0).total()
    stages = sorted({0, 1, sizes.pipeline - 1} & set(range(sizes.pipeline)))
    return [_stage(layers, layout, own, stage) for stage in stages], count


def _check_fields(own: Mapping[str, Any]) -> None:
    for name in own:
        if name not in _PLAIN:
            raise ValueError(
                f"transformer={{{name!r}: ...}} is not planned on Megatron-core. Leave it out of the plan; of "
                f"TransformerConfig it knows {', '.join(sorted(_PLAIN))}."
            )
    modules = own.get("recompute_modules") or ["core_attn"]
    if own.get("recompute_granularity") == "selective" and list(modules) != ["core_attn"]:
        raise ValueError(
            f"recompute_modules={list(modules)} is not planned on Megatron-core. Use recompute_granularity='full', or "
            "leave it out: the plan is a bound then."
        )


def _stage(layers: Layers, layout: Layout, own: Mapping[str, Any], stage: int) -> PlannedProcess:
    settings, cut = layers.settings, layout.replicas
    counts = layers.of_stage(stage)
    weights, masters, gradients, states = columns_of_chart()
    copies, buffers = PlannedColumn("Weights for GEMMs", "kept"), PlannedColumn("Communication buffers", "at most")
    sent: list[Message] = []
    in_buckets = 0
    for part, count in counts.items():
        is_matrix = part != VECTORS
        dtype = settings.matrices if is_matrix else settings.vectors
        if settings.fp8_weights and part == CONVERTED:
            dtype = torch.float8_e4m3fn
        weights.add_bytes(part, dtype, count * dtype.itemsize)
        gradient = _gradient(count, dtype, settings, is_matrix)
        gradients.add(part, gradient)
        shard = torch.empty(-(-count // cut // BLOCK) * BLOCK, device="meta", dtype=torch.float32)
        if is_matrix:
            mark_part_of_matrix(shard)
        masters.add(part, _master(shard, dtype, settings))
        states.add_states(part, shard, shard, settings.options)
        if cut > 1:
            fp8, size = isinstance(gradient, GradientTensor), as_stored(gradient).bytes
            in_buckets += size if fp8 else 0
            kind = torch.float8_e4m3fn if fp8 else gradient.dtype
            sent.append(Message("all_to_all" if fp8 else "reduce_scatter", kind, size, cut))
            sent.append(Message("all_gather", dtype, shard.numel() * dtype.itemsize, cut))
    half = torch.float8_e4m3fn if layers.low else DTYPES[settings.level.autocast]
    copies.add_bytes(CONVERTED, half, round(layers.weight_copies(counts[CONVERTED])))
    matrices = counts.total() - counts[VECTORS]
    buffers.add_bytes("all", torch.float8_e4m3fn, _under_way(in_buckets, matrices, layout))
    columns = [weights, copies, masters, gradients, states, buffers]
    messages = {**({"DP": sent} if sent else {}), **layers.messages(stage, layout.micro_batches, own)}
    stages = layout.sizes.pipeline
    return PlannedProcess(
        columns,
        messages,
        beside=(0, 0, buffers.bytes),
        stage=f"stage {stage + 1} of {stages}" if stages > 1 else "",
        activations=_activations(layers, layout, own, stage),
    )


def _gradient(count: int, dtype: torch.dtype, settings: MegatronSettings, is_matrix: bool) -> Tensor:
    """``count`` elements of Megatron's gradient buffer, or of this package's FP8 gradient buffer."""
    if settings.fp8_gradients and is_matrix:
        blocks = -(-count // BLOCK)
        return GradientTensor.empty(torch.empty(blocks, BLOCK, device="meta", dtype=torch.float32))
    in_fp32 = settings.ddp["grad_reduce_in_fp32"] or dtype == torch.float8_e4m3fn
    return torch.empty(count, dtype=torch.float32 if in_fp32 else dtype, device="meta")


def _master(shard: Tensor, dtype: torch.dtype, settings: MegatronSettings) -> Tensor | None:
    """The shard of the master weight; None where the weight takes its updates itself."""
    if dtype == torch.float32:
        return None
    if settings.level.is_low_bit:
        return shard.to(torch.float16) if dtype == torch.float8_e4m3fn else None
    return shard


def _under_way(gradients: int, parameters: int, layout: Layout) -> int:
    """Bytes of the messages of the FP8 buckets that are exchanged: sent, received, and their mean."""
    if not gradients:
        return 0
    size = layout.bucket_size or max(40_000_000, 1_000_000 * layout.replicas)
    share = min(1.0, size / parameters) if layout.overlap_grad_reduce else 1.0
    return round(gradients * share * (2 + 1 / layout.replicas))


def _activations(layers: Layers, layout: Layout, own: Mapping[str, Any], stage: int) -> Activations | str:
    if not layers.rows:
        return "give plan_training micro_batch_size and seq_length"
    recomputes = own.get("recompute_granularity") == "full"
    other = {} if recomputes else _RECOMPUTED
    return {
        recomputes: _traced(layers, layout, own, stage),
        not recomputes: _traced(layers, layout, other, stage),
    }


def _traced(layers: Layers, layout: Layout, recompute: Mapping[str, Any], stage: int) -> Traced:
    parts = layout.sizes.virtual_pipeline or 1
    of_one, again = layers.kept(recompute, layers.layers // parts)
    kept = of_one * _in_flight(layout, stage)
    is_last = stage == layout.sizes.pipeline - 1
    loss = layers.loss() if is_last else 0
    at_loss = kept + loss + (layers.beside_loss() if is_last else 0)
    in_layer = kept + again + layers.beside_layer()
    names = {format_of(layers.stream), *(["fp8"] if layers.low else []), *(["fp32"] if is_last else [])}
    names.add(layers.settings.level.autocast)
    return Traced(round(kept + loss), (round(in_layer), round(at_loss), round(in_layer)), names)


def _in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches, or parts of them, whose activations a stage holds: of the 1F1B schedule, plain or interleaved."""
    stages, parts = layout.sizes.pipeline, layout.sizes.virtual_pipeline
    if parts is None:
        return min(layout.micro_batches, stages - stage)
    warm_up = 2 * (stages - stage - 1) + (parts - 1) * stages
    return min(layout.micro_batches * parts, warm_up + 1)
