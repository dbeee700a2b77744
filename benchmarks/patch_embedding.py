"""Patch embeddings: a convolution by cuDNN under BF16 autocast beside the same layer by FP8 GEMMs.

    python -m benchmarks.patch_embedding

A layer's forward and backward pass with the gradient of its weight, and of its input where it merges patches inside of
a model. ``copied`` is the BF16 GEMM on patches that are copied out of the image first. ``gpu_ms`` is the time of the
kernels; ``ms`` has the gaps between the kernels, too: a layer alone does not keep the GPU busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.backends import milliseconds
from benchmarks.measure import kernels_of
from benchmarks.record import Record, arguments
from nemo_lowprec import prepare
from nemo_lowprec.compute.patches import copy_patches

_PROFILED = 20  # calls under the profiler
LEVELS = ("bf16_with_fp8_mixed", "bf16_with_fp8_rowwise_mixed")


class Shape(NamedTuple):
    """A layer and its input. ``inside``: whether the input has a gradient."""

    name: str
    channels: int
    outs: int
    patch: int
    image: int
    batch: int
    inside: bool = False


SHAPES = (
    Shape("ViT-L/16, 224 pixels", 3, 1024, 16, 224, 128),
    Shape("ViT-H/16, 512 pixels", 3, 1280, 16, 512, 32),
    Shape("Swin-L, patches of 4", 3, 192, 4, 224, 128),
    Shape("DiT-XL/2, latents", 4, 1152, 2, 32, 256),
    Shape("ConvNeXt-L, first merging", 192, 384, 2, 56, 128, True),
    Shape("ConvNeXt-L, last merging", 768, 1536, 2, 14, 128, True),
)


def _passes(layer: nn.Module, shape: Shape) -> Callable[[], Tensor]:
    x = torch.randn(shape.batch, shape.channels, shape.image, shape.image, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_(shape.inside)

    def run() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x * 1.0 if shape.inside else x).flatten(2).transpose(1, 2)
        out.backward(torch.ones_like(out))
        return out

    return run


class _Copied(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        side = self.conv.kernel_size
        rows = copy_patches(x, side, tuple(size // own for size, own in zip(x.shape[2:], side, strict=True)))
        return F.linear(rows, self.conv.weight.flatten(1), self.conv.bias).movedim(-1, 1)


def _gpu_ms(work: Callable[[], object]) -> float:
    """Time of the kernels of one call, which has run before."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            work()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in kernels_of(profiler)) / _PROFILED / 1000


def main() -> None:
    args = arguments(__doc__.split("\n")[0], "patch_embedding_h200.jsonl").parse_args()
    record = Record(args.out)
    for shape in SHAPES:

        def conv(shape: Shape = shape) -> nn.Conv2d:
            return nn.Conv2d(shape.channels, shape.outs, shape.patch, shape.patch).cuda().bfloat16()

        layers: dict[str, nn.Module] = {"cuDNN": conv(), "copied": _Copied(conv())}
        for level in LEVELS:
            model = nn.Sequential(nn.Conv2d(shape.channels, shape.outs, shape.patch, shape.patch)).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            layers[level] = prepare(model, optimizer, level, convert=None, graphs=False)[0]
        for name, layer in layers.items():
            passes = _passes(layer, shape)
            times = {"ms": round(milliseconds(passes), 4), "gpu_ms": round(_gpu_ms(passes), 4)}
            record.add(benchmark="patch_embedding", layer=shape.name, name=name, **times)


if __name__ == "__main__":
    main()
