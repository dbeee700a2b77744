"""The layers under adapters of PEFT: frozen, in FP8, merged, saved and unfrozen."""

import warnings

import pytest
import torch
from adapted_models import TOKENS, adapted, base_layers, llama, loss_of
from peft import LoraConfig, PeftModel, get_peft_model
from support import plugin
from torch import nn

from nemo_lowprec.compute import LowPrecisionLinear
from nemo_lowprec.compute.adapters import ADAPTER
from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.weights import master_of

CPU = torch.device("cpu")
CASES = [
    "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed",
    "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_mixed+fp8_params",
]  # fmt: skip
SOME = ["te_fp8", "msamp_o2", "bf16_with_fp8_mixed"]
CURRENT = "bf16_with_fp8_current_scaling_mixed"
DTYPES = [torch.float32, torch.bfloat16]
BYTES = {torch.float32: 4, torch.bfloat16: 2}


def start(case, model, **options):
    engine = plugin(case, **options).engine
    engine.convert(model, CPU)
    engine.settle()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine.attach(optimizer)
    return engine, optimizer


def steps(engine, model, optimizer, count=3):
    losses = []
    for tokens in TOKENS[:count]:
        with engine.forward_context():
            loss = loss_of(model, tokens)
        with engine.backward_context():
            engine.step.scale(loss).backward()
        engine.step.unscale(optimizer)
        engine.step.run(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def weights_of(model):
    return {name: layer.weight for name, layer in base_layers(model).items()}


def stored_bits(model):
    return {name: (w.data_fp8.view(torch.uint8).clone(), w.scale_inv.clone()) for name, w in weights_of(model).items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_base_takes_one_byte_and_the_adapters_stay_in_half_precision(case, dtype):
    model = adapted(dtype=dtype)
    before, values = {n: v.dtype for n, v in model.state_dict().items()}, state_of(model)
    engine, optimizer = start(case, model)
    steps(engine, model, optimizer, 2)
    for weight in weights_of(model).values():
        assert isinstance(weight, Fp8Weight) and weight.stored_bytes() == weight.numel() + 4
        assert weight.grad is None and master_of(weight) is None and weight not in optimizer.state
    kept = engine.columns.computation.conversion.kept
    assert {kept[name] for name in kept if "lora_" in name} == {ADAPTER}
    for name, module in model.named_modules():
        if ".lora_" in name and isinstance(module, nn.Linear):
            assert not isinstance(module, LowPrecisionLinear) or module.gemm_plan.recipe is None
    # The file has the names and dtypes that the model came with, and gives the same bits again.
    saved, bits = state_of(model), stored_bits(model)
    assert saved.keys() == before.keys()
    assert {n: v.dtype for n, v in saved.items() if "base_layer" in n} == {
        n: d for n, d in before.items() if "base_layer" in n
    }
    for state in (saved, values):  # loading the values of before rounds them to the same numbers
        model.load_state_dict(state)
        for name, (data, scale_inv) in stored_bits(model).items():
            assert torch.equal(data, bits[name][0]) and torch.equal(scale_inv, bits[name][1])
    model.load_state_dict(saved)
    engine.revert()
    for name, layer in base_layers(model).items():
        assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.dtype == dtype
        assert torch.equal(layer.weight, saved[f"{name}.weight"])
    engine.convert(model, CPU)
    engine.settle()
    for name, (data, scale_inv) in stored_bits(model).items():
        assert torch.equal(data, bits[name][0]) and torch.equal(scale_inv, bits[name][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_are_those_of_a_base_in_half_precision(dtype):
    losses = {}
    for frozen in ("half", "fp8", "auto"):
        model = adapted(dtype=dtype)
        losses[frozen] = steps(*(lambda e, o, m=model: (e, m, o))(*start(CURRENT, model, frozen=frozen)))
        assert all(isinstance(w, Fp8Weight) == (frozen != "half") for w in weights_of(model).values())
    assert losses["half"] == losses["fp8"] == losses["auto"]


@pytest.mark.parametrize("case", SOME)
def test_other_frozen_weights_are_in_fp8_where_they_are_asked_to(case):
    for frozen in ("auto", "fp8"):
        model = llama(torch.bfloat16, layers=2)
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
        engine, optimizer = start(case, model, frozen=frozen)
        first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
        assert (isinstance(first, Fp8Weight) and first.is_frozen) == (frozen == "fp8")
        assert not (isinstance(second, Fp8Weight) and second.is_frozen)
        assert not isinstance(model.model.embed_tokens.weight, Fp8Weight)
        losses = steps(engine, model, optimizer)
        assert losses[-1] < losses[0] and first.grad is None


@pytest.mark.parametrize("case", SOME)
def test_the_base_keeps_no_input_for_backward(case):
    sizes = {False: [], True: []}
    for trained, saved in sizes.items():
        model = adapted(dtype=torch.bfloat16)
        if trained:
            for layer in base_layers(model).values():
                layer.requires_grad_(True)
        engine, _ = start(case, model, frozen="half")
        layer = next(iter(base_layers(model).values()))
        note = lambda tensor, saved=saved: saved.append(tensor.shape) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), engine.forward_context():
            layer(torch.randn(4, 48, 32, dtype=torch.bfloat16, requires_grad=True))
    rows = 4 * 48
    assert any(rows in shape for shape in sizes[True]) and not any(rows in shape for shape in sizes[False])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("case", SOME)
def test_merging_adds_to_the_exact_values_and_unmerging_takes_away(case, method, dtype):
    model = adapted(method, dtype)
    engine, optimizer = start(case, model)
    steps(engine, model, optimizer)
    before = state_of(model)
    # What PEFT merges in FP32 from the same values.
    plain = adapted(method)
    plain.load_state_dict({name: value.float() for name, value in before.items()})
    plain.merge_adapter()
    want = {name: weight.detach() for name, weight in weights_of(plain).items()}
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        # The delta is rounded to half precision as the adapters are, and the sum to the dtype of the base.
        for name, weight in weights_of(model).items():
            value = model.state_dict()[f"{name}.weight"]
            assert isinstance(weight, Fp8Weight) and value.dtype == dtype
            assert torch.allclose(value.float(), want[name], atol=0.012)
            assert torch.equal(value.to(weight.dtype), weight + 0)  # any operation reads the exact values
        model.unmerge_adapter()
        for name, weight in weights_of(model).items():
            assert torch.allclose(weight.float(), before[f"{name}.weight"].float(), atol=0.012)
    steps(engine, model, optimizer, 1)
    merged = model.merge_and_unload()
    exported = state_of(merged)
    engine.revert()
    for module in merged.modules():
        if isinstance(module, nn.Linear):
            assert type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype == dtype
    assert {name: torch.equal(v, exported[name]) for name, v in merged.state_dict().items()} == dict.fromkeys(
        exported, True
    )
    llama(dtype).load_state_dict(exported)  # the names of the model without adapters


@pytest.mark.parametrize("case", SOME)
def test_a_saved_adapter_goes_on_where_it_was(case, tmp_path):
    whole = adapted()
    engine, optimizer = start(case, whole)
    steps(engine, whole, optimizer)
    whole.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    loaded = PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    other, _ = start(case, loaded)
    with torch.no_grad():
        with engine.forward_context():
            want = loss_of(whole, TOKENS[0]).item()
        with other.forward_context():
            got = loss_of(loaded, TOKENS[0]).item()
    assert got == pytest.approx(want, abs=0.05)  # amax histories start anew with the second engine
    names = {name for name in whole.state_dict() if "lora_" in name}
    a, b = whole.state_dict(), loaded.state_dict()
    assert names and all(torch.equal(a[name].float(), b[name].float()) for name in names)


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_unfrozen_are_trained_from_their_rounded_values(case):
    model = adapted()
    engine, optimizer = start(case, model)
    steps(engine, model, optimizer, 2)
    name, layer = next(iter(base_layers(model).items()))
    before = model.state_dict()[f"{name}.weight"].clone()
    layer.requires_grad_(True)
    optimizer.add_param_group({"params": [layer.weight]})
    said = "stored in FP8 while frozen, and from now on trained from the rounded"
    with pytest.warns(UserWarning, match=said), engine.forward_context():
        pass
    # MS-AMP keeps a matrix in FP16.
    assert torch.allclose(model.state_dict()[f"{name}.weight"].float(), before.float(), rtol=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "stored in FP8")
        steps(engine, model, optimizer, 2)
    assert not (isinstance(layer.weight, Fp8Weight) and layer.weight.is_frozen)
    assert not torch.equal(model.state_dict()[f"{name}.weight"].float(), before.float())
    assert layer.weight in optimizer.state
    engine.revert()
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize("case", ["te_fp8", "msamp_o2", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed"])
def test_adapters_on_converted_names_are_refused(case):
    model = llama()
    engine, _ = start(case, model)
    with pytest.raises(ValueError, match="add adapters on names of a converted model before it is converted"):
        get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    engine.revert()
    get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear"))


def test_a_second_adapter_may_come_later():
    model = adapted()
    engine, _ = start("bf16_with_fp8_mixed", model)
    model.add_adapter("second", LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("second")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine.attach(optimizer)
    losses = steps(engine, model, optimizer, 6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("convert", [["*.lora_A.default"], ["*lora_*"]])
def test_convert_cannot_name_adapters(convert):
    with pytest.raises(ValueError, match="which is an adapter of PEFT: adapters stay in half precision"):
        start("bf16_with_fp8_mixed", adapted(), convert=convert)


@pytest.mark.parametrize("convert", [["*.q_proj"], ["*.q_proj.base_layer"], lambda name, module: "q_proj" in name])
def test_a_name_stands_for_the_layer_that_an_adapter_wraps(convert):
    engine, _ = start("bf16_with_fp8_mixed", adapted(), convert=convert)
    assert engine.columns.computation.conversion.low == ["base_model.model.model.layers.0.self_attn.q_proj.base_layer"]


@pytest.mark.parametrize("target", ["adapter", "copy"])
def test_a_head_under_an_adapter_is_a_head(target):
    how = {"target_modules": ["q_proj", "lm_head"]} if target == "adapter" else {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]
    }  # fmt: skip
    for head in ("half", "fp8"):
        model = get_peft_model(llama(), LoraConfig(r=8, **how))
        conversion = start("bf16_with_fp8_mixed", model, head=head)[0].columns.computation.conversion
        assert any("lm_head" in name for name in conversion.low) == (head == "fp8")


@pytest.mark.parametrize("level", ["bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_mixed"])
def test_levels_that_read_no_such_weights_take_no_such_argument(level):
    with pytest.raises(TypeError, match=f"{level} takes no 'frozen'. Levels that do: te_fp8, msamp_o1"):
        plugin(level, frozen="fp8")
    with pytest.raises(ValueError, match="frozen='bf16' must be one of: auto, half, fp8"):
        plugin("te_fp8", frozen="bf16")


def test_an_overridden_gemm_would_lose_bits():
    model = adapted()
    start("bf16_with_fp8_mixed", model, override_linear_precision=(True, False, False))
    assert not any(isinstance(w, Fp8Weight) for w in weights_of(model).values())
