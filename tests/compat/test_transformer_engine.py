"""Transformer Engine's quantized tensors."""

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
