"""Patch embeddings on a GPU: as on the reference, as the convolution, with kept weights and without."""

import pytest
import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.chart import CHART
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import class_of
from nemo_lowprec.compute.patches import LowPrecisionPatches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LEVELS = [
    "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params", "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "msamp_o2", "msamp_o3",
]  # fmt: skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(4, 128, 8, 8)
        self.mid = nn.Linear(128, 64)

    def forward(self, x):
        return self.mid(self.patches(x).flatten(2).transpose(1, 2))


def steps(case, backend, weight_cache=False, channels_last=False, image=(8, 4, 68, 64)):
    level, _, variant = case.partition("+")
    options = {variant: True} if variant else {}
    if reason := class_of(backend, Recipe(CHART[level].scaling, fp8="e4m3")).unavailable(Recipe(CHART[level].scaling)):
        pytest.skip(reason)
    torch.manual_seed(0)
    model = Model().cuda()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = prepare(
        model, optimizer, level, backend=backend, convert="*", weight_cache=weight_cache, graphs=False, **options
    )
    assert isinstance(model.patches, LowPrecisionPatches) and isinstance(model.patches, nn.Conv2d)
    found = []
    for step in range(3):
        x = torch.randn(image, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
            out.float().square().mean().backward()
            found.append(out.detach().float())
        optimizer.step()
        optimizer.zero_grad()
    return found, [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("case", LEVELS)
def test_it_computes_as_on_the_reference(case):
    for have, wanted in zip(steps(case, "torch")[0], steps(case, "reference")[0], strict=True):
        assert (have - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("case", LEVELS)
def test_kept_weights_change_no_bit(case, backend, channels_last):
    (outs, weights), (others, more) = (steps(case, backend, keeps, channels_last) for keeps in (True, False))
    assert_same(dict(enumerate(outs)), dict(enumerate(others)))
    assert_same(dict(enumerate(weights)), dict(enumerate(more)))


@pytest.mark.parametrize("case", LEVELS)
def test_it_is_the_convolution_within_fp8s_rounding(case):
    found, _ = steps(case, "torch")
    torch.manual_seed(0)
    model = Model().cuda()
    x = torch.randn(8, 4, 68, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    wanted = model.mid(F.conv2d(x, model.patches.weight, model.patches.bias, 8).flatten(2).transpose(1, 2))
    assert (found[0] - wanted).norm() < 0.1 * wanted.norm()
