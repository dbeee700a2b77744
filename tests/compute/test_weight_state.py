"""Quantized weights that layers keep from step to step (``weight_cache``): made once a step, and never old ones."""

import copy
import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import CASES, assert_same, level_of, plugin
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from nemo_lowprec import prepare
from nemo_lowprec.compute import ReferenceBackend, computation, weight_state
from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand
from nemo_lowprec.engine import Engine, Sharding
from nemo_lowprec.formats import E4M3, cast

FP8 = [case for case in CASES if level_of(case).has_fp8]
# One for each way of scaling and each format of weights: FP32, BF16, FP16 and FP8, the last with and without masters.
LEVELS = [
    "te_fp8", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_rowwise_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed+fp8_params", "bf16_with_fp8_current_scaling_mixed+fp8_params",
]  # fmt: skip
# Whose weights are written in place through ``.data`` without an error at the next step.
DATA = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_with_fp8_current_scaling_mixed+fp8_params"]
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
Y = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))


class Attends(nn.Module):
    """Attention over the sequence itself, and over another one, which multiplies with parts of a weight."""

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4)

    def forward(self, x):
        x = x.view(8, 4, 64)
        x = x + self.own(x, x, x, need_weights=False)[0]
        return self.other(x, x.flip(0), x.flip(0), need_weights=False)[0].flatten(0, 1)


class Recomputes(nn.Sequential):
    """Recomputes its layers in backward."""

    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class RecomputesReentrantly(Recomputes):
    reentrant = True


def linears():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def conv1d():
    return nn.Sequential(Conv1D(128, 64), nn.GELU(), Conv1D(64, 128))


def recomputed(kind=Recomputes):
    return nn.Sequential(nn.Linear(64, 64), kind(*linears()))


MODELS = {
    "linear": linears,
    "conv1d": conv1d,
    "attention": Attends,
    "recomputed": recomputed,
    "recomputed, reentrant": lambda: recomputed(RecomputesReentrantly),
}


def start(case, make=linears, weight_cache=True, **options):
    """(converted model, optimizer), the same at every call; the last layer is converted, too."""
    torch.manual_seed(1)
    name, _, variant = case.partition("+")
    model = make()
    options |= {"fp8_params": True} if variant else {}
    model, optimizer = prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), name, backend="reference", convert="*",
        weight_cache=weight_cache, **options,
    )  # fmt: skip
    assert Engine.of(model).amaxes.weights.keeps == weight_cache
    return model, optimizer


def loss_of(model, x=X, y=Y):
    return F.mse_loss(model(x).float(), y)


def step(model, optimizer, micro_batches=1):
    """The loss of each micro-batch before the step."""
    losses = []
    for i in range(micro_batches):
        loss = loss_of(model, X.roll(i, 0))
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def evaluated(model):
    """The output in evaluation; the model trains again afterwards."""
    model.eval()
    with torch.no_grad():
        out = model(X).clone()
    model.train()
    return out


def kept(model):
    return [state._kept for state in Engine.of(model).amaxes.weights.states.values()]


def assert_same_with_and_without(case, run, **options):
    """What ``run(model, optimizer)`` returns with kept weights; the same, bit for bit, as with none."""
    torch.manual_seed(5)
    found = run(*start(case, **options))
    torch.manual_seed(5)
    assert_same(found, run(*start(case, weight_cache=False, **options)))
    return found


class WeightCast:
    """What the kernel does, on a CPU: it writes operands in place, which torch does not count."""

    def cast(self, jobs, numbers):
        assert len(set(numbers)) == len(jobs)
        for weight, scale, scale_inv, row, col in jobs:
            values = weight
            if scale is not None:
                values = cast(weight.float() * scale, E4M3)
                scale_inv.data.copy_(scale.reciprocal())
            for operand, written in ((row, values), (col, values.t())):
                if operand is not None:
                    operand.data.copy_(written)


def in_memory_of_its_own(part, rowwise, columnwise):
    """The orientations of an operand as on a GPU."""
    return QuantizedOperand(
        Orientation(part.data.contiguous(), part.scale_inv, None) if rowwise else None,
        Orientation(part.data.t().contiguous(), part.scale_inv, None) if columnwise else None,
    )


@pytest.fixture(autouse=True, params=["anew", "in place"])
def made(request, monkeypatch):
    """How quantized weights are made once they were written: as on a CPU, and as by the kernel of a GPU."""
    if request.param == "in place":
        monkeypatch.setattr(weight_state, "weight_kernels", lambda: SimpleNamespace(WeightCast=WeightCast))
        monkeypatch.setattr(weight_state, "_kernel_takes", Tensor.is_contiguous)
        monkeypatch.setattr(ReferenceBackend, "_orient", staticmethod(in_memory_of_its_own))


anew = pytest.mark.parametrize("made", ["anew"], indirect=True)


@pytest.fixture
def quantized(monkeypatch):
    """How often a weight was quantized, or read from its storage in FP8."""
    counts = {"weight": 0}

    def count(name, is_weight):
        original = getattr(ReferenceBackend, name)

        def counted(self, values, *args, **options):
            counts["weight"] += is_weight(*args)
            return original(self, values, *args, **options)

        monkeypatch.setattr(ReferenceBackend, name, counted)

    count("quantize", lambda operand: operand.kind == "weight")
    count("from_storage", lambda: True)
    return counts


# Once a step


@anew
@pytest.mark.parametrize("case", LEVELS)
def test_a_weight_is_quantized_once_a_step(case, quantized):
    model, optimizer = start(case)
    for _ in range(3):
        quantized["weight"] = 0
        step(model, optimizer, micro_batches=4)
        assert quantized["weight"] == 2
    evaluated(model)
    assert quantized["weight"] == 4  # once more, since ``.data`` may have been written
    evaluated(model)
    assert quantized["weight"] == 6
    model.eval()
    for _ in range(3):
        loss_of(model)
    assert quantized["weight"] == 8


def test_without_the_option_a_weight_is_quantized_at_each_use(quantized):
    model, optimizer = start("te_fp8", weight_cache=False)
    step(model, optimizer, micro_batches=4)
    assert quantized["weight"] == 8 and kept(model) == [None, None]


@anew
@pytest.mark.parametrize("kind", [Recomputes, RecomputesReentrantly])
def test_a_recomputed_forward_pass_reads_the_kept_weights(kind, quantized):
    model, optimizer = start("te_fp8", lambda: recomputed(kind))
    for _ in range(2):
        quantized["weight"] = 0
        step(model, optimizer, micro_batches=4)
        # Under no_grad, in which reentrant checkpointing runs first, no transpose is wanted yet.
        assert quantized["weight"] == (5 if kind is RecomputesReentrantly else 3)


def test_a_skipped_evaluation_of_the_same_weights_costs_nothing(quantized):
    model, _ = start("te_fp8")
    model.eval()
    with torch.inference_mode():
        first, second = model(X), model(X)
    assert torch.equal(first, second) and quantized["weight"] == 2


# The same bits


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", FP8)
def test_losses_are_those_without_kept_weights(case, model):
    def run(model, optimizer):
        losses = [step(model, optimizer, micro_batches=2) for _ in range(3)]
        out = evaluated(model)
        losses += [step(model, optimizer) for _ in range(2)]
        return losses, out, {name: value.clone() for name, value in model.state_dict().items()}

    losses, *_ = assert_same_with_and_without(case, run, make=MODELS[model])
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False), (True, True, False)])
def test_gemms_in_half_precision_too(flags):
    assert_same_with_and_without(
        "te_fp8", lambda m, o: [step(m, o, 2) for _ in range(3)], override_linear_precision=flags
    )  # fmt: skip


@pytest.mark.parametrize("case", LEVELS)
def test_a_graph_goes_backward_twice(case):
    def run(model, optimizer):
        step(model, optimizer)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        once = [p.grad.clone().float() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        assert_same(once, [p.grad.clone().float() for p in model.parameters()])
        return once

    assert_same_with_and_without(case, run)


@pytest.mark.parametrize("case", LEVELS)
def test_second_derivatives(case):
    def run(model, optimizer):
        step(model, optimizer)
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach(), [p.grad.clone().float() for p in model.parameters() if p.grad is not None]

    assert_same_with_and_without(case, run)


# Weights that something else than the optimizer writes


def copied(model):
    with torch.no_grad():
        model[0].weight.copy_(torch.full((128, 64), 0.25))


def clamped(model):
    with torch.no_grad():
        model[0].weight.clamp_(-0.02, 0.02)


def loaded(model):
    model.load_state_dict({name: torch.full_like(v, 0.125) for name, v in model.state_dict().items()})


def replaced(model):
    with torch.no_grad():
        model[0].weight = nn.Parameter(torch.full((128, 64), 0.25, dtype=model[0].weight.dtype))


def put_in_data(model):
    model[0].weight.data = torch.full((128, 64), 0.25, dtype=model[0].weight.dtype)


def pruned(model):
    prune.random_unstructured(model[0], "weight", amount=0.9)


WRITES = [copied, clamped, loaded, replaced, put_in_data, pruned]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("case", LEVELS)
def test_a_written_weight_is_seen_at_the_next_forward(case, write):
    def run(model, optimizer):
        step(model, optimizer)
        losses = [loss_of(model).item()]
        write(model)
        losses += [loss_of(model).item() for _ in range(2)]
        return losses, evaluated(model)

    losses, _ = assert_same_with_and_without(case, run)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("case", DATA)
def test_what_is_written_through_data_is_seen_after_a_step_and_in_evaluation(case):
    def run(model, optimizer):
        step(model, optimizer)
        model[0].weight.data.mul_(0.5)  # before the first forward since the step
        out = [loss_of(model).detach()]
        model[0].weight.data.mul_(0.5)
        return [*out, evaluated(model)]

    before, after = assert_same_with_and_without(case, run)
    model, optimizer = start(case)
    step(model, optimizer)
    assert before != loss_of(model) and not torch.equal(after, evaluated(model))


@pytest.mark.parametrize("case", DATA)
def test_averaged_weights_are_swapped_in_for_evaluation(case):
    def run(model, optimizer):
        average = [p.detach().clone() for p in model.parameters()]
        out = []
        for _ in range(2):
            out += step(model, optimizer, micro_batches=2)
            own = [p.detach().clone() for p in model.parameters()]
            for p, mean in zip(model.parameters(), average, strict=True):
                p.data.copy_(mean)
            out.append(evaluated(model))
            for p, value in zip(model.parameters(), own, strict=True):
                p.data.copy_(value)
            out += [evaluated(model), loss_of(model).detach()]
        return out

    out = assert_same_with_and_without(case, run)
    assert torch.equal(out[2], out[7])  # of the averaged weights, after each step
    assert not torch.equal(out[2], out[3])


@pytest.mark.parametrize("case", LEVELS)
def test_weights_of_a_functional_call(case):
    """Each tensor is quantized for itself, also one at the address of an earlier one."""

    def run(model, optimizer):
        step(model, optimizer)
        out = []
        for factor in (1.0, 0.5, 0.25, 0.125):
            weights = {name: p.detach().float() * factor for name, p in model.named_parameters()}
            out.append(functional_call(model, weights, (X,)).detach())
            del weights
        return [*out, loss_of(model).detach()]

    out = assert_same_with_and_without(case, run)
    assert all(not torch.equal(a, b) for a, b in pairwise(out))


def test_a_graph_lives_on_while_other_weights_take_the_places_of_its_own():
    def run(model, optimizer):
        step(model, optimizer)
        loss = loss_of(model)
        with torch.no_grad():  # a teacher, as in self-distillation
            functional_call(model, {name: p * 0.5 for name, p in model.named_parameters()}, (X,))
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    assert_same_with_and_without("te_fp8", run)


def test_torch_may_swap_a_weight_that_was_quantized():
    """``swap_tensors``, of ``module.to()`` on request, refuses tensors that something holds weakly."""

    def run(model, optimizer):
        step(model, optimizer)
        before = loss_of(model).detach()
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach() * 0.5))
        assert loss_of(model) != before
        return loss_of(model).detach()

    assert_same_with_and_without("te_fp8", run)


def test_inference_tensors_are_not_kept(quantized):
    with torch.inference_mode():
        model, _ = start("te_fp8")
        model.eval()
        first = model(X).clone()
        model[0].weight.mul_(0.5)  # which torch does not count
        assert not torch.equal(first, model(X)) and kept(model) == [None, None]


def test_evaluation_in_inference_mode_before_and_between_steps():
    def run(model, optimizer):
        out = []
        for _ in range(3):
            model.eval()
            with torch.inference_mode():
                out.append(model(X).clone())
            model.train()
            out += step(model, optimizer, micro_batches=2)
        return out

    assert_same_with_and_without("te_fp8", run)


# Graphs that were made before a step


def graph_over_a_step(model, optimizer, pass_grad):
    """(gradients before the own step, gradients of the same graph after it)."""
    step(model, optimizer)
    x = X.clone().requires_grad_(pass_grad)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    before = x.grad.clone()
    x.grad = None
    optimizer.step()
    loss_of(model)  # makes the quantized weights anew
    loss.backward()
    return before, x.grad


@anew
@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_current_scaling_mixed", "msamp_o2"])
def test_backward_over_a_step_reads_the_weights_of_the_forward_pass(case):
    """``nn.Linear`` refuses. The reference backend makes new operands, and its graphs keep the old ones."""
    before, after = graph_over_a_step(*start(case), True)
    # The second pass has other gradients in its own history, and the same weights.
    torch.testing.assert_close(before, after, rtol=0.15, atol=before.abs().max().item() * 0.1)


def test_nn_linear_refuses_a_backward_over_a_step():
    model = linears()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph_over_a_step(model, torch.optim.AdamW(model.parameters()), True)


def assert_refuses(case):
    model, optimizer = start(case)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph_over_a_step(model, optimizer, True)


@pytest.mark.parametrize("case", ["msamp_o3", "bf16_with_fp8_current_scaling_mixed+fp8_params"])
def test_a_weight_stored_in_fp8_refuses_too(case):
    """Its storage is the operand, and is written."""
    assert_refuses(case)


@pytest.mark.parametrize("made", ["in place"], indirect=True)
@pytest.mark.parametrize("case", ["te_fp8", "msamp_o2", "bf16_with_fp8_mixed"])
def test_operands_that_are_made_in_place_refuse_too(case):
    assert_refuses(case)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = linears(), linears()


@pytest.mark.parametrize("case", LEVELS)
def test_two_halves_with_an_optimizer_each(case):
    """In the order of torch's DCGAN: the critic steps between forward and backward of the generator."""

    def run(model, _):
        adam = {half: torch.optim.AdamW(getattr(model, half).parameters(), lr=1e-2) for half in ("generator", "critic")}
        losses = []
        for _ in range(4):
            adam["critic"].zero_grad()
            real = loss_of(model.critic)
            real.backward()
            fake = model.generator(X)
            false = loss_of(model.critic, fake.detach(), -Y)
            false.backward()
            adam["critic"].step()
            adam["generator"].zero_grad()
            fooled = loss_of(model.critic, fake)
            fooled.backward()
            adam["generator"].step()
            losses += [real.item(), false.item(), fooled.item()]
        return losses

    losses = assert_same_with_and_without(case, run, make=Gan)
    assert len(set(losses)) == len(losses)


# Copies, conversions, processes


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("case", LEVELS)
def test_a_copy_keeps_nothing_and_trains(case, copy_of):
    model, optimizer = start(case)
    step(model, optimizer)
    loss = loss_of(model).item()
    twin = copy_of(model)
    states = [module.gemm_plan.weight for module in twin.modules() if hasattr(module, "gemm_plan")]
    assert len(states) == 2 and all(not state.keeps and state._kept is None for state in states)
    losses = []
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        found = loss_of(twin)
        found.backward()
        plain.step()
        plain.zero_grad()
        losses.append(found.item())
    assert all(state._kept is None for state in states)
    assert losses[0] == pytest.approx(loss, rel=0.05) and losses[2] < losses[0]
    assert loss_of(model).item() == loss  # the copy's steps are no steps of the model


def test_a_reverted_model_keeps_nothing_and_is_converted_again():
    def run(model, optimizer):
        step(model, optimizer)
        engine = Engine.of(model)
        states = engine.amaxes.weights.states
        engine.revert()
        assert [state._kept for state in states.values()] == [None, None]
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        engine.convert(model, torch.device("cpu"))
        engine.settle()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine.attach(optimizer)
        return [step(model, optimizer, micro_batches=2) for _ in range(2)]

    assert_same_with_and_without("te_fp8", run)


def test_weights_that_are_gathered_from_shards_are_not_kept():
    for weight_cache in ("auto", False, True):
        engine = plugin("bf16_with_fp8_mixed", weight_cache=weight_cache).engine
        engine.sharding = Sharding(None, None)
        if weight_cache is True:
            with pytest.raises(ValueError, match="weight_cache=True: no weights are kept with sharded weights"):
                engine.convert(linears(), torch.device("cpu"))
            continue
        engine.convert(linears(), torch.device("cpu"))
        engine.columns.computation.settle()
        assert not engine.amaxes.weights.keeps


@pytest.mark.parametrize(("weight_cache", "keeps"), [("auto", False), (True, True), (False, False)])
def test_auto_keeps_the_weights_of_small_models(weight_cache, keeps, monkeypatch):
    elements = 2 * 64 * 128
    for limit, small in ((elements, weight_cache == "auto" or keeps), (elements - 1, keeps)):
        monkeypatch.setattr(computation, "_KEPT_WEIGHTS", limit)
        engine = plugin("bf16_with_fp8_mixed", weight_cache=weight_cache, convert="*").engine
        engine.convert(linears(), torch.device("cpu"))
        engine.settle()
        assert engine.amaxes.weights.keeps == small
