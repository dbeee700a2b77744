"""Every level under a real Trainer on a GPU, on every backend that runs it there."""

import gc

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from support import (
    CASES,
    HiddenInTE,
    Net,
    Overflowing,
    assert_same,
    assert_second_skipped,
    foreach_adamw,
    fused_adamw,
    level_of,
    loader,
    plugin,
    save_at,
    stateful_loader,
    train,
    trainer,
)
from torch import nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import BACKENDS
from nemo_lowprec.compute.backends import class_of
from nemo_lowprec.report import Audit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def runs():
    """(case, backend): a level without FP8 has no backend."""
    for case in CASES:
        level = level_of(case)
        if not level.has_fp8:
            yield pytest.param(case, None, id=case)
            continue
        for backend in BACKENDS:
            yield pytest.param(case, backend, id=f"{case}-{backend}")


def at(case, backend, **options):
    if backend is None:
        return plugin(case, **options)
    recipe = Recipe(level_of(case).scaling, fp8="e4m3" if level_of(case).scaling in ("mxfp8", "nvfp4") else "hybrid")
    reason = class_of(backend, recipe).unavailable(recipe)
    if reason:
        pytest.skip(reason)
    return plugin(case, backend=backend, **options)


def fit(model, precision, *callbacks, **options):
    return train(model, precision, *callbacks, accelerator="gpu", **options)


@pytest.mark.parametrize(("case", "backend"), list(runs()))
def test_resume_bit_for_bit(case, backend, tmp_path):
    def net():
        return Net(dropout=0.2, stepwise=True)

    options = {"max_steps": 5, "max_epochs": -1, "gradient_clip_val": 1.0}
    whole_model, model = net(), net()
    whole = fit(whole_model, at(case, backend), data=stateful_loader(count=12), **options)
    early = options | {"max_steps": 3}
    fit(net(), at(case, backend), save_at(tmp_path, 2), data=stateful_loader(count=12), **early)
    torch.rand(5, device="cuda")
    resumed = fit(model, at(case, backend), data=stateful_loader(count=12), ckpt=tmp_path / "step=2.ckpt", **options)
    assert model.losses == whole_model.losses[2:]
    assert_same(resumed.state, whole.state)


@pytest.mark.parametrize(("case", "backend"), list(runs()))
def test_a_run_is_found_to_do_what_the_chart_declares(case, backend):
    audit = Audit()
    fit(Net(), at(case, backend), audit, max_steps=3)
    differing = [f for f in audit.report.findings if not f.agrees]
    assert not differing and audit.report.agrees


@pytest.mark.parametrize("case", [c for c in CASES if level_of(c).has_fp8])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_losses_follow_the_reference(case, backend):
    losses = []
    for name in (backend, "reference"):
        model = Net()
        fit(model, at(case, name), data=loader(batch_size=16), max_steps=12, max_epochs=-1)
        losses.append(torch.tensor(model.losses))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)


class Silent(Net):
    """Reads nothing back; its first layer is frozen."""

    def __init__(self):
        super().__init__()
        self.inp.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class NoWaiting(Callback):
    """From the fourth step on, whatever reads from the GPU raises."""

    steps = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= 3:
            torch.cuda.set_sync_debug_mode("error")
            self.steps += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("case", "backend"), [r for r in runs() if not level_of(r.values[0]).has_loss_scale])
def test_a_step_reads_nothing_back_but_whether_its_gradients_are_finite(case, backend):
    watch = NoWaiting()
    try:
        # not fit(): its Observer reads back
        run = trainer(at(case, backend), watch, accelerator="gpu", max_steps=6, max_epochs=-1)
        run.fit(Silent(), loader(batch_size=16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == 3


@pytest.mark.parametrize(("case", "backend"), list(runs()))
@pytest.mark.parametrize("optimizer", [foreach_adamw, fused_adamw])
def test_a_step_whose_gradients_are_not_finite_is_skipped_whole(case, backend, optimizer):
    model = Overflowing(1, factor=float("nan"), optimizer=optimizer)
    train(model, at(case, backend), accelerator="gpu", max_steps=3)
    assert_second_skipped(model)


class WithTELayers(Net):
    """A model that brings Transformer Engine layers of its own."""

    def __init__(self):
        super().__init__(stepwise=True)
        te = pytest.importorskip("transformer_engine.pytorch")
        torch.manual_seed(2)
        self.own = te.Linear(128, 128, params_dtype=torch.float32)
        self.fused = te.LayerNormLinear(128, 128, params_dtype=torch.float32)

    def middle(self, x):
        return super().middle(F.gelu(self.fused(self.own(x))))


def padded_loader():
    return stateful_loader(batch_size=16, count=48)


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_a_model_with_te_layers_of_its_own(case, tmp_path):
    options = {"max_steps": 5, "max_epochs": -1}
    whole_model, model = WithTELayers(), WithTELayers()
    whole = fit(whole_model, at(case, "te"), data=padded_loader(), **options)
    assert whole_model.losses[-1] < whole_model.losses[0]
    fit(WithTELayers(), at(case, "te"), save_at(tmp_path, 2), data=padded_loader(), **options | {"max_steps": 3})
    file = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert all(value.numel() == 0 for key, value in file["state_dict"].items() if "extra_state" in key)
    resumed = fit(model, at(case, "te"), data=padded_loader(), ckpt=tmp_path / "step=2.ckpt", **options)
    assert model.losses == whole_model.losses[2:]
    assert_same(resumed.state, whole.state)


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed"])
def test_an_infinity_that_te_layers_hide_from_the_gradients_skips_the_step(case):
    model = HiddenInTE()
    train(model, at(case, "te"), data=padded_loader(), accelerator="gpu", max_steps=5)
    assert model.skipped_at == [2]


def test_what_te_layers_of_the_model_cannot_do_is_refused_at_start():
    precision = at("bf16_with_fp8_mixed", "te", override_linear_precision=(False, False, True))
    with pytest.raises(ValueError, match="own layers have no override_linear_precision"):
        fit(WithTELayers(), precision, data=padded_loader(), max_steps=1)


def test_blackwell_levels_are_refused_on_an_older_gpu():
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has them")
    for case in ("bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"):
        with pytest.raises(ValueError, match="need a Blackwell GPU"):
            fit(Net(), plugin(case, backend="auto"), max_steps=1)


@pytest.mark.parametrize(
    "case",
    ["bf16_with_fp8_mixed", "msamp_o2", "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed"],
)
def test_auto_takes_the_fastest_backend(case):
    pytest.importorskip("transformer_engine.pytorch")
    precision = plugin(case, backend="auto")
    fit(Net(), precision, max_steps=1)
    backend = precision.engine.columns.computation.backend
    # Blocks are left to TE where torch's CUDA is too old for them.
    recipe = Recipe(level_of(case).scaling)
    assert backend.name == ("te" if class_of("torch", recipe).unavailable(recipe) else "torch")


def allocated():
    """Bytes that tensors hold, without the workspaces of cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_memory_of_half_and_fp8_copies():
    """Bytes a parameter between steps: copy, master, two moments; gradients are freed."""

    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.wide = nn.Sequential(nn.Linear(128, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 128))

        def middle(self, x):
            return super().middle(self.wide(x))

        def on_train_batch_end(self, outputs, batch, index):
            self.trainer.optimizers[0].zero_grad()
            self.bytes = allocated()

    sizes = {}
    runs = [(True, False), (False, False), (True, False), (True, True), (False, True)]
    for stored, kept in runs:  # Transformer Engine's workspaces are there from the first run on
        before = allocated()
        model = Wide()
        # not fit(): its Observer keeps a clone of every gradient
        precision = at("bf16_with_fp8_mixed", "te", fp8_params=stored, weight_cache=kept)
        trainer(precision, accelerator="gpu", max_steps=3).fit(model, loader())
        sizes[stored, kept] = (model.bytes - before) / sum(p.numel() for p in model.parameters())
        del model
    assert sizes[False, False] == pytest.approx(14, rel=0.02)
    assert sizes[True, False] == pytest.approx(13, rel=0.02)
    assert sizes[False, True] == pytest.approx(16, rel=0.02)
    assert sizes[True, True] == pytest.approx(14, rel=0.02)
