"""MS-AMP's names: a script whose only change is the import, the optimizers' arguments, and refusals with a way out."""

import functools
import importlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nemo_lowprec
from nemo_lowprec import msamp
from nemo_lowprec.engine import Engine
from nemo_lowprec.msamp.refused import WAYS_OUT
from nemo_lowprec.optim import Adam, AdamW
from tests.faces import batches, make_model, make_optimizer, trainer_losses

SCRIPT = """
import msamp

model = make_model()
model, optimizer = msamp.initialize(model, make_optimizer(model), opt_level="O2")
scaler = torch.amp.GradScaler("cpu", enabled=scaled)
for batch in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms.append(msamp.clip_grad_norm_(model.parameters(), 0.0).item())
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""


@functools.cache
def run_script(scaled):
    names = {
        "torch": torch, "scaled": scaled, "losses": [], "norms": [], "batches": batches("vit"),
        "make_model": lambda: make_model("vit"), "make_optimizer": make_optimizer,
    }  # fmt: skip
    exec(SCRIPT.replace("import msamp", "from nemo_lowprec import msamp"), names)
    return names


def test_a_script_trains_after_its_import_line_has_changed():
    ran = run_script(scaled=False)
    assert Engine.of(ran["model"]).level.name == "msamp_o2" and type(ran["optimizer"]) is AdamW

    model, optimizer = nemo_lowprec.prepare(make_model("vit"), None, "msamp_o2")
    optimizer.param_groups[0].update(lr=2e-3, weight_decay=0.01)
    losses, norms = [], []
    for batch in batches("vit"):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        norms.append(sum(p.grad.float().square().sum() for p in model.parameters()).sqrt().item())
        optimizer.step()
        losses.append(loss.item())
    assert ran["losses"] == losses and ran["norms"] == pytest.approx(norms, rel=1e-5)
    # A loop reads embeddings and the residual stream in FP32, where the Trainer has them in BF16.
    of_trainer = trainer_losses("vit", "msamp_o2")
    assert losses != of_trainer and losses == pytest.approx(of_trainer, rel=5e-3)


def test_a_gradient_scaler_changes_no_bit_beside_bf16():
    plain, scaled = run_script(scaled=False), run_script(scaled=True)
    assert plain["losses"] == scaled["losses"] and plain["norms"] == scaled["norms"]


def test_names_are_those_of_ms_amp_and_are_loaded_when_asked_for():
    assert msamp.initialize is nemo_lowprec.initialize and msamp.opt_levels == ["O1", "O2", "O3"]
    assert msamp.clip_grad_norm_ is msamp.nn.clip_grad_norm_ is nemo_lowprec.clip_grad_norm_
    assert msamp.LBAdamW is msamp.optim.LBAdamW is msamp.optim.LBAdamWBase and issubclass(msamp.LBAdam, Adam)
    assert issubclass(msamp.LBAdamW, msamp.optim.LBOptimizer)
    assert msamp.nn.distributed.FP8DistributedDataParallel is DistributedDataParallel
    assert set(msamp.__all__) <= set(dir(msamp))
    code = "import sys, nemo_lowprec.msamp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtypes", [{}, {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}])
@pytest.mark.parametrize("theirs,ours", [(msamp.optim.LBAdam, Adam), (msamp.optim.LBAdamW, AdamW)])
def test_an_optimizer_steps_as_ours_with_ms_amps_arguments(theirs, ours, dtypes):
    formats = {name: "fp32" for name in dtypes}
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "maximize": True}
    weights = []
    for make, given in ((theirs, dtypes), (ours, formats)):
        torch.manual_seed(0)
        layer = nn.Linear(128, 32)
        optimizer = make(layer.parameters(), **settings, **given)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(8, 128)).square().mean().backward()
            optimizer.step()
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


def test_defaults_are_ms_amps():
    params = [nn.Parameter(torch.zeros(128, 128))]
    adam, adamw = msamp.LBAdam(params, 1e-3, (0.8, 0.9), 1e-6, 0.1), msamp.LBAdamW(params, 1e-3, True, (0.8, 0.9), 1e-6)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.1)
    assert (adamw.defaults["betas"], adamw.defaults["eps"], adamw.defaults["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.01)
    assert msamp.LBAdam(params).defaults["weight_decay"] == 0
    assert (adam.formats.exp_avg, adam.formats.exp_avg_sq, adam.formats.master_weight) == ("fp8", "fp16", None)


@pytest.mark.parametrize("make", [msamp.LBAdam, msamp.LBAdamW])
@pytest.mark.parametrize(
    "argument",
    [{"bias_correction": False}, {"tensor_scale": False}, {"exp_avg_dtype": torch.int8}, {"amsgrad": True}],
    ids=lambda a: next(iter(a)),
)
def test_an_argument_without_a_counterpart_is_refused_by_name(make, argument):
    with pytest.raises(ValueError, match=f"^{next(iter(argument))}="):
        make([nn.Parameter(torch.zeros(4, 4))], **argument)


@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_name_without_a_counterpart_is_refused_where_it_is_imported(name):
    parent, _, last = f"nemo_lowprec.msamp.{name}".rpartition(".")
    sentence = f"^nemo_lowprec has no msamp.{name}. .{{30}}"
    with pytest.raises(ImportError, match=sentence):
        exec(f"from {parent} import {last}")
    with pytest.raises(ImportError, match=sentence):
        getattr(importlib.import_module(parent), last)


@pytest.mark.parametrize("module", ["common.dtype", "te.replacer", "fsdp", "deepspeed", "megatron", "operators"])
def test_a_module_without_a_counterpart_is_refused(module):
    with pytest.raises(ImportError, match=f"^nemo_lowprec has no msamp.{module.split('.')[0]}. "):
        importlib.import_module(f"nemo_lowprec.msamp.{module}")


def test_other_names_are_missing_as_in_any_module():
    for module in (msamp, msamp.nn, msamp.optim):
        assert not hasattr(module, "nothing_of_the_kind")


def test_a_layer_that_ms_amp_keeps_stays_in_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    model[1].use_fp32_linear = True
    msamp.initialize(model, opt_level="O1", convert=None, skip="2")
    assert list(Engine.of(model).columns.computation.conversion.low) == ["0"]
