"""Refuses models in which two parameters share memory: storing each anew would untie the parameters."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import is_sharded


def check_memory(model: nn.Module) -> None:
    """Raise ValueError where two parameters of ``model`` overlap in memory (tied by ``a.data = b.data``)."""
    by_storage: dict[int, list[tuple[int, int, bool, str]]] = {}
    for name, param in model.named_parameters():
        has_memory = not isinstance(param, nn.parameter.UninitializedParameter | QuantizedTensor)
        if param.is_meta or not has_memory or is_sharded(param) or not param.numel():
            continue
        start = param.data_ptr()
        span = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
        place = (start, start + span * param.element_size(), param.is_contiguous(), name)
        by_storage.setdefault(param.untyped_storage().data_ptr(), []).append(place)
    for places in by_storage.values():
        places.sort()
        for (start, end, dense, name), (after, _, also_dense, other) in pairwise(places):
            # Two columns of one matrix are interleaved and share no element.
            if start == after or (after < end and dense and also_dense):
                raise ValueError(
                    f"{name} and {other} are two parameters in one memory, and a level with low-precision weights "
                    f"would part them. Make them one parameter: assign the parameter itself, not its .data."
                )
