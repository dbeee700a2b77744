"""LoRA whose second GEMM adds to the output of the wrapped layer, beside PEFT's own forward."""

import copy
import pickle

import pytest
import torch
from adapted_models import TOKENS, adapted, loss_of
from peft import LoraConfig
from peft.tuners.lora import Linear
from support import plugin

from nemo_lowprec.compute import lora
from nemo_lowprec.compute.lora import NAME, AddedLora

CPU = torch.device("cpu")
LEVELS = ["te_fp8", "msamp_o2", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed", "bf16_with_fp8_subchannel_scaling_mixed"]


def start(level, **options):
    model = adapted(**options)
    engine = plugin(level).engine
    engine.convert(model, CPU)
    engine.settle()
    with torch.no_grad():  # a new adapter adds nothing
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)) / 20)
    return engine, model


def layers(model):
    return [module for module in model.modules() if isinstance(module, Linear)]


@pytest.fixture
def calls(monkeypatch):
    """How often an adapter's GEMM has added to an output."""
    seen, add = [], lora._Add.apply
    monkeypatch.setattr(lora._Add, "apply", lambda *args: seen.append(1) or add(*args))
    return seen


def gradients(engine, model, tokens=TOKENS[0]):
    with engine.forward_context():
        loss = loss_of(model, tokens)
    with engine.backward_context():
        loss.backward()
    found = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize("level", LEVELS)
def test_loss_and_gradients_are_those_of_pefts_forward(level, calls, monkeypatch):
    engine, model = start(level, layers=2)
    assert all(isinstance(layer, AddedLora) for layer in layers(model))
    assert set(engine.columns.computation.conversion.fused.values()) >= {NAME}
    loss, found = gradients(engine, model)
    assert len(calls) == 14
    other, plain = start(level, layers=2)
    monkeypatch.setattr(lora, "_only_adapter", lambda layer: None)
    want_loss, want = gradients(other, plain)
    assert len(calls) == 14 and found.keys() == want.keys() and len(want) == 28
    assert loss == pytest.approx(want_loss, abs=0.02)
    for name, grad in want.items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), found[name].flatten(), dim=0) > 0.97, name
        assert found[name].norm() == pytest.approx(grad.norm().item(), rel=0.1), name


def test_one_layer_to_the_last_bit_but_one(calls):
    engine, model = start("bf16_with_fp8_mixed")
    layer = layers(model)[0]
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    with engine.forward_context():
        got = layer(x)
        base, hidden = layer.base_layer(x), layer.lora_A["default"](x)
    weight = layer.lora_B["default"].weight.float()
    want = base.float() + hidden.float() @ weight.t() * layer.scaling["default"]
    assert len(calls) == 1 and got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want, rtol=2**-7, atol=1e-3)
    seed = torch.randn_like(got)
    d_hidden, d_weight = torch.autograd.grad(got, [hidden_of := layer.lora_A["default"].weight,
                                                   layer.lora_B["default"].weight], seed)  # fmt: skip
    rows, scaling = seed.flatten(0, 1).float(), layer.scaling["default"]
    assert torch.allclose(d_weight, scaling * rows.t() @ hidden.flatten(0, 1).float(), rtol=0.02, atol=0.05)
    want_a = scaling * (rows @ weight).t() @ x.flatten(0, 1).float()
    assert torch.allclose(d_hidden, want_a, rtol=0.02, atol=0.05) and d_hidden.dtype == hidden_of.grad_dtype


def run_disabled(model, run):
    with model.disable_adapter():
        return run()


def run_merged(model, run):
    model.merge_adapter()
    out = run()
    model.unmerge_adapter()
    return out


def run_two(model, run):
    model.add_adapter("second", LoraConfig(r=4, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "second"])
    return run()


def run_hooked(model, run):
    for layer in layers(model):
        layer.lora_B["default"].register_forward_hook(lambda module, args, out: out)
    return run()


def run_kept(model, run):
    outs = []
    for layer in layers(model):
        layer.base_layer.register_forward_hook(lambda module, args, out: outs.append((out, out._version)))
    logits = run()
    assert outs and all(out._version == version for out, version in outs)
    return logits


@pytest.mark.parametrize("how", [run_disabled, run_merged, run_two, run_hooked, run_kept])
def test_what_is_not_plain_lora_is_computed_by_peft(how, calls):
    engine, model = start("bf16_with_fp8_mixed")

    def run():
        with engine.forward_context():
            return model(input_ids=TOKENS[0]).logits

    out = how(model, run)
    assert not calls and out.isfinite().all()


def test_dora_and_levels_without_fp8_are_pefts(calls):
    for level, method in (("bf16_with_fp8_mixed", "dora"), ("bf16_mixed", "lora")):
        gradients(*start(level, method=method))
    assert not calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers(reentrant, calls):
    engine, model = start("bf16_with_fp8_current_scaling_mixed", layers=2)
    want_loss, want = gradients(engine, model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss, found = gradients(engine, model.train())
    assert len(calls) == 3 * 14 and loss == want_loss
    assert all(torch.equal(found[name], grad) for name, grad in want.items())


def test_gradients_are_differentiated_again(calls, monkeypatch):
    found = []
    for ours in (True, False):
        engine, model = start("bf16_with_fp8_mixed")
        if not ours:
            monkeypatch.setattr(lora, "_only_adapter", lambda layer: None)
        layer = layers(model)[0]
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        with engine.forward_context():
            grads = torch.autograd.grad(layer(x).float().square().sum(), [*weights, x], create_graph=True)
            sum(grad.float().square().sum() for grad in grads).backward()
        found.append([weight.grad.float().flatten() for weight in weights])
    assert len(calls) == 1
    for mine, want in zip(*found, strict=True):
        assert torch.nn.functional.cosine_similarity(mine, want, dim=0) > 0.99


def test_the_class_is_given_back_and_copied():
    engine, model = start("bf16_with_fp8_mixed")
    twin = pickle.loads(pickle.dumps(type(layers(model)[0])))
    assert twin is type(layers(model)[0])
    assert all(isinstance(layer, AddedLora) for layer in layers(copy.deepcopy(model)))
    engine.revert()
    assert {type(layer) for layer in layers(model)} == {Linear}
