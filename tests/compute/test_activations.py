"""Activations and gated MLPs between converted layers: fewer quantizations, and bit for bit the same numbers."""

import copy
import io
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GemmaConfig, LlamaConfig, Phi3Config
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import graph_of
from nemo_lowprec.compute import ReferenceBackend, convert_layers, patterns, revert_layers
from nemo_lowprec.compute.activations import KINDS, Activation
from nemo_lowprec.compute.backends import fused_activations
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.keeping import find_gated, keep_less
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.patterns.activations import Activations, LowPrecisionActivation, recognise_activation
from nemo_lowprec.compute.patterns.gated_mlp import GatedMLPs, LowPrecisionGatedMLP
from nemo_lowprec.compute.patterns.norms import Norms
from tests.support import Counting as CountingInputs

HALF = torch.bfloat16


class Counting(CountingInputs):
    """Also counts the results and gradients that activations quantize themselves.

    As a GPU's kernels it leaves out what is not wanted in half precision, and counts that in ``absent``.
    """

    def __init__(self):
        super().__init__()
        self.forward = self.backward = self.grads = self.absent = 0

    def quantize(self, values, operand, **kwargs):
        self.grads += operand.kind == "grad_output"
        return super().quantize(values, operand, **kwargs)

    def activate(self, *args, **kwargs):
        self.forward += 1
        out, data = super().activate(*args, **kwargs)
        self.absent += not kwargs["half"]
        return out if kwargs["half"] else None, data

    def activate_backward(self, activation, grad, tensors, readers, half):
        self.backward += sum(reader is not None for reader in readers)
        made = super().activate_backward(activation, grad, tensors, readers, half)
        half = half or None in readers
        self.absent += 0 if half else len(readers)
        return [(values if half else None, data, sums) for values, data, sums in made]


class MLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(32, 64), act or nn.GELU(), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Gated(nn.Module):
    """``order``: which of the layers is called first."""

    def __init__(self, act=F.silu, order="gate", bias=True):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 64, bias), nn.Linear(64, 32, bias), nn.Linear(32, 64, bias)
        self.act, self.order = act, order

    def forward(self, x):
        if self.order == "gate":
            return self.w2(self.act(self.w1(x)) * self.w3(x))
        return self.w2(self.w3(x) * self.act(self.w1(x)))


class Joint(nn.Module):
    def __init__(self, gate_first=True):
        super().__init__()
        self.both, self.down, self.act = nn.Linear(32, 128), nn.Linear(64, 32), nn.SiLU()
        self.gate_first = gate_first

    def forward(self, x):
        a, b = self.both(x).chunk(2, dim=-1)
        return self.down(self.act(a) * b if self.gate_first else a * self.act(b))


def hf(cls, config, **options):
    return cls(config(hidden_size=32, intermediate_size=64, **options))


MODULES = {
    "gelu": MLP,
    "gelu tanh": lambda: MLP(nn.GELU("tanh")),
    "silu": lambda: MLP(nn.SiLU()),
    "relu": lambda: MLP(nn.ReLU()),
    "transformers' gelu": lambda: MLP(ACT2FN["gelu"]),
    "gated": Gated,
    "gated, up first": lambda: Gated(order="up"),
    "gated, gelu": lambda: Gated(nn.GELU(), bias=False),
    "joint": Joint,
    "joint, up first": lambda: Joint(False),
    "llama": lambda: hf(LlamaMLP, LlamaConfig),
    "llama, bias": lambda: hf(LlamaMLP, LlamaConfig, mlp_bias=True),
    "gemma": lambda: hf(GemmaMLP, GemmaConfig),
    "phi3": lambda: hf(Phi3MLP, Phi3Config, pad_token_id=0),
}
IS_GATED = {name: not isinstance(make(), MLP) for name, make in MODULES.items()}
SOME = ["gelu", "gated", "joint", "llama"]


def build(name):
    torch.manual_seed(0)
    return nn.Sequential(MODULES[name](), MODULES[name]())


def convert(model, with_patterns=True, scaling="delayed", half=HALF, **layers):
    recipe, backend = Recipe(scaling), Counting()
    histories = new_histories(recipe)
    with pytest.MonkeyPatch.context() as patch:
        if not with_patterns:
            patch.setattr(patterns, "PATTERNS", [Norms()])
        result = convert_layers(model, half, recipe, backend, None, LayerFilter(**layers), histories)
    return result, backend, histories


class Run:
    """A model in a loop of its own."""

    def __init__(self, name, with_patterns, call=None, half=HALF, prepare=None, keeps=None, **layers):
        self.model, self.half = build(name), half
        gated = find_gated(self.model)
        self.result, self.backend, self.histories = convert(self.model, with_patterns, half=half, **layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.call, self.seen, self.passes = call or (lambda model, x: model(x)), [], 0
        if keeps is not None:
            keep_less(self.model, Keeps(self.backend, *keeps), [], gated)
        if prepare is not None:
            prepare(self.model)

    def forward(self, rows=(4, 8), autocast=True):
        generator = torch.Generator().manual_seed(self.passes)
        x = torch.randn(*rows, 32, generator=generator) * (1 + self.passes % 3)
        self.passes += 1
        x.requires_grad_()
        with torch.autocast("cpu", self.half, enabled=autocast):
            return x, self.call(self.model, x)

    def step(self, **how):
        for _ in range(2):  # micro-batches
            x, out = self.forward(**how)
            out.float().pow(2).mean().backward()
            self.seen += [out.detach(), x.grad, *(p.grad.clone() for p in self.model.parameters())]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.histories.update()

    def state(self):
        operands = self.histories.state_dict()["operands"]
        return [torch.as_tensor(v) for operand in operands.values() for v in operand.values()]


def assert_equal(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)


def assert_both_alike(name, steps=4, call=None, prepare=None, half=HALF, **how):
    """Two runs, with and without the patterns; asserts that all their numbers are equal."""
    runs = [Run(name, with_patterns, call, half, prepare) for with_patterns in (True, False)]
    for run in runs:
        for _ in range(steps):
            run.step(**how)
    assert_equal(runs[0].seen + runs[0].state(), runs[1].seen + runs[1].state())
    assert (runs[1].backend.forward, runs[1].backend.backward) == (0, 0)
    return runs


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_numbers_are_those_of_the_modules_one_by_one(name, half):
    fused, plain = assert_both_alike(name, half=half)
    # The first step has no history. From then on each of two blocks in two passes of three steps hands over a result.
    handed = 2 * 2 * 3
    assert fused.backend.forward == handed
    gradients = handed * (2 if name.startswith(("gated", "llama", "gemma")) else 1)
    assert fused.backend.backward == gradients
    assert fused.backend.inputs == plain.backend.inputs and fused.backend.grads == plain.backend.grads


@pytest.mark.parametrize("name", ["gated", "joint", "llama"])
def test_between_the_layers_of_a_gated_mlp_nothing_is_written_in_half_precision(name):
    fused, _ = assert_both_alike(name)
    assert fused.backend.absent == fused.backend.forward + fused.backend.backward > 0
    seen = []
    fused.model[0].register_forward_hook(lambda *args: seen.append(args))  # of the MLP
    before = fused.backend.absent
    fused.step()
    assert fused.backend.absent > before and seen


@pytest.mark.parametrize("where", ["layer", "all modules", "anomaly", "observer"])
def test_who_looks_between_the_layers_finds_the_values(where):
    def look(run):
        layers = [m for m in run.model.modules() if isinstance(m, LowPrecisionLinear)]
        found = []

        def see(module, args, out):
            if module in layers:
                found.extend(t.isfinite().all() for t in (*args, out))
                out.register_hook(lambda grad: found.append(grad.isfinite().all()))

        if where == "layer":
            return found, [layer.register_forward_hook(see) for layer in layers]
        if where == "all modules":
            return found, [nn.modules.module.register_module_forward_hook(see)]
        return found, []

    runs = []
    for looks in (True, False):
        run = Run("llama", True)
        for _ in range(2):
            run.step()
        before = run.backend.absent
        found, handles = look(run) if looks else ([], [])
        with ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.remove)
            if looks and where == "anomaly":
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            if looks and where == "observer":
                plan = run.model[0].down_proj.gemm_plan
                plan.observers = SimpleNamespace(
                    quantized=[lambda _, kind, values, *__, found=found: found.append(values.isfinite().all())]
                )
                run.model[1].down_proj.gemm_plan.observers = plan.observers
            run.step()
        assert (run.backend.absent == before) is looks
        assert all(found) and (found or not looks or where == "anomaly")
        runs.append(run.seen + run.state())
    assert_equal(*runs)


def test_a_layer_that_does_not_take_the_product_gets_it_computed():
    runs = []
    for with_patterns in (True, False):
        run = Run("llama", with_patterns)
        for _ in range(2):
            run.step()
        run.model[0].down_proj.eval()  # its amaxes are recorded no more
        run.step()
        runs.append(run.seen)
    assert_equal(*runs)


def test_a_gradient_that_is_changed_between_the_layers_is_not_finite_or_an_error():
    for change in (lambda grad: grad + 0, lambda grad: grad.__dict__.pop("_lowprec_quantized") and grad):
        run = Run("llama", True)
        run.step()
        x, out = run.forward()
        node = next(n for n in graph_of([out])[0] if "ActivationFunction" in n.name())
        node.register_hook(lambda given, _, change=change: tuple(g if g is None else change(g) for g in given))
        try:
            out.float().sum().backward()
        except RuntimeError as error:
            assert "handed over in FP8 alone" in str(error)
        else:
            assert not x.grad.isfinite().any()


def test_the_layer_behind_quantizes_nothing_and_the_layer_in_front_neither():
    run = Run("gelu", True)
    run.step()
    seen, quantize = [], run.backend.quantize
    run.backend.quantize = lambda values, operand, **how: seen.append(operand) or quantize(values, operand, **how)
    run.backend.quantize_grad = lambda values, operand, **how: seen.append(operand) or (None, None)
    mlp = run.model[0]
    mlp.act.activation_backend = ReferenceBackend()  # so that only the layers are counted
    _, out = run.forward()
    grad = run.model[0].fc1.gemm_plan.operands["grad_output"]
    run.backend.quantize_grad = Counting.quantize_grad.__get__(run.backend)
    out.float().sum().backward()
    operands = [id(operand) for operand in seen]
    assert id(mlp.fc1.gemm_plan.operands["input"]) in operands
    assert id(mlp.fc2.gemm_plan.operands["input"]) not in operands and id(grad) not in operands


@pytest.mark.parametrize("name", MODULES)
def test_what_is_converted(name):
    model = build(name)
    classes, state = [type(m) for m in model.modules()], [dict(m.__dict__) for m in model.modules()]
    result, _, _ = convert(model)
    assert len(result.low) == (6 if "both" not in str(model) and "gate_up" not in str(model) and IS_GATED[name] else 4)
    assert isinstance(model[0], LowPrecisionGatedMLP) is IS_GATED[name]
    assert list(result.fused) == (["0", "1"] if IS_GATED[name] else []) and not result.kept and not result.norms
    assert all(isinstance(m, cls) or cls is nn.Linear for m, cls in zip(model.modules(), classes, strict=True))
    revert_layers(model)
    assert [type(m) for m in model.modules()] == classes and [dict(m.__dict__) for m in model.modules()] == state


@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise"])
def test_scales_that_are_not_known_before_the_values_leave_all_as_it_is(scaling):
    for name in SOME:
        model = build(name)
        result, _, _ = convert(model, scaling=scaling)
        assert not any(isinstance(m, LowPrecisionActivation | LowPrecisionGatedMLP) for m in model.modules())
        assert not result.fused and not result.unfused


def test_skipped_activations_and_layers():
    model = build("gelu")
    convert(model, skip=["1"])
    assert isinstance(model[0].act, LowPrecisionActivation) and type(model[1].act) is nn.GELU
    for skip in (["0.w2"], ["0.w1"]):
        model = build("gated")
        result, _, _ = convert(model, skip=skip)
        assert type(model[0]) is Gated and "half precision" in result.unfused["0"] and list(result.fused) == ["1"]


def test_filters_of_users_see_no_activation():
    seen = []
    convert(build("gelu"), convert=lambda name, module: seen.append(type(module)) or True)
    assert set(seen) == {nn.Linear}


# Kept in FP8, or as they are and computed again


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", [*SOME, "joint, up first", "relu", "gated, gelu"])
def test_modules_that_keep_their_inputs_alone_hand_over_the_same_numbers(name, again):
    fused, plain = Run(name, True, keeps=(False, again)), Run(name, False)
    for run in (fused, plain):
        for _ in range(4):
            run.step()
    assert_equal(fused.seen + fused.state(), plain.seen + plain.state())
    assert fused.backend.forward and fused.backend.backward
    kept = [m for m in fused.model.modules() if getattr(m, "keeps", None) is not None]
    assert len(kept) == 2


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "silu"])
def test_fp8_inputs_give_the_gradients_of_the_modules_alone(name, again):
    runs = [Run(name, with_patterns, keeps=(True, again)) for with_patterns in (True, False)]
    for run in runs:
        for _ in range(4):
            run.step()
    assert_equal(runs[0].seen + runs[0].state(), runs[1].seen + runs[1].state())
    assert runs[0].backend.forward and runs[0].backend.backward and not runs[1].backend.forward


@pytest.mark.parametrize("name", ["gated", "joint", "llama"])
def test_a_gated_mlp_keeps_fp8_inputs(name):
    saved, runs = {}, [Run(name, True, keeps=keeps) for keeps in (None, (True, False))]
    for run in runs:
        run.step()
        saved[run] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved[run]: to.append(t) or t, lambda t: t):
            x, out = run.forward()
        out.float().pow(2).mean().backward()
        run.seen = [x.grad, *(p.grad for p in run.model.parameters())]
    hidden = [[t.dtype for t in ts if t.numel() in (32 * 64, 32 * 128) and t.dim() == 3] for ts in saved.values()]
    assert set(hidden[0]) == {HALF} and set(hidden[1]) == {torch.float8_e4m3fn} and len(hidden[0]) == len(hidden[1])
    for got, want in zip(runs[1].seen, runs[0].seen, strict=True):
        assert 0 < (got - want).norm() < 0.1 * want.norm() or torch.equal(got, want)


def test_what_no_kernel_speeds_up_is_left_alone(monkeypatch):
    monkeypatch.setattr(Counting, "fuses", lambda self, activation: activation.form != "plain", raising=False)
    for name in ("gelu", "gated"):
        model = build(name)
        result, _, _ = convert(model)
        ours = [m for m in model.modules() if isinstance(m, LowPrecisionActivation | LowPrecisionGatedMLP)]
        assert bool(ours) == IS_GATED[name]
        assert bool(result.fused) == IS_GATED[name] and not result.unfused
    monkeypatch.setitem(fused_activations.FASTER_GATED, "silu", False)
    backend = ScaledMMBackend()
    assert not backend.fuses(Activation("silu", "gated")) and backend.fuses(Activation("silu"))


# Fallbacks


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", [*SOME, "joint, up first"])
def test_checkpointed_blocks(name, reentrant):
    def call(model, x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    fused, _ = assert_both_alike(name, call=call)
    assert fused.backend.forward and fused.backend.backward


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "quick_gelu", "gelu_python"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_of_several_operations(name, reentrant):
    """The fused one rounds once, the module after each operation: results are alike, gradients too."""
    torch.manual_seed(0)
    mlp = MLP(ACT2FN[name])
    _, backend, histories = convert(mlp)
    for _ in range(3):
        x = torch.randn(16, 32, requires_grad=True)
        with torch.autocast("cpu", HALF):
            out = checkpoint(mlp, x, use_reentrant=reentrant)
        out.float().square().sum().backward()
        histories.update()
    assert backend.forward and backend.backward
    values = torch.linspace(-6, 6, 512).to(HALF).requires_grad_()
    got = mlp.act(values)
    want = ACT2FN[name](values.float())
    assert got.dtype == HALF
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2e-6)
    grads = [torch.autograd.grad(o.float().sum(), values)[0] for o in (got, want)]
    torch.testing.assert_close(*grads, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("rows", [(3,), (5, 7), (0,)], ids=str)
def test_rows_that_need_padding_and_no_rows(name, rows):
    if rows == (0,):
        run = Run(name, True)
        _, out = run.forward(rows=rows)
        assert out.shape == (0, 32)
    else:
        fused, _ = assert_both_alike(name, rows=rows)
        assert fused.backend.forward == 0


@pytest.mark.parametrize("name", SOME)
def test_fp32_inputs(name):
    fused, _ = assert_both_alike(name, autocast=False)
    assert fused.backend.forward == fused.backend.backward == 0


@pytest.mark.parametrize("name", SOME)
def test_evaluation_in_between(name):
    seen = []

    def call(model, x):
        if model.training:
            model.eval()
            with torch.no_grad():
                seen.append(model(x.detach() * 2))
            with torch.inference_mode():
                seen.append(model(x.detach() * 3).clone())
            model.train()
        return model(x)

    assert_both_alike(name, call=call)
    half = len(seen) // 2
    assert_equal(seen[:half], seen[half:])


def _hook(kind):
    def prepare(model):
        for module in model.modules():
            if isinstance(module, nn.Sequential):
                continue
            if kind == "forward":
                module.register_forward_hook(lambda m, args, out: out * 0.9)
            elif kind == "pre":
                module.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
            else:
                module.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else g * 2 for g in gi))

    return prepare


@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
@pytest.mark.parametrize("name", [*SOME, "joint"])
def test_hooks_on_all_modules(name, kind):
    assert_both_alike(name, prepare=_hook(kind))


@pytest.mark.parametrize("where", ["result", "input"])
def test_in_place_changes_between_the_modules(where):
    def prepare(model):
        for block in model:
            if where == "result":
                block.fc2.register_forward_pre_hook(lambda m, args: args[0].mul_(0.5) and None)
            else:
                block.act.register_forward_pre_hook(lambda m, args: args[0].mul_(0.5) and None)

    for with_patterns in (True, False):
        assert Run("gelu", with_patterns).result.low

    def once(model, x):
        for block in model:
            hidden = block.fc1(x)
            if where == "input":
                hidden.mul_(0.5)
            hidden = block.act(hidden)
            if where == "result":
                hidden.mul_(0.5)
            x = x + block.fc2(hidden)
        return x

    assert_both_alike("gelu", call=once)


def test_a_gradient_of_other_readers_is_added():
    def call(model, x):
        total = 0
        for block in model:
            hidden = block.fc1(x)
            acted = block.act(hidden)
            x = x + block.fc2(acted)
            total = total + hidden.float().mean() + acted.float().square().mean()
        return x + total

    fused, _ = assert_both_alike("gelu", call=call)
    assert fused.backend.forward and not fused.backend.backward


def test_gradient_hooks_between_the_modules():
    def call(model, x):
        for block in model:
            hidden = block.fc1(x)
            hidden.register_hook(lambda g: g * 0.5)
            acted = block.act(hidden)
            acted.register_hook(lambda g: g + 1)
            x = x + block.fc2(acted)
        return x

    fused, _ = assert_both_alike("gelu", call=call)
    assert fused.backend.forward and not fused.backend.backward


@pytest.mark.parametrize("shared", ["one block", "two blocks"])
def test_an_activation_with_several_places(shared):
    """Each place has another layer behind it, with another scale: nothing is handed forward, gradients are."""

    def call(model, x):
        act = model[0].act
        for block in model:
            hidden = act(block.fc1(x))
            x = x + 3 * block.fc2(hidden)
        return x

    def prepare(model):
        if shared == "two blocks":
            model[1].act = model[0].act

    fused, _ = assert_both_alike("gelu", call=call, prepare=prepare)
    assert fused.backend.forward == 0 and fused.backend.backward == 2 * 2 * 3


def test_a_place_that_is_new_in_a_later_step():
    def call(model, x):
        act = model[0].act
        call.count += 1
        x = x + model[0].fc2(act(model[0].fc1(x)))
        other = act if call.count % 100 > 4 else model[1].act
        return x + 3 * model[1].fc2(other(model[1].fc1(x)))

    runs = []
    for with_patterns in (True, False):
        call.count = 0
        run = Run("gelu", with_patterns, call)
        for _ in range(5):
            run.step()
        runs.append(run.seen + run.state())
    assert_equal(*runs)


@pytest.mark.parametrize("name", [*SOME, "silu", "relu"])
def test_second_derivatives(name):
    results = []
    for with_patterns in (True, False):
        run = Run(name, with_patterns)
        run.step()
        x, out = run.forward()
        params = list(run.model.parameters())
        grads = torch.autograd.grad(out.float().square().sum(), [x, *params], create_graph=True)
        sum(g.float().square().sum() for g in grads).backward()
        results.append([*(g.detach() for g in grads), x.grad, *(p.grad for p in params)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", [*SOME, "transformers' gelu"])
def test_copies_compute_by_themselves(name, how):
    run = Run(name, True)
    run.step()
    if how == "deepcopy":
        twin = copy.deepcopy(run.model)
    else:
        file = io.BytesIO()
        torch.save(run.model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert [type(m) for m in twin.modules()] == [type(m) for m in run.model.modules()]
    parts = [m for m in twin.modules() if isinstance(m, LowPrecisionActivation | LowPrecisionGatedMLP)]
    assert parts and all(p.reader.backend is None for p in parts)
    x = torch.randn(16, 32)
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            assert torch.equal(twin(x), run.model(x))
    revert_layers(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in build(name).modules()]


@pytest.mark.parametrize("name", SOME)
def test_compiled_blocks_compute_the_same(name):
    def prepare(model):
        torch._dynamo.reset()
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)

    compiled, eager = Run(name, True, prepare=prepare), Run(name, True)
    for run in (compiled, eager):
        for _ in range(3):
            run.step()
    assert_equal(compiled.seen + compiled.state(), eager.seen + eager.state())
    assert compiled.backend.forward == 0 < eager.backend.forward


@pytest.mark.parametrize("change", ["activation", "layer", "setting", "forward of a layer", "half layer"])
def test_a_gated_mlp_that_was_changed_runs_its_own_forward(change):
    def prepare(model):
        for block in model:
            if change == "activation":
                block.act = F.relu
            elif change == "layer":
                block.w3 = nn.Linear(32, 64).to(HALF) if change == "half layer" else _seeded()
            elif change == "setting":
                block.order = "up"
            elif change == "half layer":
                block.w3 = _seeded()
            else:
                linear = block.w3
                block.w3.forward = lambda x, linear=linear: type(linear).forward(linear, x) * 2

    if change in ("layer", "half layer"):
        runs = [Run("gated", with_patterns, prepare=prepare) for with_patterns in (True, False)]
        for run in runs:
            for _ in range(3):
                x, out = run.forward()
                out.float().sum().backward()
                run.seen += [out.detach(), x.grad]
                run.histories.update()
        assert_equal(runs[0].seen, runs[1].seen)
        fused = runs[0]
    else:
        fused, _ = assert_both_alike("gated", prepare=prepare)
    assert fused.backend.forward == 0


def _seeded():
    torch.manual_seed(3)
    return nn.Linear(32, 64)


# Recognition


class GatedLookAlike(Gated):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        if self.kind == "residual":
            return x + self.w2(F.silu(gate) * up)
        if self.kind == "no activation":
            return self.w2(gate * up)
        if self.kind == "both activated":
            return self.w2(F.silu(gate) * F.silu(up))
        if self.kind == "scaled":
            return self.w2(F.silu(gate) * up * 2)
        if self.kind == "noise in training":
            return self.w2(F.dropout(F.silu(gate) * up, 0.5, self.training))
        if self.kind == "another gradient":
            return self.w2(F.silu(gate) * up.detach())
        if self.kind == "weights read":
            return F.linear(F.silu(gate) * up, self.w2.weight, self.w2.bias)
        if self.kind == "called twice":
            return self.w2(F.silu(self.w1(x)) * up)
        return self.w2(F.silu(gate) * up), None


KINDS_OF_LOOK_ALIKES = [
    "residual", "no activation", "both activated", "scaled", "noise in training", "another gradient", "weights read",
    "called twice", "tuple",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS_OF_LOOK_ALIKES)
def test_look_alikes_of_a_gated_mlp_are_left_alone(kind):
    state = torch.get_rng_state()
    module = GatedLookAlike(kind)
    state = torch.get_rng_state()
    pattern = GatedMLPs()
    assert pattern.is_candidate(module) and isinstance(pattern.recognise(module), str)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "relu", "quick_gelu"])
@pytest.mark.parametrize("form", ["gate", "up", "joint", "joint, up first"])
def test_every_form_of_a_gated_mlp_is_recognised(kind, form):
    act = KINDS[kind][0]
    if form.startswith("joint"):
        module = Joint(form == "joint")
        module.act = nn.Identity()
        module.act.forward = act
        want = Activation(kind, "gate_up" if form == "joint" else "up_gate")
    else:
        module, want = Gated(act, form), Activation(kind, "gated")
    found = GatedMLPs().recognise(module).settings["gated"]
    assert found.activation == want and found.down == ("down" if form.startswith("joint") else "w2")
    if form in ("gate", "up"):
        assert found.linears == (("w1", "w3") if form == "gate" else ("w3", "w1"))
        assert found.gate_first is (form == "gate")


ACTIVATIONS = {
    "gelu": ("gelu", True), "gelu_python": ("gelu", False), "gelu_new": ("gelu_tanh", False),
    "gelu_fast": ("gelu_tanh", False), "gelu_accurate": ("gelu_tanh", False), "gelu_pytorch_tanh": ("gelu_tanh", True),
    "gelu_python_tanh": ("gelu_tanh", False), "quick_gelu": ("quick_gelu", False), "silu": ("silu", True),
    "swish": ("silu", True), "relu": ("relu", True), "relu2": None, "relu6": None, "gelu_10": None, "leaky_relu": None,
    "hardswish": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_transformers_are_recognised_by_what_they_compute(name):
    module = ACT2FN[name]
    assert Activations().is_candidate(module) and recognise_activation(module) == ACTIVATIONS[name]


class GELULookAlike(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "noise in training" and self.training:
            return F.gelu(x) + torch.randn_like(x)
        if self.kind == "another gradient":
            return x + (F.gelu(x) - x).detach()
        if self.kind == "tuple":
            return F.gelu(x), x
        if self.kind == "in place":
            return x.copy_(F.gelu(x))
        if self.kind == "along a dimension":
            return F.gelu(x) * (x.sum() != 0.123) if x.shape[-1] == 3 else F.gelu(x).flip(-1)
        return F.gelu(x) * 1.001


@pytest.mark.parametrize(
    "kind", ["noise in training", "another gradient", "tuple", "in place", "along a dimension", ""]
)
def test_look_alikes_of_an_activation_are_left_alone(kind):
    state = torch.get_rng_state()
    module = GELULookAlike(kind)
    assert Activations().is_candidate(module) and recognise_activation(module) is None
    assert torch.equal(torch.get_rng_state(), state) and module.training
    assert recognise_activation(nn.ReLU(inplace=True)) is None
    assert not Activations().is_candidate(nn.PReLU())


def test_timms_activations():
    timm = pytest.importorskip("timm")
    from timm.layers import GELU, GELUTanh, QuickGELU, Swish

    del timm
    found = [recognise_activation(cls()) for cls in (GELU, GELUTanh, QuickGELU, Swish)]
    assert [f and f[0] for f in found] == ["gelu", "gelu_tanh", "quick_gelu", "silu"]
