"""FP8 weights written from parts of masters, beside Transformer Engine's own function for it, bit for bit."""

import pytest
import torch
import torch.distributed as dist

from nemo_lowprec.formats import E4M3, decode

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RECIPES = {
    "DelayedScaling": [torch.bfloat16, torch.float16],
    "Float8CurrentScaling": [torch.bfloat16, torch.float16],
    "Float8BlockScaling": [torch.bfloat16],  # whose parts Transformer Engine writes itself; not from FP16
}
SHAPES = [(256, 384), (512, 128), (128, 128), (384, 256)]
# (start, end) of what this process steps of each weight; None where it is another's.
PARTS = {
    "whole": [(0, 256 * 384), (0, 512 * 128), (0, 128 * 128), (0, 384 * 256)],
    "parts": [(128 * 333, 256 * 384), None, (0, 128 * 128), (0, 128 * 77)],
}


@pytest.fixture
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def weights_of(recipe, dtype):
    from transformer_engine.common import recipe as recipes

    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
        layers = [te.Linear(cols, rows, bias=False, params_dtype=dtype, device="cuda") for rows, cols in SHAPES]
    return [layer.weight for layer in layers]


def masters(parts, dtype, factor=1.0):
    generator = torch.Generator("cuda").manual_seed(1)
    full = [torch.randn(rows * cols, device="cuda", generator=generator) * factor for rows, cols in SHAPES]
    return [None if part is None else x[part[0] : part[1]].to(dtype) for x, part in zip(full, parts, strict=True)]


def state_of(weights, parts):
    """Everything a step may change of a weight; of its values this process' part, as the others' are gathered."""
    found = []
    for weight, part in zip(weights, parts, strict=True):
        quantizer = weight._get_quantizer()
        data = [getattr(weight, name, None) for name in ("_data", "_rowwise_data")]
        found += [x.view(-1)[slice(*part)] for x in data if x is not None and part is not None]
        scales = [getattr(weight, name, None) for name in ("_scale_inv", "_rowwise_scale_inv")]
        found += [x for x in scales if x is not None]
        found += [getattr(quantizer, name) for name in ("amax", "scale") if hasattr(quantizer, name)]
    return [x.clone() for x in found]


@pytest.mark.parametrize("master", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("recipe", "dtype"), [(recipe, dtype) for recipe in RECIPES for dtype in RECIPES[recipe]])
def test_bits_are_those_of_transformer_engine(recipe, dtype, parts, master, group):
    from megatron.core.fp8_utils import quantize_param_shard

    from nemo_lowprec.megatron.fp8_weights import write_fp8_weights

    places = PARTS[parts]
    starts = [None if part is None else part[0] for part in places]
    results = []
    for write in (quantize_param_shard, write_fp8_weights):
        weights = weights_of(recipe, dtype)
        before = state_of(weights, places)
        for factor in (1.0, 300.0):  # the second time saturates at the scales of delayed scaling
            write(weights, masters(places, master, factor), starts, group)
        results.append(state_of(weights, places))
        assert any(not torch.equal(a, b) for a, b in zip(before, results[-1], strict=True))
    assert len(results[0]) >= len(SHAPES) + sum(part is not None for part in places)
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


def test_values_are_the_masters_at_the_scale_of_their_amax(group):
    from nemo_lowprec.megatron.fp8_weights import write_fp8_weights

    weights, mains = weights_of("Float8CurrentScaling", torch.bfloat16), masters(PARTS["whole"], torch.float32)
    write_fp8_weights(weights, mains, [0] * len(weights), group)
    for weight, main in zip(weights, mains, strict=True):
        half = main.bfloat16().float()
        scale = E4M3.max / half.abs().max()
        stored = weight._data.view(torch.float8_e4m3fn).flatten()
        assert torch.equal(decode(stored), (half * scale).to(torch.float8_e4m3fn).float())
        assert weight._scale_inv.item() == pytest.approx(1 / scale.item(), rel=1e-6)


@pytest.mark.parametrize("what", ["nan", "zero"])
def test_masters_without_a_usable_amax(what, group):
    from nemo_lowprec.megatron.fp8_weights import write_fp8_weights

    weights, mains = weights_of("Float8CurrentScaling", torch.bfloat16), masters(PARTS["whole"], torch.float32)
    mains[0].fill_(0.0 if what == "zero" else torch.nan)
    write_fp8_weights(weights, mains, [0] * len(weights), group)
    assert weights[0]._scale_inv.item() == 1.0
    assert weights[0].dequantize().isnan().all() if what == "nan" else not weights[0].dequantize().any()
