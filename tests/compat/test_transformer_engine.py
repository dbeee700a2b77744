"""Transformer Engine's import, and its quantized tensors."""

import os
import subprocess
import sys

import pytest
import torch

from nemo_lowprec.compat import transformer_engine as compat


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_parts_of_a_quantized_weight():
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common.recipe import DelayedScaling

    with te.quantized_model_init(enabled=True, recipe=DelayedScaling()):
        weight = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda").weight
    values = torch.randn(32, 32, device="cuda", dtype=torch.bfloat16)
    compat.quantizer_of(weight).update_quantized(values, weight)
    data, scale_inv = compat.fp8_data(weight), compat.scale_inv(weight)
    assert data is not None and data.dtype == torch.uint8 and scale_inv.shape == (1,)
    assert compat.fp8_dtype(weight).name == "kFloat8E4M3"
    read = data.view(torch.float8_e4m3fn).float() * scale_inv
    assert torch.equal(read, weight.dequantize(dtype=torch.float32))
    assert (read - values.float()).abs().max() <= values.float().abs().max() / 16
    assert compat.fp8_data(values) is None


IGNORED = {"interval": 4, "override_linear_precision": (False, False, True)}


def test_arguments_that_recipes_ignore_are_named():
    assert compat.ignored_arguments({"interval": 1, "fp8_margin": 2}) == []
    interval, override = compat.ignored_arguments(IGNORED)
    assert interval.startswith("interval=4 has an effect here. Transformer Engine 2.20 ignores")
    assert override.startswith("override_linear_precision=(False, False, True) has")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recipes_ignore_them():
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common.recipe import DelayedScaling

    assert not set(IGNORED) & set(vars(DelayedScaling(margin=1, **IGNORED)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_quantizer_without_amax():
    te = pytest.importorskip("transformer_engine.pytorch")
    values = torch.randn(32, 32, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.full((1,), 8.0, device="cuda"), torch.zeros(1, device="cuda")
    delayed = te.Float8Quantizer(scale, amax, te.DType.kFloat8E4M3)
    read = compat.without_amax(delayed).quantize(values)
    assert not amax.any()
    written = delayed.quantize(values)
    assert torch.equal(read.dequantize(), written.dequantize()) and amax == values.abs().max()
    blocks = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    read, written = compat.without_amax(blocks).quantize(values), blocks.quantize(values)
    assert torch.equal(read.dequantize(), written.dequantize())


def test_the_import_leaves_the_environment_as_it_was(monkeypatch, tmp_path):
    """Whatever the import does. A folder stands for the package that torch's wheels take cuDNN from."""
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.delenv("CUDNN_PATH", raising=False)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(compat, "_cudnn_of_torch", lambda: tmp_path)
    (tmp_path / "seen.py").write_text("import os; home = os.environ['CUDNN_HOME']")
    (tmp_path / "broken.py").write_text("raise OSError('libcudnn')")
    monkeypatch.syspath_prepend(tmp_path)
    assert compat.import_te("seen").home == str(tmp_path)
    with pytest.raises(OSError, match="libcudnn"):
        compat.import_te("broken")
    assert "CUDNN_HOME" not in os.environ
    monkeypatch.setenv("CUDNN_HOME", "/own")
    monkeypatch.delitem(sys.modules, "seen")
    assert compat.import_te("seen").home == "/own" == os.environ["CUDNN_HOME"]


ATTENTION = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
{first}
from nemo_lowprec.compat.transformer_engine import import_te
te = import_te()
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    attend(q, q, q)
torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda"))
te.DotProductAttention(4, 64)(*(t.permute(2, 0, 1, 3).contiguous() for t in (q, q, q)))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("first", ["", "attend(q, q, q)"])
def test_torch_keeps_its_own_cudnn(first):
    pytest.importorskip("transformer_engine")
    code = ATTENTION.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
