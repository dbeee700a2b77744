"""Cross entropy over a head's half logits: what torch computes from their FP32 copy, without the copy."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, logits, revert_layers
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.logits import MIN_CLASSES, Logits, give_logits
from nemo_lowprec.compute.operands import new_histories

HALF, CLASSES = torch.bfloat16, MIN_CLASSES
TARGETS = torch.randint(CLASSES, (2, 7), generator=torch.Generator().manual_seed(0))
TARGETS[0, 3] = TARGETS[1, 6] = -100


def head(bias=True):
    torch.manual_seed(0)
    return nn.Linear(16, CLASSES, bias=bias).to(HALF)


def fused_head():
    layer = head()
    give_logits(layer, ReferenceBackend())
    return layer


def inputs():
    return (torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)) * 4).to(HALF).requires_grad_()


@pytest.fixture
def calls(monkeypatch):
    """How often the loss was computed from half logits."""
    seen = []
    whole = logits.half_cross_entropy
    monkeypatch.setattr(logits, "half_cross_entropy", lambda *args: seen.append(1) or whole(*args))
    return seen


FUSED = {
    "autocast casts": lambda y, t: F.cross_entropy(y.view(-1, CLASSES), t.view(-1)),
    "float first": lambda y, t: F.cross_entropy(y.float().view(-1, CLASSES), t.view(-1)),
    "float last": lambda y, t: F.cross_entropy(y.flatten(0, -2).float(), t.flatten()),
    "to": lambda y, t: F.cross_entropy(y.to(torch.float32).reshape(-1, CLASSES), t.flatten()),
    "to dtype": lambda y, t: F.cross_entropy(y.to(dtype=torch.float32).flatten(0, 1), t.flatten()),
    "shifted": lambda y, t: F.cross_entropy(
        y.float()[..., :-1, :].contiguous().view(-1, CLASSES), t[..., 1:].reshape(-1)
    ),
    "half shifted": lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), t[:, 1:].flatten()),
    "every second": lambda y, t: F.cross_entropy(y.view(-1, CLASSES)[::2], t.view(-1)[::2]),
    "sum": lambda y, t: F.cross_entropy(y.float().flatten(0, 1), t.flatten(), reduction="sum") / 12,
    "none": lambda y, t: (
        (F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none") * torch.arange(14)).sum() / 40
    ),
    "another index": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.clamp(min=3).flatten(), ignore_index=3),
    "module": lambda y, t: nn.CrossEntropyLoss()(y.view(-1, CLASSES), t.view(-1)),
}  # fmt: skip
PLAIN = {
    "label smoothing": lambda y, t: F.cross_entropy(y.float().flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weights": lambda y, t: F.cross_entropy(
        y.float().flatten(0, 1), t.flatten(), weight=torch.linspace(0.5, 2, CLASSES)
    ),
    "probabilities": lambda y, t: F.cross_entropy(y.float(), torch.full((2, 7, CLASSES), 1 / CLASSES).transpose(1, 2)[
        :, :CLASSES].transpose(1, 2).softmax(1).to(torch.float32)),
    "dimensions": lambda y, t: F.cross_entropy(y.float().transpose(1, 2), t),
    "log softmax": lambda y, t: F.nll_loss(y.float().log_softmax(-1).flatten(0, 1), t.flatten()),
    "scaled in place": lambda y, t: F.cross_entropy(y.float().mul_(0.5).flatten(0, 1), t.flatten()),
}  # fmt: skip


def results(layer, loss):
    x = inputs()
    with torch.autocast("cpu", HALF):
        value = loss(layer(x), TARGETS)
    value.backward()
    return [value, x.grad, layer.weight.grad, layer.bias.grad]


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape and type(g) is type(w)
        scale = w.detach().float().abs().max().item()
        torch.testing.assert_close(g.float(), w.float(), rtol=8e-3, atol=8e-3 * scale)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_losses_over_half_logits(name, calls):
    got = results(fused_head(), FUSED[name])
    assert len(calls) == 1
    assert_close(got, results(head(), FUSED[name]))


@pytest.mark.parametrize("name", PLAIN)
def test_any_other_loss_is_torchs(name, calls):
    got, want = results(fused_head(), PLAIN[name]), results(head(), PLAIN[name])
    assert not calls
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_without_autocast_half_logits_keep_a_half_loss(calls):
    layer, x = fused_head(), inputs()
    assert F.cross_entropy(layer(x).flatten(0, 1), TARGETS.flatten()).dtype == HALF and not calls
    assert F.cross_entropy(layer(x).flatten(0, 1).float(), TARGETS.flatten()).dtype == torch.float32 and calls


def test_no_target_at_all_is_nan_as_in_torch():
    layer, none = fused_head(), torch.full((14,), -100)
    loss = F.cross_entropy(layer(inputs()).float().flatten(0, 1), none)
    assert loss.isnan()


def test_infinite_logits_of_forbidden_classes(calls):
    def loss(y, t):
        forbidden = torch.arange(CLASSES) % 2 == 1
        return F.cross_entropy(y.masked_fill(forbidden, float("-inf")).float().flatten(0, 1), (t // 2 * 2).flatten())

    assert_close(results(fused_head(), loss), results(head(), loss))


def float_logits():
    layer, x = fused_head(), inputs()
    return layer, x, layer(x).float()


def test_what_is_asked_of_fp32_logits():
    _, _, y = float_logits()
    assert type(y) is Logits and y.dtype == torch.float32 and y.shape == (2, 7, CLASSES) and len(y) == 2
    assert y.requires_grad and not y.is_leaf and y.grad_fn is not None and y.size(-1) == CLASSES and y.dim() == 3
    assert y._read is None
    assert y.max().dtype == torch.float32 and y._read is not None


def test_values_are_computed_once_and_shared_by_views(calls):
    layer, x, y = float_logits()
    want = layer(x).as_subclass(torch.Tensor).float()
    view = y.view(-1, CLASSES)
    assert type(view) is Logits and view._read is None
    y.mul_(2)
    assert torch.equal(view.detach(), (want * 2).view(-1, CLASSES).detach())
    F.cross_entropy(view, TARGETS.flatten()).backward()
    assert not calls  # the values were changed
    grad, x.grad = x.grad, None
    F.cross_entropy((want * 2).flatten(0, 1), TARGETS.flatten()).backward()
    assert torch.equal(grad, x.grad)


def test_half_logits_that_change_behind_their_fp32_form_are_an_error():
    layer, x = fused_head(), inputs()
    half = layer(x)
    y = half.float()
    half.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum()


class Squared(torch.autograd.Function):
    """A function of the user's, to which subclasses say nothing."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_a_users_function_gets_values_and_gives_gradients():
    layer, x, y = float_logits()
    Squared.apply(y).sum().backward()
    grad, x.grad = x.grad, None
    Squared.apply(layer(x).as_subclass(torch.Tensor).float()).sum().backward()
    assert torch.equal(grad, x.grad)


def test_without_autograd_logits_are_plain(calls):
    layer, x = fused_head(), inputs()
    with torch.no_grad(), torch.autocast("cpu", HALF):
        y = layer(x)
        assert type(y) is torch.Tensor and F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()).dtype == torch.float32
    y = layer(x)
    assert type(y) is Logits
    with torch.no_grad():
        assert type(y.float()) is torch.Tensor and type(y.argmax(-1)) is torch.Tensor and type(y + 1) is torch.Tensor
    with torch.inference_mode():
        assert type(layer(x)) is torch.Tensor
    assert not calls


def test_metrics_read_values_beside_the_loss(calls):
    layer, x = fused_head(), inputs()
    with torch.autocast("cpu", HALF):
        y = layer(x)
        loss = F.cross_entropy(y.float().flatten(0, 1), TARGETS.flatten())
    hits = (y.float().argmax(-1) == TARGETS).sum()
    assert y.detach().float().numpy().shape == y.shape and torch.equal(hits, (y.argmax(-1) == TARGETS).sum())
    loss.backward()
    assert len(calls) == 1


@pytest.mark.parametrize("of", [lambda y: y.detach(), lambda y: y, lambda y: y.float(), lambda y: y.float().detach()])
def test_saved_logits_are_plain_tensors(of):
    y, file = of(fused_head()(inputs())), io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    back = torch.load(file)
    assert type(back) is torch.Tensor and torch.equal(back, y.detach())


def test_second_derivatives_and_batched_gradients():
    found = []
    for layer in (fused_head(), head()):
        x = inputs()
        loss = F.cross_entropy(layer(x).float().flatten(0, 1), TARGETS.flatten(), reduction="none")
        many = torch.autograd.grad(loss, x, torch.eye(14)[:3], is_grads_batched=True, retain_graph=True)[0]
        (first,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().pow(2).sum(), x)
        found.append([many, first, second])
    for g, w in zip(*found, strict=True):
        torch.testing.assert_close(g.float(), w.float(), rtol=2e-2, atol=2e-2 * w.float().abs().max().item())


@pytest.mark.parametrize("whole", [True, False], ids=["head and loss", "loss"])
@pytest.mark.parametrize("upcast", [True, False])
def test_compiled_losses(whole, upcast, calls):
    torch._dynamo.reset()
    layer, x = fused_head(), inputs()

    def loss(y):
        return F.cross_entropy((y.float() if upcast else y).flatten(0, 1).float(), TARGETS.flatten())

    if whole:
        got = torch.compile(lambda x: loss(layer(x)), backend="aot_eager", fullgraph=True)(x)
    else:
        got = torch.compile(loss, backend="aot_eager")(layer(x).float() if upcast else layer(x))
    assert len(calls) == (0 if whole else 1)
    got.backward()
    grad, x.grad = x.grad, None
    want = loss(layer(x))
    want.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad.float(), x.grad.float(), rtol=2e-2, atol=1e-4)


def test_small_heads_stay():
    layer = nn.Linear(16, 1000)
    give_logits(layer, ReferenceBackend())
    assert type(layer) is nn.Linear


def convert(model, **layers) -> Conversion:
    recipe = Recipe("delayed")
    return convert_layers(
        model, HALF, recipe, ReferenceBackend(), None, LayerFilter(**layers), new_histories(recipe)
    )  # fmt: skip


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize("head", ["half", "fp8"])
def test_the_head_of_a_model_of_transformers(head, calls):
    model = llama()
    own = type(model.lm_head)
    plain = copy.deepcopy(model)
    assert ("lm_head" in convert(model, head=head).low) == (head == "fp8")
    convert(plain, head=head)
    plain.lm_head.__class__ = type(plain.lm_head).__mro__[2]  # without LogitsHead
    tokens = TARGETS.clamp(min=0)
    losses = []
    for one in (model, plain):
        with torch.autocast("cpu", HALF):
            losses.append(one(input_ids=tokens, labels=TARGETS).loss)
        losses[-1].backward()
    assert len(calls) == 1
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    for p, w in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, w.grad, rtol=5e-2, atol=5e-2 * w.grad.abs().max().item())
    revert_layers(model)
    assert type(model.lm_head) is own


def test_a_head_in_skip_is_left_alone():
    model = llama()
    convert(model, skip=("lm_head",))
    assert type(model.lm_head) is nn.Linear
