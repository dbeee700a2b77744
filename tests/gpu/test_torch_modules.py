"""torch's own modules train at every level as in FP32 on a GPU: recurrent layers by cuDNN, attention by its kernels."""

import warnings
from functools import cache

import pytest
import torch
from torch import nn

import nemo_lowprec
from tests.alike import Alike, assert_alike, fit
from tests.gpu.test_families import runs_here
from tests.plugins import test_gan
from tests.plugins.test_torch_modules import check_dit, check_table
from tests.support import CASES, HALF_LEVELS, level_of
from tests.torch_modules import KINDS, DiT, batch, classifier, loss_of, rate_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@cache
def in_fp32(kind):
    return fit(Alike(DiT if kind == "DiT" else classifier(kind), loss_of, rate_of(kind)), None, batch(), "gpu")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [*KINDS, "DiT"])
def test_it_trains_as_in_fp32(kind, case, tmp_path):
    runs_here(case)
    cudnn_or_skip(kind)
    model = assert_alike(in_fp32(kind), case, batch(), tmp_path / "saved.ckpt", "gpu")
    if not level_of(case).has_fp8:
        return
    if kind == "DiT":
        check_dit(model)
    else:
        check_table(kind, model)


def cudnn_or_skip(kind):
    """Skip recurrent layers where another package has loaded another cuDNN than the one torch was built with."""
    if any(name in kind for name in ("LSTM", "GRU", "RNN")):
        try:
            torch.backends.cudnn.version()
        except RuntimeError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES)
def test_a_gan_trains_as_in_fp32(case):
    runs_here(case)
    options = {"backend": "auto"} if level_of(case).has_fp8 else {}
    test_gan.assert_learns_alike(test_gan.train(case, "gpu", **options), test_gan.train(None, "gpu"), case)


@pytest.mark.parametrize("level", [name for name in HALF_LEVELS if level_of(name).compute not in ("mxfp8", "nvfp4")])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_weights_of_an_rnn_lie_side_by_side(kind, level):
    """Where they do not, cuDNN copies them in every pass, and torch warns."""
    cudnn_or_skip(kind.__name__)
    model = nn.Sequential(kind(32, 32, 2, bidirectional=True)).cuda()
    model, optimizer = nemo_lowprec.prepare(model, torch.optim.AdamW(model.parameters()), level)
    x = torch.randn(5, 4, 32, device="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*single contiguous chunk.*")
        for _ in range(3):
            with torch.autocast("cuda", torch.float16 if level.startswith("fp16") else torch.bfloat16):
                loss = model(x)[0].float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert all(p.isfinite().all() for p in model.parameters())
