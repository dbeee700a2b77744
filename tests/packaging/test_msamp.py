"""The distribution ``ms-amp`` of ``distributions/msamp``, by which Accelerate's own FP8 finds this package."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.utils import MSAMPRecipeKwargs, is_msamp_available

import nemo_lowprec.msamp
from nemo_lowprec.compute import gemm_times
from tests.faces import batches, make_model, make_optimizer, trainer_losses

SOURCE = Path(__file__).parents[2] / "distributions" / "msamp"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _everything_is_converted(monkeypatch):
    """Small layers are in FP8 on a GPU, too."""
    monkeypatch.setattr(gemm_times, "FAMILIES", {"": None})


def _forget_accelerator():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The distribution is installed, built as a wheel without a network."""
    folder = tmp_path_factory.mktemp("msamp")
    source = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("ms_amp-*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    finders = list(sys.meta_path)
    sys.path.insert(0, str(folder / "site"))
    yield
    sys.path.remove(str(folder / "site"))
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "msamp"]:
        del sys.modules[name]
    _forget_accelerator()


def accelerator_of(device):
    _forget_accelerator()
    recipe = MSAMPRecipeKwargs(opt_level="O2")
    return accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=device == "cpu")


def accelerated_losses(device):
    accelerator = accelerator_of(device)
    accelerator.scaler = None  # see the README of the distribution
    model = make_model("vit").to(device)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    losses = []
    for batch in batches("vit"):
        loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loop_losses(device):
    model = make_model("vit").to(device)
    model, optimizer = nemo_lowprec.msamp.initialize(model, make_optimizer(model), opt_level="O2")
    losses = []
    for batch in batches("vit"):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_accelerate_trains_at_o2_as_a_loop_of_ones_own():
    assert is_msamp_available()
    losses = accelerated_losses("cpu")
    assert losses == loop_losses("cpu")
    # Not bit for bit: without a Trainer weights read as FP32, so that embeddings and the residual stream are FP32.
    assert losses == pytest.approx(trainer_losses("vit", "msamp_o2"), rel=0.01)


def test_names_and_submodules_are_those_of_nemo_lowprec():
    import msamp
    import msamp.optim
    from msamp.nn import clip_grad_norm_

    assert msamp.initialize is nemo_lowprec.msamp.initialize and dir(msamp) == dir(nemo_lowprec.msamp)
    assert sys.modules["msamp.optim"] is msamp.optim is sys.modules["nemo_lowprec.msamp.optim"]
    assert msamp.optim.__spec__.name == "nemo_lowprec.msamp.optim"
    assert clip_grad_norm_ is nemo_lowprec.msamp.nn.clip_grad_norm_
    assert importlib.util.find_spec("msamp.no_such_module") is None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = msamp.no_such_name


def test_a_name_without_a_counterpart_raises_the_sentence_of_nemo_lowprec():
    with pytest.raises(ImportError, match="DeepSpeed's optimizers do not step on FP8 gradients"):
        from msamp import deepspeed  # noqa: F401


@ON_A_GPU
@pytest.mark.gpu
def test_accelerate_trains_on_a_gpu_as_a_loop_of_ones_own():
    assert accelerated_losses("cuda") == loop_losses("cuda")


@ON_A_GPU
@pytest.mark.gpu
def test_accelerate_scales_the_loss_on_a_gpu_and_leaves_gradients_scaled():
    norms = []
    for scaled in (True, False):
        accelerator, model = accelerator_of("cuda"), make_model("vit").cuda()
        if not scaled:
            accelerator.scaler = None
        model, _ = accelerator.prepare(model, make_optimizer(model))
        accelerator.backward(model(**{name: values.cuda() for name, values in batches("vit")[0].items()}).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
    assert norms[0] / norms[1] == pytest.approx(2.0**16, rel=0.05)
