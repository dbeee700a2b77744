"""An ``nn.Embedding`` whose table may be in low-bit storage, or have an FP32 gradient, also in a compiled graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.class_swap import own_forward, swap
from nemo_lowprec.compute.compiled import has_own_weight, read_parameter
from nemo_lowprec.compute.graph_entry import GraphEntry


class LowPrecisionEmbedding(nn.Embedding):
    """``nn.Embedding`` for any table. Conversion makes it of an ``nn.Embedding``.

    Attributes:
        entry: says what a compiled graph reads.
    """

    entry: GraphEntry

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or self.max_norm is not None or not self.entry.prepare():
            return super().forward(input)
        if not has_own_weight(self, "weight", self.entry):
            return super().forward(input)
        table = read_parameter(self, "weight", self.entry.weight)
        assert table is not None
        return F.embedding(
            input, table, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


def convert_embeddings(model: nn.Module) -> None:
    """Let the embeddings of ``model`` take part in compiled graphs, whatever their tables are stored in."""
    for module in model.modules():
        if type(module) is nn.Embedding and not own_forward(module):
            swap(module, LowPrecisionEmbedding, entry=GraphEntry(None, module))
