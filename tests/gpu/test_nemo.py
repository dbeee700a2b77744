"""What the plugin does under NeMo's MegatronStrategy that needs Transformer Engine; NeMo itself is not needed."""

import pytest
import torch

from nemo_lowprec import bf16_with_fp8_mixed

pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_layers_with_delayed_scaling_can_be_built() -> None:
    """Before a model is built, Megatron-core's recipe is one that Transformer Engine takes."""
    from megatron.core import fp8_utils
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16, fp8="hybrid",
        fp8_margin=1,
    )  # fmt: skip
    with bf16_with_fp8_mixed().module_init_context():
        assert fp8_utils.get_fp8_recipe(config).margin == 1
