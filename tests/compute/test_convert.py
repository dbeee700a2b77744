"""Converting layers in place: what is kept, what is left alone and why, and back again."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import (
    Conversion,
    LowPrecisionLinear,
    ReferenceBackend,
    convert_layers,
    is_converted,
    revert_layers,
)
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.patterns.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm
from nemo_lowprec.formats import E4M3

HALF = torch.bfloat16


def convert(model, scaling="current", half_backend=None, histories=None, **layers) -> Conversion:
    recipe = Recipe(scaling, fp8="e4m3")
    histories = new_histories(recipe) if histories is None else histories
    return convert_layers(model, HALF, recipe, ReferenceBackend(), half_backend, LayerFilter(**layers), histories)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 32, bias=False)
        self.rms = nn.RMSNorm(32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.rms(self.down(self.norm(self.up(x)))))


TOKENS = torch.arange(16).view(2, 8)


# What stays


def test_modules_parameters_and_names_stay_the_ones_they_were():
    model = Net()
    modules, params, state = dict(model.named_modules()), dict(model.named_parameters()), model.state_dict()
    result = convert(model)
    assert list(dict(model.named_modules())) == list(modules) and list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.modules(), modules.values(), strict=True))
    assert all(p is params[n] for n, p in model.named_parameters())
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert (result.low, result.norms, list(result.kept)) == (["up", "down"], ["norm", "rms"], ["head"])


def test_converted_layers_are_subclasses_of_what_they_were():
    model = Net()
    convert(model)
    assert type(model.up) is LowPrecisionLinear and isinstance(model.up, nn.Linear)
    assert type(model.norm) is LowPrecisionLayerNorm and isinstance(model.norm, nn.LayerNorm)
    assert type(model.rms) is LowPrecisionRMSNorm and isinstance(model.rms, nn.RMSNorm)
    assert type(model.head) is nn.Linear and is_converted(model)


def test_custom_attributes_buffers_and_training_mode_stay():
    model = Net().eval()
    model.up.note, model.up.weight.tag = "mine", {"lr": 0.1}
    model.up.register_buffer("steps", torch.zeros(1))
    convert(model)
    assert model.up.note == "mine" and model.up.weight.tag == {"lr": 0.1} and not model.up.training
    assert "up.steps" in model.state_dict()


def test_hooks_stay_and_are_called():
    model, called = Net(), []
    model.up.register_forward_pre_hook(lambda m, args: called.append("pre"))
    model.up.register_forward_hook(lambda m, args, out: called.append("forward"))
    model.up.register_full_backward_pre_hook(lambda m, grad: called.append("backward pre"))
    model.up.register_full_backward_hook(lambda m, gi, go: called.append("backward"))
    model.up.weight.register_hook(lambda grad: called.append("weight"))
    model.up.weight.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    model.up.register_state_dict_post_hook(lambda m, state, prefix, meta: called.append("state_dict"))
    model.up.register_load_state_dict_post_hook(lambda m, keys: called.append("load"))
    convert(model)
    model(TOKENS).sum().backward()
    model.load_state_dict(model.state_dict())
    assert sorted(called) == sorted(
        ["pre", "forward", "backward pre", "backward", "weight", "accumulated", "state_dict", "load"]
    )


def test_a_forward_hook_can_still_change_the_output():
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].register_forward_hook(lambda m, args, out: out * 0)
    convert(model)
    assert model(torch.ones(2, 32)).abs().sum() == 0


def test_two_layers_that_share_a_weight_stay_tied():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert convert(model).low == ["0", "1"]
    assert model[0].weight is model[1].weight and len(list(model.parameters())) == 3
    model(torch.randn(4, 32)).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad is not None


def test_a_head_that_is_tied_to_the_embedding_stays_tied_and_unconverted():
    model = Net()
    model.out, model.head = model.head, nn.Identity()  # a name that says nothing
    model.out.weight = model.embed.weight
    result = convert(model)
    assert result.kept == {"out": "the head (head='fp8' converts it)"}
    assert model.out.weight is model.embed.weight
    revert_layers(model)
    assert convert(model, convert=["out"]).low == ["out"] and model.out.weight is model.embed.weight


def test_a_module_with_two_parents_is_converted_once_for_both():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(nn.ReLU(), shared)})
    assert convert(model).low == ["a.0"]
    assert model["a"][0] is model["b"][1] is shared and type(shared) is LowPrecisionLinear


def test_a_model_that_is_a_single_layer_is_converted():
    layer = nn.Linear(32, 32)
    assert convert(layer, "delayed").low == [""] and isinstance(layer, LowPrecisionLinear)
    assert layer(torch.ones(1, 32)).shape == (1, 32)


def test_every_operand_but_the_weight_gets_a_column_of_the_histories():
    model, histories = Net(), new_histories(Recipe("delayed"))
    convert(model, "delayed", histories=histories)
    assert list(histories.slots) == [f"{n}.{k}" for n in ("up", "down") for k in ("input", "grad_output")]
    model(TOKENS).sum().backward()
    histories.update()
    assert not any(slot.cold for slot in histories.slots.values())


# What is left alone


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def lora(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1
    return layer


def old_weight_norm(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Linear(32, 40), "a side of 40 is no multiple of 16"),
        (lambda: nn.Linear(1, 32), "a side of 1 is no multiple of 16"),
        (lambda: Own(32, 32), "Own computes another function than x @ weight.T + bias"),
        (lambda: nn.LazyLinear(32), "not initialised yet"),
        (lambda: lora(nn.Linear(32, 32)), "Linear has a forward of its own"),
        (lambda: nn.Linear(32, 32).double(), "its weight is float64"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "its weight is computed",
        ),
        (lambda: old_weight_norm(nn.Linear(32, 32)), "its weight is computed"),
        (lambda: nn.utils.spectral_norm(nn.Linear(32, 32)), "its weight is computed"),
    ],
    ids=["size", "one", "subclass", "lazy", "patched", "float64", "parametrized", "weight_norm", "spectral_norm"],
)
def test_a_layer_that_cannot_be_converted_is_left_with_its_reason_and_never_stops_the_rest(layer, reason):
    odd = layer()
    kind = type(odd)
    model = nn.Sequential(nn.Linear(32, 32), odd, nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    result = convert(model, half_backend=ReferenceBackend())
    assert result.low == ["0", "2.0", "3"]
    assert list(result.kept) == ["1"] and result.kept["1"].startswith(reason)
    assert type(odd) is (kind if "side" not in reason else LowPrecisionLinear)
    assert result.half == (["1"] if "side" in reason else [])


def test_a_layer_that_was_left_alone_computes_as_before():
    odd = nn.Linear(32, 40).double()
    model = nn.Sequential(odd)
    x = torch.randn(2, 32, dtype=torch.float64)
    want = odd(x)
    convert(model, half_backend=ReferenceBackend())
    assert torch.equal(model(x), want)


def test_multihead_attention_is_converted_with_the_layers_around_it():
    model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    result = convert(model)
    assert result.low == ["self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"] and not result.kept
    assert result.norms == ["norm1", "norm2"]
    x = torch.randn(2, 5, 32)
    model(x).sum().backward()
    assert model.self_attn.out_proj.weight.grad is not None
    with torch.no_grad():
        assert torch.isfinite(model.eval()(x)).all()


@pytest.mark.parametrize(
    ("scaling", "multiple"), [("delayed", 16), ("rowwise", 16), ("blockwise", 16), ("mxfp8", 32), ("nvfp4", 32)]
)
def test_sizes_that_a_scaling_takes(scaling, multiple):
    model = nn.Sequential(nn.Linear(multiple, multiple), nn.Linear(multiple, multiple + multiple // 2))
    result = convert(model, scaling)
    assert result.low == ["0"] and "no multiple of" in result.kept["1"]


def test_without_a_recipe_nothing_becomes_fp8_and_norms_stay():
    model = Net()
    result = convert_layers(model, HALF, None, ReferenceBackend(), None, LayerFilter(), None)
    assert result == Conversion() and not is_converted(model)
    result = convert_layers(model, HALF, None, ReferenceBackend(), ReferenceBackend(), LayerFilter(), None)
    assert result.half == ["up", "down", "head"] and type(model.norm) is nn.LayerNorm


# Copies, and back


def test_a_deep_copy_works_and_is_independent():
    model, histories = Net(), new_histories(Recipe("delayed"))
    convert(model, "delayed", histories=histories)
    model(TOKENS).sum().backward()
    histories.update()
    copied = copy.deepcopy(model)
    want = model(TOKENS).detach()
    histories.discard()
    assert torch.equal(copied(TOKENS), want) and isinstance(copied.up, LowPrecisionLinear)
    assert histories.amax.abs().sum() == 0  # a copy records nothing into the model's histories
    with torch.no_grad():
        copied.up.weight.zero_()
    assert torch.equal(model(TOKENS), want)
    assert copied.up.gemm_plan.backend is model.up.gemm_plan.backend


def test_a_converted_model_can_be_pickled():
    model = Net()
    convert(model, "delayed")
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again.up, LowPrecisionLinear) and torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("half_backend", [None, ReferenceBackend()])
def test_revert_gives_back_class_attributes_and_behaviour(half_backend):
    model = Net()
    before, want = {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()}, model(TOKENS)
    convert(model, half_backend=half_backend)
    assert not torch.equal(model(TOKENS), want)
    revert_layers(model)
    assert not is_converted(model) and torch.equal(model(TOKENS), want)
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind and module.__dict__ == attributes
    revert_layers(model)  # nothing left to do
    assert convert(model).low == ["up", "down"]


def test_methods_of_a_converted_module_still_work():
    model = Net()
    convert(model)
    for name in ("up", "norm", "rms"):
        module = getattr(model, name)
        assert module.half() is module and module.weight.dtype == torch.float16
        assert module.float().weight.dtype == torch.float32
        module.reset_parameters()
        assert type(module).__name__ in repr(model)


def test_formats_of_the_operands_are_the_recipes():
    model = Net()
    convert(model, "delayed")
    assert all(operand.fmt is E4M3 for operand in model.up.gemm_plan.operands.values())
