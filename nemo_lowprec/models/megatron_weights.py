"""Converts a GPTModel's weights to and from transformers, and cuts tensor-parallel and pipeline parts.

Names and layouts are those of a GPTModel with Transformer Engine's layers, in Megatron-core 0.16 to 0.19. A state is a
dict of parameters by name, without Transformer Engine's ``_extra_state``. No function here uses a process group.

Megatron-core fuses by rows the projections that read the same input. ``linear_qkv`` has, for each query group, the rows
of the queries, then of the key, then of the value. ``linear_fc1`` has the rows of the gate, then of the up projection.
A norm is a parameter of the projection that reads the output of the norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.lines import abbreviate
from nemo_lowprec.models.megatron_llama import GptArchitecture

EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_HF_EMBEDDING, _HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")

# How tensor parallelism splits a parameter, by the end of its name: the dimension (0: a weight's output; None: no
# split), and the number of equal parts that are split one by one. Queries, key and value of a group are adjacent rows,
# so ranks that divide the groups get whole groups. With more ranks than groups, Megatron-core splits the rows of a
# group evenly and gathers the output.
_SPLITS: dict[tuple[str, ...], tuple[int | None, int]] = {
    ("layer_norm_weight", "layernorm.weight"): (None, 1),
    ("linear_proj.weight", "linear_fc2.weight"): (1, 1),
    ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight"): (0, 1),
    ("linear_fc1.weight",): (0, 2),
}


@dataclass(frozen=True)
class _Fused:
    """One fused parameter: the rows of each source, in order, group by group."""

    sources: Mapping[str, tuple[int, ...]]  # shapes of transformers' parameters by name
    groups: int = 1  # number of equal parts of every source's rows

    @property
    def shape(self) -> tuple[int, ...]:
        first, *_ = self.sources.values()
        return (sum(shape[0] for shape in self.sources.values()), *first[1:])

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        parts = [state[name].unflatten(0, (self.groups, -1)) for name in self.sources]
        return torch.cat(parts, dim=1).flatten(0, 1) if len(parts) > 1 else state[next(iter(self.sources))]

    def split(self, fused: Tensor) -> dict[str, Tensor]:
        if len(self.sources) == 1:
            return dict.fromkeys(self.sources, fused)
        rows = [shape[0] // self.groups for shape in self.sources.values()]
        parts = fused.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        # Clones, as safetensors takes no tensors that share memory.
        return {name: part.flatten(0, 1).clone() for name, part in zip(self.sources, parts, strict=True)}


def _layout(architecture: GptArchitecture, vocab_size: int) -> dict[str, _Fused]:
    """Every parameter of the whole model by Megatron-core's name, for ``vocab_size`` rows of the embedding."""
    config, tied = architecture.transformer, architecture.gpt["share_embeddings_and_output_weights"]
    hidden, ffn, head = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    groups, queries = config["num_query_groups"], config["num_attention_heads"] * head
    qkv = {"q_proj": queries, "k_proj": groups * head, "v_proj": groups * head}
    layout = {EMBEDDING: _Fused({_HF_EMBEDDING: (vocab_size, hidden)})}
    for i in range(config["num_layers"]):
        block, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        to_attention, to_mlp = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.mlp"
        weights = {f"{attention}.{name}.weight": (rows, hidden) for name, rows in qkv.items()}
        gate_and_up = {f"{mlp}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        layout |= {
            f"{to_attention}.linear_proj.weight": _Fused({f"{attention}.o_proj.weight": (hidden, queries)}),
            f"{to_attention}.linear_qkv.layer_norm_weight": _Fused({f"{block}.input_layernorm.weight": (hidden,)}),
            f"{to_attention}.linear_qkv.weight": _Fused(weights, groups),
            f"{to_mlp}.linear_fc1.layer_norm_weight": _Fused({f"{block}.post_attention_layernorm.weight": (hidden,)}),
            f"{to_mlp}.linear_fc1.weight": _Fused(gate_and_up),
            f"{to_mlp}.linear_fc2.weight": _Fused({f"{mlp}.down_proj.weight": (hidden, ffn)}),
        }
        if config["add_qkv_bias"]:
            biases = {f"{attention}.{name}.bias": (rows,) for name, rows in qkv.items()}
            layout[f"{to_attention}.linear_qkv.bias"] = _Fused(biases, groups)
        for letter in "qk" if config["qk_layernorm"] else "":
            norm = _Fused({f"{attention}.{letter}_norm.weight": (head,)})
            layout[f"{to_attention}.{letter}_layernorm.weight"] = norm
    layout["decoder.final_layernorm.weight"] = _Fused({"model.norm.weight": (hidden,)})
    if not tied:
        layout[_HEAD] = _Fused({_HF_HEAD: (vocab_size, hidden)})
    return layout


def from_transformers(state: Mapping[str, Tensor], architecture: GptArchitecture) -> dict[str, Tensor]:
    """The whole GPTModel's parameters.

    A parameter that only changes its name is the given tensor, not a copy.

    Args:
        state: the ``state_dict()`` of transformers' causal language model. The head of a tied model may be missing.
        architecture: of the GPTModel. Where its ``vocab_size`` is larger than the state's, rows of zeros are added.

    Raises:
        ValueError: a parameter is missing, unexpected or of a wrong shape; a head that should be tied is another.
    """
    rows = architecture.gpt["vocab_size"]
    given = state[_HF_EMBEDDING].shape[0] if _HF_EMBEDDING in state else rows
    if given > rows:
        raise ValueError(f"{_HF_EMBEDDING} has {given} rows, more than the vocabulary of {rows}.")
    layout = _layout(architecture, given)
    # Older checkpoints hold RoPE's frequencies, which follow from the architecture.
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    state = _without_tied_head(state, _HF_HEAD, _HF_EMBEDDING, _HEAD not in layout)
    _check(state, {name: shape for fused in layout.values() for name, shape in fused.sources.items()})
    full = {name: fused.join(state) for name, fused in layout.items()}
    for name in (EMBEDDING, _HEAD):
        if name in full and given < rows:
            full[name] = F.pad(full[name], (0, 0, 0, rows - given))
    return full


def to_transformers(state: Mapping[str, Tensor], architecture: GptArchitecture) -> dict[str, Tensor]:
    """The ``state_dict()`` of transformers' causal language model: the inverse of ``from_transformers``.

    Tied embedding and head are one tensor under both names, as in transformers' own. Otherwise no two share memory.

    Args:
        state: the whole GPTModel's parameters. A tied model may have a head, as its last pipeline stage does.
        architecture: of the GPTModel.

    Raises:
        ValueError: as for ``from_transformers``.
    """
    layout = _layout(architecture, architecture.gpt["vocab_size"])
    state = _without_tied_head(state, _HEAD, EMBEDDING, _HEAD not in layout)
    _check(state, {name: fused.shape for name, fused in layout.items()})
    out = {source: part for name, fused in layout.items() for source, part in fused.split(state[name]).items()}
    out.setdefault(_HF_HEAD, out[_HF_EMBEDDING])
    return out


def _without_tied_head(state: Mapping[str, Tensor], head: str, embedding: str, tied: bool) -> Mapping[str, Tensor]:
    if not tied or head not in state:
        return state
    if embedding in state and not torch.equal(state[head], state[embedding]):
        raise ValueError(f"{head} is not equal to {embedding}, and the architecture ties them.")
    return {name: tensor for name, tensor in state.items() if name != head}


def _check(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, unexpected = shapes.keys() - state.keys(), state.keys() - shapes.keys()
    if missing or unexpected:
        said = [f"lacks {abbreviate(sorted(missing))}"] if missing else []
        said += [f"has {abbreviate(sorted(unexpected))}, which the architecture does not"] if unexpected else []
        raise ValueError(f"The state {' and '.join(said)}.")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)}, and {shape} in the architecture.")


# Tensor parallelism


def part_of(name: str, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """The part of the parameter ``full`` on rank ``tp_rank`` of ``tp_size``; contiguous.

    The part may share memory with ``full``. Every rank has whole norms.

    Raises:
        ValueError: an unknown name, or a parameter that does not split into ``tp_size`` parts.
    """
    found = [split for ends, split in _SPLITS.items() if name.endswith(ends)]
    if not found:
        raise ValueError(f"{name} is no parameter of a Llama-family GPTModel.")
    dim, halves = found[0]
    if dim is None:
        return full
    if full.shape[dim] % (halves * tp_size):
        raise ValueError(f"{name} of shape {tuple(full.shape)} does not split over {tp_size} tensor-parallel ranks.")
    parts = [half.chunk(tp_size, dim)[tp_rank] for half in full.chunk(halves, dim)]
    return (torch.cat(parts, dim) if halves > 1 else parts[0]).contiguous()


# Pipeline stages: every stage numbers its layers from 0


def of_stage(full: Mapping[str, Tensor], names: Iterable[str], first_layer: int) -> dict[str, Tensor]:
    """The parameters of one pipeline stage, under the names that the stage has for them.

    Args:
        full: the whole model's parameters.
        names: the parameter names of the stage. A head that ``full`` lacks is tied to the embedding.
        first_layer: number of layers before the stage.

    Raises:
        ValueError: ``full`` lacks a parameter.
    """
    found = {}
    for name in names:
        source = _LAYER.sub(lambda number: str(int(number[0]) + first_layer), name)
        if source == _HEAD and _HEAD not in full:
            source = EMBEDDING
        if source not in full:
            raise ValueError(f"The state lacks {source}.")
        found[name] = full[source]
    return found
