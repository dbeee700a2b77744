"""What norms, activations and gated MLPs keep for backward (``activations``): values, gradients, bytes, parity."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import FP8_LEVELS, Fp8Weight, Fp16Weight, plugin
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import GemmaConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaMLP

from nemo_lowprec.chart import CHART
from nemo_lowprec.compute import ReferenceBackend
from nemo_lowprec.compute.keeping import find_gated, keep_less
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.engine import Engine
from nemo_lowprec.tensors import GradientTensor

CHOICES = ["fp8", "recompute", "fp8+recompute"]
D, HEADS, SIXTEENTH = 128, 2, 2.0**-4
BACKEND = ReferenceBackend()


class Attention(nn.Module):
    """As timm's."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, D))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * D, D)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class OwnNorm(nn.LayerNorm):
    """As timm's: a class of its own, which is not converted and returns FP32 under a GPU's autocast."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(D), Attention(), norm(D), Mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, blocks=2, norm=nn.LayerNorm):
        super().__init__()
        self.patches = nn.Linear(48, D)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(blocks))
        self.norm, self.head = norm(D), nn.Linear(D, 16)
        self.recompute = None

    def forward(self, x):
        x = self.patches(x)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x).mean(1))

    def loss(self, x, y):
        return F.cross_entropy(self(x).float(), y)


class Llama(LlamaForCausalLM):
    def __init__(self, blocks=2):
        super().__init__(
            LlamaConfig(
                hidden_size=D, intermediate_size=384, num_hidden_layers=blocks, num_attention_heads=HEADS,
                num_key_value_heads=HEADS, vocab_size=64, attn_implementation="sdpa",
            )
        )  # fmt: skip

    def loss(self, x, y):
        return self(input_ids=x, labels=y).loss


def images(tokens=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(16, (4,), generator=generator)
    means = torch.randn(16, 1, 48, generator=torch.Generator().manual_seed(0))
    return means[y] + torch.randn(4, tokens, 48, generator=generator), y


def text(tokens=32, seed=1):
    start = torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(seed))
    x = (start + 5 * torch.arange(tokens)) % 64
    return x, x


def start(activations, case="bf16_with_fp8_mixed", make=ViT, **options):
    torch.manual_seed(0)
    model = make()
    engine = plugin(case, activations=activations, **options).engine
    engine.convert(model, torch.device("cpu"))
    engine.settle()
    return model, engine


def plain(t):
    return t.dequantize() if isinstance(t, GradientTensor) else t


def gradients(model, engine, batch=None, passes=1):
    for _ in range(passes):
        model.zero_grad()
        with engine.forward_context():
            loss = model.loss(*(batch or images()))
        with engine.backward_context():
            engine.step.scale(loss).backward()
    return [plain(p.grad).float().clone() for p in model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# What is kept


@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 384), (7, 3), (4, 130), (2, 3, 4, 56)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_come_back_within_a_sixteenth(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 6, shape).float())).to(dtype)
    x.view(-1)[::7] = 0
    data, exponents = BACKEND.compress(x)
    assert data.dtype == torch.float8_e4m3fn and data.shape == x.shape
    assert exponents.dtype == torch.uint8 and exponents.shape == (x.numel() // shape[-1], -(-shape[-1] // 128))
    back = BACKEND.decompress([data, exponents], dtype)
    assert back.dtype == dtype and back.shape == x.shape
    amax = F.pad(x.float().abs(), (0, -shape[-1] % 128)).unflatten(-1, (-1, 128)).amax(-1)
    amax = amax.repeat_interleave(128, -1)[..., : shape[-1]]
    error = (back.float() - x.float()).abs()
    # E4M3's subnormals begin 2**-14 and more below a block's largest value.
    assert (error <= torch.maximum(x.float().abs() * SIXTEENTH, amax * 2.0**-17)).all()
    assert (back[x == 0] == 0).all() and error.any()


def test_a_value_that_is_not_finite_makes_a_nan():
    x = torch.ones(2, 128)
    x[0, 3], x[1, 5] = math.inf, math.nan
    back = BACKEND.decompress(BACKEND.compress(x), torch.float32)
    assert back.isnan().nonzero().tolist() == [[0, 3], [1, 5]] and (back.nan_to_num(1.0) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_values_stay_finite(dtype):
    x = torch.full((2, 128), torch.finfo(dtype).max, dtype=dtype)
    back = BACKEND.decompress(BACKEND.compress(x), dtype)
    assert (back.double() <= x.double()).all() and (back.double() >= 0.93 * x.double()).all()


def keeping(module, fp8=True, again=False):
    norms = [name for name, m in module.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    keep_less(module, Keeps(BACKEND, fp8, again), norms, find_gated(module))
    return module


def of(module, x, grad):
    x = x.detach().requires_grad_()
    out = module(x)
    params = list(module.parameters())
    return out, torch.autograd.grad(out, [x, *params], grad)


MODULES = {
    "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU, "mish": nn.Mish,
    "layer_norm": lambda: nn.LayerNorm(256), "no affine": lambda: nn.LayerNorm(256, elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(256, eps=1e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_at_the_values_that_were_kept(name, dtype):
    torch.manual_seed(0)
    module = nn.Sequential(MODULES[name]()).to(dtype)
    x, grad = torch.randn(2, 9, 256, dtype=dtype) * 2, torch.randn(2, 9, 256, dtype=dtype)
    out, want = of(module, x, grad)
    rounded = BACKEND.decompress(BACKEND.compress(x), dtype)
    _, expected = of(module, rounded, grad)
    got_out, got = of(keeping(copy.deepcopy(module)), x, grad)
    assert torch.equal(out, got_out)  # forward sees the exact values
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for a, b in zip(got[:2], want[:2], strict=True):  # of the input and the weight; a bias has the same
        assert 0 < (a - b).float().norm() / b.float().norm() < SIXTEENTH
    _, exact = of(keeping(copy.deepcopy(module), fp8=False), x, grad)
    assert all(torch.equal(a, b) for a, b in zip(exact, want, strict=True))


def test_the_error_of_gelus_gradient_is_bounded_by_the_formats():
    x, grad = torch.linspace(-6, 6, 4096).view(2, 16, 128), torch.randn(2, 16, 128)
    _, (want,) = of(nn.GELU(), x, grad)
    _, (got,) = of(keeping(nn.Sequential(nn.GELU())), x, grad)
    steepest = math.sqrt(2 / math.pi)  # of the derivative
    assert ((got - want).abs() <= grad.abs() * steepest * x.abs() * SIXTEENTH + 1e-5).all()


def test_a_layer_norms_statistics_follow_the_kept_values():
    """Gradients are orthogonal to constants and to the kept input, as a norm's are to its own."""
    x, grad = torch.randn(4, 256) * 3 + 1, torch.randn(4, 256)
    _, (dx, *_) = of(keeping(nn.Sequential(nn.LayerNorm(256, elementwise_affine=False))), x, grad)
    rounded = BACKEND.decompress(BACKEND.compress(x), torch.float32)
    for other in (torch.ones(4, 256), rounded):
        assert ((dx * other).sum(-1).abs() < 1e-3).all()


# Gated MLPs


class Gated(nn.Module):
    def __init__(self, formula="act(a) * b", bias=False):
        super().__init__()
        self.w1, self.w2 = nn.Linear(32, 48, bias), nn.Linear(32, 48, bias)
        self.w3, self.act, self.formula = nn.Linear(48, 32, bias), nn.SiLU(), formula

    def forward(self, x):
        a, b, act = self.w1(x), self.w2(x), self.act
        hidden = {"act(a) * b": lambda: act(a) * b, "b * act(a)": lambda: b * act(a), "a * act(b)": lambda: a * act(b)}
        hidden |= {"act(a) + b": lambda: act(a) + b, "act(a * b)": lambda: act(a * b)}
        return self.w3(hidden[self.formula]())


def test_gated_mlps_are_found_by_what_they_compute():
    def found(module):
        match = find_gated(nn.Sequential(module)).get("0")
        if match is None:
            return None
        plan = match.settings["gated"]
        gate, up = plan.linears if plan.gate_first else plan.linears[::-1]
        return gate, up, plan.down, plan.act[0]

    for bias in (False, True):
        assert found(Gated("act(a) * b", bias)) == found(Gated("b * act(a)", bias)) == ("w1", "w2", "w3", "act")
        assert found(Gated("a * act(b)", bias)) == ("w2", "w1", "w3", "act")
        assert found(Gated("act(a) + b", bias)) is None and found(Gated("act(a * b)", bias)) is None
    gemma = GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=24))
    assert found(gemma) == ("gate_proj", "up_proj", "down_proj", "act_fn")
    with torch.device("meta"):
        meta = Gated()
        assert found(meta) is not None
    assert found(meta) is not None
    hooked = Gated()
    hooked.w1.forward = hooked.w1.forward
    assert found(hooked) is None


def test_a_gated_mlp_keeps_its_hooks_and_its_bits():
    torch.manual_seed(0)
    module = Gated()
    x, grad = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    out, want = of(module, x, grad)
    exact = keeping(copy.deepcopy(module), fp8=False)
    got_out, got = of(exact, x, grad)
    assert torch.equal(out, got_out) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    calls = []
    for child in exact.children():
        child.register_forward_hook(lambda m, *_: calls.append(m))
    assert torch.equal(exact(x), out) and len(calls) == 4
    of(exact, x, grad)
    assert len(calls) == 8  # an activation with a hook is called as it was
    _, rounded = of(keeping(copy.deepcopy(module)), x, grad)
    for a, b in zip(rounded, want, strict=True):
        assert 0 < (a - b).norm() / b.norm() < SIXTEENTH or torch.equal(a, b)
    module.w1.weight.requires_grad_(False)
    frozen = keeping(module)
    frozen(x).sum().backward()  # the gate has no gradient
    assert frozen.w1.weight.grad is None and frozen.w2.weight.grad is not None


# Bytes


def kept_bytes(activations, make, batch, blocks, tokens):
    model, engine = start(activations, make=lambda: make(blocks))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, alive = {}, []

    def pack(t):
        parts = t.parts() if isinstance(t, Fp8Weight | Fp16Weight) else (t,)
        sizes.update({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts})
        alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), engine.forward_context():
        model.loss(*batch(tokens))
    return sum(size for key, size in sizes.items() if key not in known)


def bytes_of_a_token(activations, make, batch):
    """What one more block keeps of one more token."""
    (a, b), (c, d) = [[kept_bytes(activations, make, batch, n, t) for t in (32, 64)] for n in (1, 2)]
    return (d - c - (b - a)) / (4 * 32)


SCALES = D / 128  # bytes of the exponents of D features
ATTENTION = 8 * D + 4 * HEADS  # q, k, v, the output and the logarithms of the sums


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        # norms (with statistics), inputs of qkv, proj and fc1, GELU, input of fc2
        (None, 2 * (2 * D + 4) + 3 * D + ATTENTION + 8 * D + 4 * D),
        ("fp8", 2 * (D + SCALES) + 2 * D + ATTENTION + 4 * (D + SCALES) + 4 * D),
        ("recompute", 2 * 2 * D + ATTENTION + 8 * D),
        ("fp8+recompute", 2 * (D + SCALES) + ATTENTION + 4 * (D + SCALES)),
    ],
)
def test_bytes_of_a_vision_block(activations, expected):
    assert bytes_of_a_token(activations, ViT, images) == expected


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        # norms, inputs of q/k/v and gate/up, gate and up, input of down
        ("fp8", 2 * (D + SCALES) + 2 * D + ATTENTION + 6 * (D + SCALES) + 3 * D),
        ("recompute", 2 * 2 * D + ATTENTION + 12 * D),
        ("fp8+recompute", 2 * (D + SCALES) + ATTENTION + 6 * (D + SCALES)),
    ],
)
def test_bytes_of_a_llama_block(activations, expected):
    assert bytes_of_a_token(activations, Llama, text) == expected


def test_norms_of_other_classes_keep_no_fp32_copy():
    def make(blocks):
        return ViT(blocks, OwnNorm)

    for choice in (None, "fp8"):
        assert bytes_of_a_token(choice, make, images) == bytes_of_a_token(choice, ViT, images)


# Training


@pytest.mark.parametrize("case", FP8_LEVELS)
def test_recomputation_changes_no_bit(case):
    if CHART[case].scaling == "nvfp4":
        pytest.skip("rounds gradients stochastically")
    want = gradients(*start(None, case), passes=2)
    assert same(gradients(*start("recompute", case), passes=2), want)
    fp8, both = (gradients(*start(choice, case), passes=2) for choice in ("fp8", "fp8+recompute"))
    assert not same(fp8, want) and not same(both, fp8)
    for ours in (fp8, both):
        assert all((a - b).norm() < 0.15 * b.norm() for a, b in zip(ours, want, strict=True))


def losses(activations, make, batch, case, steps=50):
    model, engine = start(activations, case, make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine.attach(optimizer)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        with engine.forward_context():
            loss = model.loss(*batch(seed=step))
        with engine.backward_context():
            engine.step.scale(loss).backward()
        engine.step.run(optimizer)
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("make", "batch"), [(ViT, images), (Llama, text)])
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_training_is_as_good(make, batch, case):
    want = losses(None, make, batch, case)
    assert sum(want[-10:]) < 0.5 * sum(want[:10])
    for choice in ("fp8", "fp8+recompute"):
        got = losses(choice, make, batch, case)
        assert got[0] == want[0] and got != want
        assert sum(abs(a - b) for a, b in zip(got, want, strict=True)) < 0.05 * sum(want)


# Together with


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_activation_checkpointing(choice, reentrant):
    model, engine = start(choice)
    want = gradients(model, engine, passes=2)
    model.recompute = reentrant
    assert same(gradients(model, engine), want)
    if not reentrant:
        blocks = [kept_bytes(choice, lambda n: checkpointed(n), images, n, 32) for n in (1, 2)]
        assert blocks[1] - blocks[0] <= 4 * 32 * D * 2 + 64  # the block's input


def checkpointed(blocks):
    model = ViT(blocks)
    model.recompute = False
    return model


@pytest.mark.parametrize("choice", CHOICES)
def test_offloading_takes_what_is_kept(choice):
    model, engine = start(choice)
    want = gradients(model, engine, passes=2)
    dtypes = []

    def pack(t):
        dtypes.append((t.dtype, t.shape))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert same(gradients(model, engine), want)
    gelus = [dtype for dtype, shape in dtypes if shape == (4, 32, 4 * D)]
    assert gelus and (torch.bfloat16 in gelus) == (choice == "recompute")


@pytest.mark.parametrize("choice", CHOICES)
def test_a_second_derivative_reaches_the_input(choice):
    def penalty(choice):
        model, engine = start(choice)
        x, y = images()
        x.requires_grad_()
        with engine.forward_context(), sdpa_kernel(SDPBackend.MATH):
            (grad,) = torch.autograd.grad(model.loss(x, y), x, create_graph=True)
        (grad.pow(2).sum() * 1e3).backward()
        return x.grad, model.blocks[0].mlp.fc1.weight.grad

    for got, want in zip(penalty(choice), penalty(None), strict=True):
        assert want.norm() > 0 and (got - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize("choice", CHOICES)
def test_batches_of_gradients(choice):
    model, engine = start(choice)
    x = images()[0].requires_grad_()
    rows = torch.eye(16)[:3, None].expand(3, 4, 16).bfloat16()

    def run(grad, batched):
        with engine.forward_context():
            out = model(x)
        return torch.autograd.grad(out, x, grad, is_grads_batched=batched)[0]

    run(rows[0], False)
    together = run(rows, True)
    for one, row in zip(together, rows, strict=True):
        want = run(row, False)
        assert (one - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_parameters_come_once(choice):
    model, engine = start(choice)
    seen = []
    model.norm.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    twice = gradients(model, engine)
    model.norm.weight._backward_hooks.clear()
    once = gradients(*start(choice))
    names = [name for name, _ in model.named_parameters()]
    assert len(seen) == 1 and torch.equal(twice[names.index("norm.weight")], 2 * once[names.index("norm.weight")])


@pytest.mark.parametrize("choice", CHOICES)
def test_part_of_a_graph_and_a_retained_graph(choice):
    model, engine = start(choice, make=Llama)
    want = gradients(model, engine, text(), passes=2)
    model.zero_grad()
    with engine.forward_context():
        loss = model.loss(*text())
    with engine.backward_context():
        first = model.model.layers[0]
        # Only one of the three readers of the norm's output, and then all.
        part = torch.autograd.grad(loss, first.self_attn.v_proj.weight, retain_graph=True)[0]
        loss.backward(retain_graph=True)
        whole = [p.grad.clone() for p in model.parameters()]
        assert torch.equal(part, first.self_attn.v_proj.weight.grad)
        loss.backward()
    assert same(whole, want)
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), whole, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_copies_keep_their_own_inputs(choice):
    model, engine = start(choice)
    names = [name for name, m in model.named_modules() if "forward" in m.__dict__]
    assert len(names) == 5  # norms
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name in names:
            module = twin.get_submodule(name)
            assert module.forward._module() is module is not model.get_submodule(name)
        for ours, theirs in zip(twin.blocks, model.blocks, strict=True):
            keeps, wanted = ours.mlp.act.keeps, theirs.mlp.act.keeps
            assert (keeps.fp8, keeps.again) == (wanted.fp8, wanted.again) == ("fp8" in choice, "recompute" in choice)
        twin.norm.weight.data.zero_()
        with engine.forward_context():
            assert torch.equal(twin(images()[0]), twin.head.bias.bfloat16().expand(4, 16))
    engine.revert()
    assert not any({"forward", "keeps"} & m.__dict__.keys() for m in model.modules()) and Engine.of(model) is None


@pytest.mark.parametrize("choice", CHOICES)
def test_compiled_models_have_no_break(choice):
    model, engine = start(choice)
    plain, plain_engine = start(None, weight_cache=False)
    with engine.forward_context():
        assert torch._dynamo.explain(model)(images()[0]).graph_break_count == 0
        loss = F.cross_entropy(torch.compile(model, backend="aot_eager")(images()[0]).float(), images()[1])
    with engine.backward_context():
        loss.backward()
    want = gradients(plain, plain_engine)
    assert all((p.grad - g).norm() < 0.1 * g.norm() for p, g in zip(model.parameters(), want, strict=True))


def test_evaluation_and_transforms_compute_as_before():
    model, engine = start("fp8+recompute")
    plain, plain_engine = start(None)
    x = images()[0]
    for run in (lambda m: m(x), lambda m: torch.func.vmap(m)(x[:, None]).squeeze(1)):
        with torch.no_grad(), engine.forward_context():
            ours = run(model)
        with torch.no_grad(), plain_engine.forward_context():
            assert torch.equal(ours, run(plain))
    with torch.inference_mode(), engine.forward_context():
        model(x)


# The argument


def test_the_argument_is_checked_before_the_first_step():
    with pytest.raises(ValueError, match=r"activations='fp4' must be None or one of: fp8, recompute, fp8\+recompute"):
        plugin("msamp_o2", activations="fp4")
    with pytest.raises(TypeError, match=r"fp16_amp takes no 'activations'. Levels that do: te_fp8, "):
        plugin("fp16_amp", activations="fp8")
    engine = plugin("te_fp8", activations="fp8").engine
    with pytest.raises(ValueError, match=r"Sequential has no norm and no activation that is a module .* Leave it out"):
        engine.convert(nn.Sequential(nn.Linear(32, 32)), torch.device("cpu"))


def test_the_start_up_table_says_what_is_kept():
    _, engine = start("fp8+recompute", make=Llama)
    table, _ = engine.columns.computation.describe()
    text = " ".join(table.split())
    kept = "keep for backward their inputs alone, in FP8, and the linear layers behind them keep no input"
    assert f"{kept}: 5 norms, 2 gated" in text
    assert max(map(len, table.splitlines())) <= 80
    _, engine = start("recompute")
    assert "7 keep for backward their inputs alone, as they are" in " ".join(
        engine.columns.computation.describe()[0].split()
    )


def test_memory_counts_more_than_kept_weights():
    for choice, keeps in ((None, True), ("fp8", False)):
        assert start(choice)[1].amaxes.weights.keeps is keeps
    assert start("fp8", weight_cache=True)[1].amaxes.weights.keeps


def test_recomputation_keeps_no_fp8_weight():
    weights = 12 * D * D  # one byte each, of a block; the reference's two orientations share them
    sizes = {
        choice: kept_bytes(choice, ViT, images, 2, 32) - kept_bytes(choice, ViT, images, 1, 32) for choice in CHOICES
    }
    tokens = {choice: 4 * 32 * bytes_of_a_token(choice, ViT, images) for choice in CHOICES}
    assert 0 <= sizes["fp8"] - tokens["fp8"] - weights < 256
    for choice in ("recompute", "fp8+recompute"):
        assert 0 <= sizes[choice] - tokens[choice] < 256


def test_norms_that_are_left_alone_keep_what_they_kept():
    model, engine = start("fp8", skip=["norm", "blocks.0.*"])
    assert sorted(engine.columns.computation.conversion.keeping) == [
        "blocks.0.mlp.act", "blocks.1.mlp.act", "blocks.1.norm1", "blocks.1.norm2",
    ]  # fmt: skip
    gradients(model, engine)
