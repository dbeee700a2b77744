"""A tiny model of each family trains at every level as in FP32, on a GPU: kernels and CUDA graphs as they are set."""

from functools import cache

import pytest
import torch

from nemo_lowprec.compute.backends import choose_backend
from tests.alike import Alike, assert_alike, fit
from tests.families import FAMILIES, TIMM, loss_of, rate_of
from tests.models.test_families import check_table
from tests.support import CASES, level_of, plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@cache
def in_fp32(name):
    make, batch = (FAMILIES | TIMM)[name]
    return fit(Alike(make, loss_of, rate_of(name)), None, batch(), "gpu")


def runs_here(case):
    """Skip where no backend of this GPU runs the level."""
    if not level_of(case).has_fp8:
        return
    try:
        choose_backend("auto", plugin(case, backend="auto").parsed.recipe, torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*FAMILIES, *TIMM])
def test_it_trains_as_in_fp32(name, case, tmp_path):
    if name in TIMM:
        pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    runs_here(case)
    model = assert_alike(in_fp32(name), case, (FAMILIES | TIMM)[name][1](), tmp_path / "saved.ckpt", "gpu")
    check_table(name, case, model)
