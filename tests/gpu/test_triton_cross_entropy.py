"""Cross entropy of half logits on a GPU: the kernels against FP64 and the reference, and a head's whole step."""

import pytest
import torch
import torch.nn.functional as F
from support import kernels_or_skip
from torch import nn

from nemo_lowprec.compute.backends.losses import gradient_of, losses_of
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.logits import Logits, give_logits
from nemo_lowprec.kernels.loader import loss_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SIZES = [(4096, 32000), (130, 51865), (64, 128256), (7, 4096), (1, 30522), (33, 257)]
by_case = pytest.mark.parametrize("size", SIZES, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(loss_kernels())


def case(size, dtype, padding=0):
    rows, classes = size
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, classes + padding, device="cuda", generator=generator) * 6
    targets = torch.randint(classes, (rows,), device="cuda", generator=generator)
    targets[::5] = -100
    return logits.to(dtype)[:, :classes], targets


@pytest.mark.parametrize("padding", [0, 8, 3])
@by_dtype
@by_case
def test_losses_and_gradients(kernels, size, dtype, padding):
    logits, targets = case(size, dtype, padding)
    logits[0, : size[1] // 2] = float("-inf")
    losses, lse = kernels.forward(logits, targets, -100)
    want = F.cross_entropy(logits.double(), targets, reduction="none")
    there = want.isfinite()
    torch.testing.assert_close(losses[there].double(), want[there], rtol=2e-6, atol=2e-6)
    assert torch.equal(losses.isfinite(), there) and not losses[targets == -100].any()
    for scale in (torch.full((1,), 0.37, device="cuda"), torch.rand(len(targets), device="cuda")):
        got = kernels.backward(logits, targets, lse, scale, -100)
        exact = (logits.double() - logits.double().logsumexp(1, keepdim=True)).exp()
        exact[targets != -100, targets[targets != -100]] -= 1
        exact *= torch.where(targets != -100, scale, 0.0).unsqueeze(1)
        assert got.dtype == dtype and got.is_contiguous()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=0.51 * eps, atol=1e-6)
        assert torch.equal(got, kernels.backward(logits, targets, lse, scale, -100))


@by_dtype
def test_the_kernels_agree_with_the_reference(kernels, dtype):
    logits, targets = case((130, 51865), dtype)
    losses, lse = kernels.forward(logits, targets, -100)
    want, want_lse = losses_of(logits, targets, -100)
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    scale = torch.full((1,), 1 / 104, device="cuda")
    got = kernels.backward(logits, targets, lse, scale, -100)
    differ = got != gradient_of(logits, targets, want_lse, scale, -100)
    assert differ.float().mean() < 1e-3


def test_a_target_that_is_no_class_is_nan(kernels):
    logits, targets = case((7, 4096), torch.bfloat16)
    targets[1], targets[2] = 4096, -1
    losses, _ = kernels.forward(logits, targets, -100)
    assert losses.isnan().tolist() == [False, True, True, False, False, False, False]


def step(head, x, targets):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(head(x).float().flatten(0, 1), targets)
    loss.backward()
    found = [loss.detach(), x.grad, head.weight.grad]
    x.grad = head.weight.grad = None
    return found


def test_a_head_needs_no_fp32_logits(kernels):
    rows, classes, features = 4096, 32000, 256
    torch.manual_seed(0)
    head = nn.Linear(features, classes, bias=False, device="cuda")
    x = torch.randn(4, rows // 4, features, device="cuda", requires_grad=True)
    targets = torch.randint(classes, (rows,), device="cuda")
    want = step(head, x, targets)
    give_logits(head, ReferenceBackend())
    with torch.autocast("cuda", torch.bfloat16):
        assert type(head(x)) is Logits
    step(head, x, targets)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = step(head, x, targets)
    # The half logits, their half gradient, and what belongs to the head.
    assert torch.cuda.max_memory_allocated() - before < 2.5 * rows * classes * 2
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-2, atol=1e-2 * w.abs().max().item())
