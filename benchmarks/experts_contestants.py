"""Who takes part in ``benchmarks.experts``: transformers in BF16, torchao, Transformer Engine and this package.

All start from the same BF16 weights. The BF16 model is trained as it is, BF16 states and gradients included, which is
the fastest and the least exact way; so are torchao's and Transformer Engine's, which have BF16 weights here, too. Our
levels keep what their rows declare: FP32 masters, gradients and states at bf16_with_fp8_mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.everyday_contestants import Contestant, Training
from benchmarks.everyday_models import Task
from benchmarks.measure import DEVICE
from nemo_lowprec import prepare

BF16 = "BF16 eager"
OURS = "nemo_lowprec "


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")


def _new(task: Task) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return task.model().train()
    finally:
        torch.set_default_dtype(torch.float32)


def _bf16(task: Task) -> Training:
    model = _new(task)
    return Training(model, _adam(model), nullcontext)


def _ours(level: str, options: dict[str, Any], task: Task) -> Training:
    model = _new(task)
    model, optimizer = prepare(model, _adam(model), level, **options)
    return Training(model, optimizer, partial(torch.autocast, DEVICE.type, torch.bfloat16))


def _are_convertible(module: nn.Module, name: str) -> bool:
    """Linear layers but the head, and modules of experts."""
    return (isinstance(module, nn.Linear) and name != "lm_head") or hasattr(module, "is_transposed")


def _padded_grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """A grouped GEMM of groups that are padded to 16 rows, as torchao's FP8 takes them, by the function it replaces."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    padded = ((sizes + 15) // 16 * 16).cumsum(0, dtype=torch.int32)
    rows = torch.arange(len(x), device=x.device)
    group = torch.searchsorted(offs, rows.to(offs.dtype), right=True)
    shift = (padded - offs).roll(1)
    shift[0] = 0
    places = rows + shift[group]
    wide = x.new_zeros(len(x) + 16 * len(offs), x.shape[1], dtype=weight.dtype)
    out = torch._grouped_mm(wide.index_copy(0, places, x.to(weight.dtype)), weight, offs=padded)
    return out.index_select(0, places)


def _torchao(task: Task) -> Training:
    """torchao's prototype for experts, with rowwise FP8 for linear layers, too."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization.quant_api import quantize_
    from transformers.integrations import moe

    moe._grouped_mm = _padded_grouped_mm
    model = _new(task)
    quantize_(model, config=Float8TrainingOpConfig(), filter_fn=_are_convertible)
    return Training(model, _adam(model), nullcontext)


class _TEExperts(nn.Module):
    """Experts of Transformer Engine's parts: its permutation, and two of its grouped layers."""

    def __init__(self, own: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.experts = own.num_experts
        for name in ("gate_up_proj", "down_proj"):
            experts, outs, ins = (weight := getattr(own, name)).shape
            layer = te.GroupedLinear(experts, ins, outs, bias=False, params_dtype=torch.bfloat16)
            with torch.no_grad():
                for expert in range(experts):
                    getattr(layer, f"weight{expert}").copy_(weight[expert])
            setattr(self, name, layer)

    def forward(self, tokens: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        sizes = torch.bincount(index.flatten(), minlength=self.experts)
        sizes = (sizes.cpu() + 15) // 16 * 16  # Transformer Engine's FP8 takes no other sizes, and asks for them
        padded = int(sizes.sum())
        chosen = torch.zeros(len(tokens), self.experts, dtype=torch.int32, device=tokens.device)
        chosen.scatter_(1, index, 1)
        probs = torch.zeros(len(tokens), self.experts, dtype=torch.float32, device=tokens.device)
        probs = probs.scatter(1, index, scores.float())
        rows, weights, places, offsets, _ = te.moe_permute_and_pad_with_probs(
            tokens, probs, chosen, torch.bincount(index.flatten(), minlength=self.experts), 16
        )
        rows = rows[:padded]
        gate, up = self.gate_up_proj(rows, sizes).chunk(2, -1)
        out = self.down_proj(F.silu(gate) * up * weights[:padded, None].to(gate.dtype), sizes)
        return te.moe_unpermute(out, places, restore_shape=tokens.shape, pad_offsets=offsets)


@contextmanager
def _te_autocast() -> Iterator[None]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    with te.autocast(enabled=True, recipe=DelayedScaling()):
        yield


def _te(task: Task) -> Training:
    import transformer_engine.pytorch as te

    model = _new(task)
    for name, module in list(model.named_modules()):
        if not _are_convertible(module, name):
            continue
        parent, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear):
            own: nn.Module = te.Linear(module.in_features, module.out_features, bias=False, params_dtype=torch.bfloat16)
            own.load_state_dict(module.state_dict(), strict=False)  # without Transformer Engine's extra state
        else:
            own = _TEExperts(module)
        setattr(model.get_submodule(parent), last, own)
    return Training(model, _adam(model), _te_autocast)


CONTESTANTS: dict[str, Contestant] = {
    BF16: Contestant(_bf16),
    f"{OURS}bf16_with_fp8_mixed": Contestant(partial(_ours, "bf16_with_fp8_mixed", {})),
    f"{OURS}bf16_with_fp8_mixed, FP8 head": Contestant(partial(_ours, "bf16_with_fp8_mixed", {"head": "fp8"})),
    f"{OURS}bf16_with_fp8_mixed, FP8 head, fast_accum": Contestant(
        partial(_ours, "bf16_with_fp8_mixed", {"head": "fp8", "fast_accum": True})
    ),
    f"{OURS}msamp_o2": Contestant(partial(_ours, "msamp_o2", {})),
    f"{OURS}msamp_o2, FP8 head": Contestant(partial(_ours, "msamp_o2", {"head": "fp8"})),
    "torchao float8 experts": Contestant(_torchao),
    "te.GroupedLinear, FP8": Contestant(_te),
}
