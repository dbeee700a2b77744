"""Next-token cross entropy in FP32, without the FP32 logits of a whole batch in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.compute.logits import Logits

IGNORE = -100  # label of a token that the loss ignores


def _slice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def summed_cross_entropy(logits: Tensor, labels: Tensor, tokens_at_once: int = 4096) -> Tensor:
    """Sum over tokens of the cross entropy, in nats: an FP32 scalar.

    At a vocabulary of 128k, FP32 logits, their softmax and the gradient of the softmax take 1.5 GB for 1,000 tokens.
    With more tokens than ``tokens_at_once``, each slice is cast to FP32 by itself, and again in backward. Only the
    half-precision logits and their gradient stay in memory for the whole batch. The head of an FP8 level returns
    ``Logits``, of which the loss makes no FP32 copy at all.

    Args:
        logits: [batch, sequence, vocabulary], any floating dtype.
        labels: int64 [batch, sequence], already shifted: the id that ``logits`` predict at the same position; -100 is
            ignored.
        tokens_at_once: tokens of a slice.
    """
    logits, labels = logits.flatten(0, -2), labels.flatten()
    if isinstance(logits, Logits) or labels.numel() <= tokens_at_once:
        return _slice_loss(logits, labels)
    # The backward of split is one cat; slicing by hand would add a zero-filled gradient of full size for every slice.
    parts = zip(logits.split(tokens_at_once), labels.split(tokens_at_once), strict=True)
    if not torch.is_grad_enabled():
        return torch.stack([_slice_loss(*part) for part in parts]).sum()
    return torch.stack([checkpoint(_slice_loss, *part, use_reentrant=False) for part in parts]).sum()
