"""torch's own modules train at every level as in FP32: attention, recurrent layers, a DiT; on a GPU in tests/gpu."""

from functools import cache

import pytest
from alike import Alike, assert_alike, dealt, fit
from support import CASES, level_of
from torch import nn
from torch_modules import KINDS, DiT, batch, classifier, loss_of, rate_of


@cache
def in_fp32(kind):
    return fit(Alike(DiT if kind == "DiT" else classifier(kind), loss_of, rate_of(kind)), None, batch())


LEFT = {
    "attention pooling": "AttentionPool reads its weight without calling it",
    "spectral norm": "its weight is computed (weight_norm or another parametrization)",
    "orthogonal": "its weight is computed (weight_norm or another parametrization)",
}
CONVERTED = {
    "attention": ["in_proj_weight", "out_proj"],
    "attention of a subclass": ["in_proj_weight", "out_proj"],
    "attention with more keys": ["in_proj_weight", "out_proj"],
    "attention of other sizes": ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj"],
}


@pytest.mark.parametrize(("kind", "case"), dealt(KINDS, CASES))
def test_it_trains_as_in_fp32(kind, case, tmp_path):
    model = assert_alike(in_fp32(kind), case, batch(), tmp_path / "saved.ckpt")
    if level_of(case).has_fp8:
        check_table(kind, model)


def check_table(kind, model):
    """Linear layers and attention are converted; every other matrix is in the table with the module that has it."""
    found, body = model.conversion, "model.body"
    low = [name.removeprefix(f"{body}.") for name in found.low]
    if kind in CONVERTED:
        assert low == CONVERTED[kind]
    elif "encoder" in kind:
        assert len(low) == 10 if "decoder" in kind else 8
    else:
        assert not low
    layers = {name: reason for name, reason in found.kept.items() if name != "model.head" and "norm" not in name}
    assert set(layers.values()) == ({LEFT[kind]} if kind in LEFT else set())
    shown = {name.split(" ")[0] for group in model.groups for name in group.names}
    for name, param in model.named_parameters():
        layer, computed, _ = name.partition(".parametrizations")
        layer = layer if computed else name.rpartition(".")[0]
        assert param.dim() < 2 or {name, layer} & shown or name in found.weights, name


@pytest.mark.parametrize("case", CASES)
def test_a_diffusion_transformer_learns_flow_matching(case, tmp_path):
    model = assert_alike(in_fp32("DiT"), case, batch(), tmp_path / "saved.ckpt")
    if level_of(case).has_fp8:
        check_dit(model)


def check_dit(model):
    """All linear layers are converted, and the norms without parameters."""
    found = model.conversion
    assert set(found.low) - set(found.patches) == {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    assert set(found.norms) == {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert not found.kept
