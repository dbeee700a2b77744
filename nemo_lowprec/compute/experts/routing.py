"""The order of tokens by expert: rows of one expert lie next to each other, so that one GEMM can compute them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import is_fake


class Routing(NamedTuple):
    """Which token each row of the grouped GEMMs is. A pair is a token and one of the experts that it was sent to.

    Attributes:
        order: int64 [rows]: the pair of each row; pair ``token * top_k + choice``.
        ends: int32 [experts]: the row behind the last row of each expert. Rows behind the last of all experts belong to
            pairs with an expert that does not exist: they are computed by nobody, and add nothing.
        rows: number of pairs.
        top_k: experts of a token.
    """

    order: Tensor
    ends: Tensor
    rows: int
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [rows]."""
        return self.order // self.top_k

    def sizes(self) -> list[int]:
        """The number of rows of each expert, where the host waits for the device; without values, even parts."""
        if is_fake(self.ends):
            even, more = divmod(self.rows, len(self.ends))
            return [even + (expert < more) for expert in range(len(self.ends))]
        ends = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    @property
    def experts(self) -> Tensor:
        """The expert of each row, int64 [rows]; the number of experts behind the last row of all."""
        place = torch.arange(self.rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, place, right=True)

    def in_rows(self, of_pairs: Tensor) -> Tensor:
        """Values of pairs [tokens, top_k], in the order of the rows [rows]."""
        return of_pairs.reshape(-1)[self.order]

    def in_pairs(self, of_rows: Tensor) -> Tensor:
        """Values of rows [rows, ...] in the order of the pairs [tokens, top_k, ...]."""
        pairs = torch.empty_like(of_rows)
        pairs[self.order] = of_rows
        return pairs.view(-1, self.top_k, *of_rows.shape[1:])


def route(index: Tensor, experts: int) -> Routing:
    """The routing of tokens to experts.

    Args:
        index: int [tokens, top_k]: the experts of each token. One of ``experts`` and more stands for none.
    """
    flat = index.reshape(-1)
    expert, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=flat.device, dtype=flat.dtype), right=True)
    return Routing(order, ends.to(torch.int32), flat.numel(), index.shape[-1])
