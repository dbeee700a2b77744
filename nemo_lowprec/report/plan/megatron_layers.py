"""What a Llama-family GPTModel keeps of a micro-batch in Transformer Engine's layers, and what it sends: by formula.

No machine without a GPU can run these layers, so that their sizes are written down. Sources: Transformer Engine 2.20
(LayerNormLinear, Linear, DotProductAttention with FlashAttention, AttnFuncWithCPAndKVP2P) and megatron-core 0.19
(TransformerLayer, bias_swiglu, vocab_parallel_cross_entropy), held to the peaks in ``benchmarks/results``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_lowprec.comm.planned import Message
from nemo_lowprec.engine import DTYPES
from nemo_lowprec.megatron import MegatronSettings, ParallelLayout
from nemo_lowprec.report.parts import CONVERTED, REST, VECTORS

_FP32, _HALF = 4, 2  # bytes of an element; results of GEMMs are in half precision


@dataclass(frozen=True)
class Layers:
    """The layers of one model at one level, on processes of these sizes.

    Attributes:
        model: fields of TransformerConfig that the architecture decides.
        vocab: rows of the embedding.
        tied: whether the head's weight is the embedding's.
        settings: of the level.
        sizes: parallel sizes.
        rows: sequences of a micro-batch times the tokens of each that one process has.
    """

    model: Mapping[str, Any]
    vocab: int
    tied: bool
    settings: MegatronSettings
    sizes: ParallelLayout
    rows: int

    # Parameters

    def of_stage(self, stage: int) -> Counter[str]:
        """Parameters of a process of one pipeline stage, by their part of ``report.parts``."""
        m, h, ffn = self.model, self.model["hidden_size"], self.model["ffn_hidden_size"] // self.sizes.tensor
        qkv = self._queries + 2 * self._keys
        biases = (qkv if m["add_qkv_bias"] else 0) + (2 * m["kv_channels"] if m["qk_layernorm"] else 0)
        last = self.sizes.pipeline - 1
        tables = (stage == 0) + (stage == last and (not self.tied or last > 0))
        count = Counter({VECTORS: self.layers * (2 * h + biases) + (h if stage == last else 0)})
        count[CONVERTED] = self.layers * (qkv + self._queries + 3 * ffn) * h
        count[REST] = tables * (self.vocab // self.sizes.tensor) * h
        return +count  # without the tables where the stage has none

    @property
    def layers(self) -> int:
        """Layers of each stage."""
        return int(self.model["num_layers"]) // self.sizes.pipeline

    @property
    def _queries(self) -> int:
        return int(self.model["num_attention_heads"] * self.model["kv_channels"]) // self.sizes.tensor

    @property
    def _keys(self) -> int:
        return int(self.model["num_query_groups"] * self.model["kv_channels"]) // self.sizes.tensor

    # Formats

    @property
    def stream(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.settings.model["pipeline_dtype"]  # type: ignore[no-any-return]

    @property
    def operand(self) -> float:
        """Bytes of an element of a GEMM's input, kept for the weight gradient."""
        model = self.settings.model
        if model["fp4"]:
            return 0.5 + 1 / 16  # E2M1, and an E4M3 scale of 16
        if not model["fp8"]:
            return _HALF
        return {"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}.get(model["fp8_recipe"], 1)

    @property
    def low(self) -> bool:
        """Whether GEMMs run below 16 bits."""
        return bool(self.settings.model["fp8"] or self.settings.model["fp4"])

    def weight_copies(self, converted: int) -> float:
        """Bytes of the copies of the layers' weights, ``converted`` elements of them, that GEMMs take.

        Rows and columns; of a weight that is stored in FP8 the columns only.
        """
        if self.settings.fp8_weights:
            return converted * self.operand
        if self.low:
            return converted * 2 * self.operand
        return converted * (0 if self.settings.level.has_half_weights else _HALF)

    # Activations

    @property
    def _shared(self) -> int:
        """Rows of the residual stream on one process: cut by sequence parallelism, else all."""
        return self.rows // (self.sizes.tensor if self.sizes.sequence_parallel else 1)

    def layer_input(self) -> int:
        """Bytes of the input of a layer."""
        return int(self._shared * self.model["hidden_size"] * self.stream.itemsize)

    def layer(self) -> float:
        """Bytes that one layer keeps."""
        m, half, operand = self.model, _HALF, self.operand
        h, ffn, q, k = m["hidden_size"], m["ffn_hidden_size"] // self.sizes.tensor, self._queries, self._keys
        norms = 2 * (self.layer_input() + self._shared * h * operand)
        # Query, key, value, output; the logarithms of the sums; the projection's operand, where that is another format.
        attention = self.rows * (2 * q + 2 * k) * half + self.rows * q // m["kv_channels"] * _FP32
        attention += self.rows * q * operand if self.low else 0
        if m["qk_layernorm"]:
            attention += self.rows * (q + k) * half
        mlp = self.rows * (2 * ffn * half + ffn * operand)
        return norms + attention + mlp

    def loss(self) -> int:
        """Bytes that the head and the loss keep: both sides of the last norm, and the probabilities in FP32."""
        return 2 * self.layer_input() + self.rows * (self.vocab // self.sizes.tensor) * _FP32

    def beside_loss(self) -> int:
        """Bytes alive at the loss beside ``loss``: the logits, and one copy of the logits in half precision."""
        return 2 * self.rows * (self.vocab // self.sizes.tensor) * _HALF

    def beside_layer(self) -> int:
        """Bytes alive beside kept activations in a layer's backward: gradients of its MLP and of its input."""
        ffn = self.model["ffn_hidden_size"] // self.sizes.tensor
        ring = 0
        if self.sizes.context > 1:  # keys and values on their way, and an output of each step
            ring = self.rows * (4 * self._keys + self.sizes.context * self._queries) * _HALF
        return self.rows * 3 * ffn * _HALF + 2 * self.layer_input() + ring

    def kept(self, recompute: Mapping[str, Any], layers: int) -> tuple[float, float]:
        """Bytes of activations that ``layers`` layers keep, and the most that recomputation makes again at a time.

        Args:
            recompute: ``recompute_granularity``, ``recompute_method`` and ``recompute_num_layers``.
        """
        if recompute.get("recompute_granularity") != "full":
            return layers * self.layer(), 0
        count = min(recompute.get("recompute_num_layers") or 1, layers)
        if recompute.get("recompute_method") == "block":
            return count * self.layer_input() + (layers - count) * self.layer(), self.layer()
        return -(-layers // count) * self.layer_input(), count * self.layer()

    # What is sent

    def messages(self, stage: int, micro_batches: int, recompute: Mapping[str, Any]) -> dict[str, list[Message]]:
        """The collectives of one step's micro-batches, by their groups: of tensor, context and pipeline parallelism."""
        sizes, half = self.sizes, DTYPES[self.settings.level.autocast]
        again = recompute.get("recompute_granularity") == "full"
        passes = self.layers * micro_batches
        whole = self.rows * self.model["hidden_size"]
        found: dict[str, list[Message]] = {"TP": [], "CP": [], "PP": []}
        first, last = stage == 0, stage == sizes.pipeline - 1
        if sizes.tensor > 1:
            ends = (first + last) * micro_batches
            reduced = whole * half.itemsize * (passes * (4 + 2 * again) + ends)
            if sizes.sequence_parallel:
                # Forward: the inputs of two GEMMs, and the outputs of two. Backward: their gradients, the inputs again.
                part = torch.float8_e4m3fn if self.low else half
                gathers = [(part, passes * (6 + 2 * again)), (half, ends + last * micro_batches)]
                for dtype, count in gathers:
                    size = whole // sizes.tensor * dtype.itemsize
                    found["TP"] += [Message("all_gather", dtype, size * count, sizes.tensor)]
                found["TP"] += [Message("reduce_scatter", half, reduced, sizes.tensor)]
            else:
                found["TP"] += [Message("all_reduce", half, reduced, sizes.tensor)]
        if sizes.context > 1:
            # Keys and values go round in forward and again in backward, there with their gradients.
            turns = (3 + again) * (sizes.context - 1) + 1
            size = self.rows * 2 * self._keys * half.itemsize * passes * turns
            found["CP"] = [Message("send", half, size, sizes.context)]
        if sizes.pipeline > 1:
            parts = sizes.virtual_pipeline or 1
            ways = 2 * parts - (first + last)  # to the next stage and back, but from the last part and from the first
            found["PP"] = [Message("send", self.stream, self.layer_input() * ways * micro_batches, 2)]
        return {group: messages for group, messages in found.items() if messages}
