"""A tiny model of each family trains at a level as in FP32; ``tests/gpu/test_families.py`` has all levels, on a GPU.

Levels are dealt out by a hash of the family's name. With ``NEMO_LOWPREC_FAMILIES=all`` each family trains at all levels
(six minutes).
"""

import os
from functools import cache

import pytest
import transformers
from alike import Alike, assert_alike, dealt, fit
from documents import ROOT
from families import FAMILIES, TIMM, loss_of, may_stay, rate_of
from families_page import PAGE, written
from support import CASES, level_of
from torch import nn
from transformers.pytorch_utils import Conv1D

EVERY = os.environ.get("NEMO_LOWPREC_FAMILIES") == "all"
RUNS = (
    [(name, case) for name in [*FAMILIES, *TIMM] for case in CASES]
    if EVERY
    else [*dealt(FAMILIES, CASES), *dealt(TIMM, CASES)]
)


@cache
def in_fp32(name):
    make, batch = (FAMILIES | TIMM)[name]
    return fit(Alike(make, loss_of, rate_of(name)), None, batch())


def test_every_level_has_two_families():
    assert min(sum(case == of for name, of in RUNS if name in FAMILIES) for case in CASES) >= 2
    assert len(FAMILIES) >= 30 and len(TIMM) == 10


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in (ROOT / "constraints.txt").read_text(),
    reason="other releases of transformers have other names",
)
def test_the_page_lists_what_is_converted():
    assert written(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.families_page"


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_it_trains_as_in_fp32(name, case, tmp_path):
    if name in TIMM:
        pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    model = assert_alike(in_fp32(name), case, (FAMILIES | TIMM)[name][1](), tmp_path / "saved.ckpt")
    check_table(name, case, model)


def check_table(name, case, model):
    """Every linear layer is converted or named with a reason that is known, and so is every other matrix."""
    if not level_of(case).has_fp8:
        return
    found = model.conversion
    linears = {n for n, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    computed = any(group.fate.reason == "computed by a parametrization" for group in model.groups)
    assert linears <= {*found.low, *found.kept} or computed
    reasons = {group.fate.reason for group in model.groups if group.fate.kind in ("half", "asked")}
    assert {reason for reason in reasons if not may_stay(name, reason)} == set()
    matrices = {id(p): p.numel() for p in model.parameters() if p.dim() > 1}
    assert sum(group.elements for group in model.groups) == sum(matrices.values())
