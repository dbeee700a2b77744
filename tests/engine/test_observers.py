"""Subscribers to an engine's events: each event with its arguments, and nothing for whoever did not ask."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nemo_lowprec import CHART
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.comm import GradientReducer, broadcast_weights
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.observers import EVENTS, NOBODY, Observer, Observers
from nemo_lowprec.report.traffic import Traffic
from nemo_lowprec.tensors import Fp8Weight, GradientTensor
from tests.processes import on_processes
from tests.support import Net, Samples, loader, plugin, trainer

CPU = torch.device("cpu")
SAMPLES = Samples()
KINDS = ["input", "weight", "grad_output"]


class Operands(Observer):
    """(layer, kind, shape of the values, format of the operand) of each."""

    def __init__(self):
        self.seen = []

    def quantized(self, layer, kind, values, operand, backend):
        assert not values.requires_grad and not torch.is_grad_enabled()
        half = isinstance(operand, torch.Tensor)
        found = str(operand.dtype).removeprefix("torch.") if half else backend.describe(operand)
        self.seen.append((layer, kind, tuple(values.shape), found))

    def kinds(self):
        return sorted({(layer, kind, found) for layer, kind, _, found in self.seen})


class Gradients(Observer):
    def __init__(self):
        self.seen = []

    def gradient(self, param, stored, values):
        assert isinstance(stored, GradientTensor)
        self.seen.append((param, stored.dequantize().clone()))


class Messages(Observer):
    def __init__(self):
        self.seen = []

    def message(self, kind, tensor, bytes, purpose):
        self.seen.append((kind, str(tensor.dtype).removeprefix("torch."), tensor.nbytes, bytes, purpose))


def start(case, model=None, **options):
    model = Net() if model is None else model
    engine = plugin(case, **options).engine
    engine.convert(model, CPU)
    engine.settle()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    return engine, model, optimizer


def backward(engine, model):
    with engine.forward_context():
        loss = model.loss({"x": SAMPLES.x, "y": SAMPLES.y})
    engine.step.scale(loss).backward()


def test_an_event_is_announced_to_those_who_override_it_only():
    observers, gradients, nothing = Observers(), Gradients(), Observer()
    observers.add(gradients)
    observers.add(nothing)
    assert {name: len(getattr(observers, name)) for name in EVENTS} == {**dict.fromkeys(EVENTS, 0), "gradient": 1}
    observers.remove(gradients)
    observers.remove(gradients)
    assert observers.gradient == ()
    with pytest.raises(ArithmeticError), observers.watched_by(gradients):
        assert observers.gradient == (gradients.gradient,)
        raise ArithmeticError
    assert observers.gradient == ()


def test_what_belongs_to_no_engine_has_no_subscribers():
    with pytest.raises(TypeError, match=r"Subscribe to engine\.observers"):
        NOBODY.add(Observer())
    observers = Observers()
    assert copy.deepcopy(observers) is pickle.loads(pickle.dumps(observers)) is NOBODY is copy.deepcopy(NOBODY)


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed", "msamp_o3", "bf16_with_mxfp8_mixed"])
def test_operands_in_fp8_are_announced_by_layer_and_kind(case):
    engine, model, _ = start(case)
    operands, gradients = Operands(), Gradients()
    engine.observers.add(operands)
    engine.observers.add(gradients)
    backward(engine, model)
    assert sorted(engine.columns.computation.conversion.low) == ["inp", "mid"]
    fp8 = CHART[case].compute
    low = [one for one in operands.seen if one[0] != "head"]
    assert sorted({one[:2] for one in low}) == sorted((name, kind) for name in ("inp", "mid") for kind in KINDS)
    assert {found for *_, found in low} == {fp8}
    shapes = {one[:2]: one[2] for one in low}
    assert shapes["inp", "input"] == (16, 32) and shapes["inp", "weight"] == (128, 32)
    assert shapes["inp", "grad_output"] == (16, 128) and shapes["mid", "weight"] == (128, 128)
    # The head is not converted: a CPU computes it by the same backend in half precision.
    half = {"bf16": "bfloat16", "fp16": "float16"}[CHART[case].autocast]
    assert {one[1:] for one in operands.kinds() if one[0] == "head"} == {(kind, half) for kind in KINDS}
    assert bool(gradients.seen) == CHART[case].is_low_bit


def test_values_are_those_that_were_quantized():
    class Rounding(Observer):
        def __init__(self):
            self.worst = {}

        def quantized(self, layer, kind, values, operand, backend):
            part = operand.rowwise or operand.columnwise
            got = part.data.float() * part.scale_inv
            got = got if operand.rowwise is not None else got.t()
            assert not isinstance(values, Fp8Weight)
            error = (got - values.float()).norm() / values.float().norm()
            self.worst[kind] = max(self.worst.get(kind, 0.0), float(error))

    engine, model, _ = start("te_fp8", convert=["inp", "mid", "head"])
    rounding = Rounding()
    engine.observers.add(rounding)
    backward(engine, model)
    assert set(rounding.worst) == set(KINDS)
    assert all(0 < error < 0.08 for error in rounding.worst.values())  # E4M3 and E5M2 round to 2**-4 and 2**-3


def test_an_overridden_gemm_is_announced_in_half_precision():
    engine, model, _ = start("te_fp8", override_linear_precision=(False, False, True))
    operands = Operands()
    engine.observers.add(operands)
    backward(engine, model)
    mid = {(kind, found) for layer, kind, found in operands.kinds() if layer == "mid"}
    assert mid == {
        ("input", "fp8"), ("input", "bfloat16"), ("weight", "fp8"), ("grad_output", "fp8"), ("grad_output", "bfloat16")
    }  # fmt: skip


def converted(model, recipe=None, half_backend=None, **options):
    observers, operands = Observers(), Operands()
    observers.add(operands)
    options["observers"] = observers
    convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), half_backend, LayerFilter(), None, **options)
    return operands


@pytest.mark.parametrize("backend", [None, ReferenceBackend()], ids=["torch", "reference"])
def test_layers_in_half_precision_announce_half_tensors(backend):
    """Also those that torch computes, with an FP32 gradient; and the projections of an attention."""
    model = nn.ModuleDict({"linear": nn.Linear(32, 32), "attention": nn.MultiheadAttention(32, 2, bias=False)})
    for param in model.bfloat16().parameters():
        param.grad_dtype = torch.float32
    operands = converted(model, half_backend=backend, fp32_wgrad=True)
    with torch.autocast("cpu", torch.bfloat16):
        x = model["linear"](torch.randn(6, 32))
        model["attention"](x, x, x)[0].sum().backward()
    names = ["attention.in_proj_weight", "attention.out_proj", "linear"]
    assert operands.kinds() == sorted((name, kind, "bfloat16") for name in names for kind in KINDS)


def test_transforms_and_second_derivatives_announce_plain_tensors():
    layer, x = nn.Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    operands = converted(layer, Recipe("current"))
    torch.func.vmap(layer)(torch.randn(3, 4, 32))
    assert operands.seen == [("", "input", (3, 4, 32), "bfloat16"), ("", "weight", (32, 32), "bfloat16")]
    operands.seen.clear()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.sum().backward()
    assert ("", "grad_output", "bfloat16") in operands.kinds() and ("", "weight", "fp8") in operands.kinds()
    operands.seen.clear()
    torch.autograd.grad(layer(x), x, torch.ones(2, 4, 32), is_grads_batched=True)
    assert {kind for _, kind, *_ in operands.seen} == {"input", "weight"}
    operands.seen.clear()
    torch.jit.trace(layer, torch.randn(4, 32), check_trace=False)
    assert operands.seen == []


def test_stored_gradients_are_announced_as_they_add_up():
    engine, model, _ = start("msamp_o2")
    gradients = Gradients()
    engine.observers.add(gradients)
    for _ in range(2):
        backward(engine, model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert len(gradients.seen) == 2 * len(matrices)
    for param in matrices:
        first, second = (stored for seen, stored in gradients.seen if seen is param)
        assert torch.equal(second, param.grad.dequantize()) and torch.allclose(second, 2 * first, rtol=0.2, atol=1e-4)


def test_detached_and_released_gradients_are_announced_before_they_are_taken():
    for options in ({"detached": True}, {"release": lambda param: setattr(param, "grad", None)}):
        observers, gradients = Observers(), Gradients()
        observers.add(gradients)
        layer = nn.Linear(32, 32, bias=False)
        Fp8Gradients(**options, observers=observers).cover(layer.parameters())
        layer(torch.randn(4, 32)).square().sum().backward()
        assert layer.weight.grad is None
        assert [param for param, _ in gradients.seen] == [layer.weight]


@pytest.mark.parametrize("listens", [False, True])
def test_without_a_subscriber_no_event_is_made(monkeypatch, listens):
    made = []
    announce = GemmPlan.announce
    monkeypatch.setattr(GemmPlan, "announce", lambda plan, *args: (made.append(args[0]), announce(plan, *args)))
    for name in EVENTS:
        monkeypatch.setattr(Observer, name, lambda *args: made.append(args))
    everything = type("Everything", (Observer,), {name: lambda *args: made.append(args) for name in EVENTS})
    for case in ("te_fp8", "msamp_o2", "bf16_mixed"):
        run = trainer(plugin(case), max_steps=2)
        run.precision_plugin.engine.observers.add(everything() if listens else Observer())
        run.fit(Net(), loader())
        assert bool(made) == listens
        made.clear()


@pytest.mark.parametrize("case", ["te_fp8", "msamp_o3", "bf16_mixed"])
def test_copies_of_a_model_announce_nothing(case):
    engine, model, _ = start(case)
    operands, gradients = Operands(), Gradients()
    engine.observers.add(operands)
    engine.observers.add(gradients)
    copied = copy.deepcopy(model)
    backward(engine, copied)
    assert operands.seen == gradients.seen == []
    backward(engine, model)
    assert operands.seen


def send(rank):
    """What a step of two processes announces, beside what reaches their process group."""
    found = {}
    for case in ("msamp_o2", "bf16_mixed", "te_fp8"):
        engine, model, optimizer = start(case)
        messages, gradients = Messages(), Gradients()
        engine.columns.comm.average_over(None)
        engine.observers.add(messages)
        engine.broadcast()
        weights, messages.seen = messages.seen, []
        engine.observers.add(gradients)
        with Traffic() as everything, engine.backward_context():
            backward(engine, model)
        during = list(messages.seen)
        with everything:
            engine.step.run(optimizer)
        stepped = list(messages.seen)
        with Traffic(observers=engine.observers) as counted, engine.backward_context():
            backward(engine, model)
        found[case] = {
            "weights": weights, "during": during, "stepped": stepped, "all": list(messages.seen),
            "sent": [(one.kind, str(one.dtype).removeprefix("torch.")) for one in everything.sent],
            "gradients": len(gradients.seen),
            "counted": [(one.kind, str(one.dtype).removeprefix("torch.")) for one in counted.sent],
        }  # fmt: skip
    reducer = GradientReducer([nn.Parameter(torch.ones(3))], None, lambda _: torch.float32)
    assert reducer.observers is NOBODY and broadcast_weights([torch.ones(2)]) is False
    return found


def test_messages_are_announced_with_their_purpose(tmp_path):
    for found in on_processes(2, tmp_path, send):
        for case, got in found.items():
            assert {(kind, purpose) for kind, *_, purpose in got["weights"]} == {("broadcast", "weight")}
            assert all(one[3] == 0 for one in got["all"])  # a process group sends all of them
            assert [one[:2] for one in got["stepped"]] == got["sent"]  # no more and no less than reaches it
            purposes = {purpose for *_, purpose in got["during"]}
            assert purposes == {"gradient", "flag"}
            kinds = {(kind, dtype) for kind, dtype, _, _, purpose in got["during"] if purpose == "gradient"}
            in_fp8 = {("all_to_all", "uint8"), ("all_gather", "uint8")} if case == "msamp_o2" else set()
            assert kinds == in_fp8 | {("all_reduce", "float32")}
            assert set(got["counted"]) == kinds  # neither amaxes nor flags
            more = {purpose for *_, purpose in got["all"]} - purposes
            assert more == (set() if case == "bf16_mixed" else {"amax"})
            assert got["gradients"] == (6 if case == "msamp_o2" else 0)
    (first, second) = on_processes(2, tmp_path, shard)
    assert first and first == second


def shard(rank):
    """Shapes of the whole gradients that are announced in two steps of a sharded model."""
    gradients, operands = Gradients(), Operands()
    options = {"strategy": "lowprec_sharded", "devices": 2, "use_distributed_sampler": False, "max_steps": 2}
    run = trainer(plugin("msamp_o2"), **options)
    run.precision_plugin.engine.observers.add(gradients)
    run.precision_plugin.engine.observers.add(operands)
    run.fit(Net(), loader())
    assert {one[1] for one in operands.seen} == set(KINDS)
    return [list(stored.shape) for _, stored in gradients.seen]
