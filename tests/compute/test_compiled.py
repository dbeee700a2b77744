"""Converted layers inside of ``torch.compile``: one graph, and bit for bit the numbers without it.

``aot_eager`` runs the operators that the compiler has recorded as they are, so that results are equal. ``inductor``
fuses what is around them, and rounds less often. In compiled code each layer computes by itself, which rounds otherwise
than layers that compute as one (``test_group.py``); so no layers compute as one in these tests.
"""

import copy
import gc
import io
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import graph_of
from nemo_lowprec.compat.capture import hidden_capture
from nemo_lowprec.compat.compiler import overwriting_saved_tensors, without_compiling
from nemo_lowprec.compute import ReferenceBackend, compiled_ops, convert_layers, gemm_plans, revert_layers
from nemo_lowprec.compute.graph_entry import GraphEntry, plan_of
from nemo_lowprec.compute.graphs.constants import known_integers_of
from nemo_lowprec.compute.graphs.twins import twin_of, with_twins
from nemo_lowprec.compute.half_linear import HalfLinear
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.formats import E4M3, DelayedScaling
from nemo_lowprec.observers import Observer, Observers
from nemo_lowprec.tensors import GradientTensor
from tests.operators import watch_operators
from tests.support import CASES, Counting, Net, level_of, train

pytestmark = pytest.mark.usefixtures("single_layers", "fresh_compiler")

TOKENS = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(5))
SCALINGS = ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"]
SOME = ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2", "msamp_o3"]


class Block(nn.Module):
    """A transformer block with the shapes of timm's, and parameters that it reads itself, as Swin and CaiT do."""

    def __init__(self, size=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q, self.k, self.v, self.proj = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.table, self.gamma = nn.Parameter(torch.randn(3, size)), nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.register_buffer("chosen", torch.tensor([1]))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = (x + self.table[self.chosen] + self.gamma * self.proj(attended)).to(x.dtype)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed, self.head = nn.Linear(48, 32), nn.Linear(32, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


def vit(depth=2):
    torch.manual_seed(0)
    return ViT(depth)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip


def options_of(case):
    fp8 = {"backend": "reference"} if level_of(case).has_fp8 else {}
    return {"level": case.partition("+")[0], **fp8, **({"fp8_params": True} if "fp8_params" in case else {})}


def half_of(case):
    return torch.float16 if "fp16" in case else torch.bfloat16


def llama_loss(model, half, tokens=TOKENS):
    with torch.autocast("cpu", half):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def images(i=0, rows=3):
    return torch.randn(rows, 5, 48, generator=torch.Generator().manual_seed(i))


def vit_loss(model, half, x):
    with torch.autocast("cpu", half):
        return model(x).float().pow(2).mean()


def compile_blocks(model, backend="aot_eager", **options):
    for block in model.model.layers if hasattr(model, "model") else model.blocks:
        block.compile(backend=backend, fullgraph=True, **options)


class Run:
    """A model that is prepared for a level, in a plain loop."""

    def __init__(self, case, model, compiled, backend="aot_eager", **options):
        self.half, self.model = half_of(case), model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = prepare(model, optimizer, **options_of(case), **options)
        self.losses = []
        if compiled:
            compile_blocks(self.model, backend)

    def backward(self, i=0, x=None):
        torch.manual_seed(len(self.losses))  # NVFP4 rounds at random
        if isinstance(self.model, ViT):
            loss = vit_loss(self.model, self.half, images(i) if x is None else x)
        else:
            loss = llama_loss(self.model, self.half, TOKENS if x is None else x)
        loss.backward()
        self.losses.append(loss.item())

    def step(self, *micro_batches):
        for i in micro_batches or (len(self.losses),):
            self.backward(i)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        histories = self.optimizer.state_dict().get("fp8_histories")
        return str(histories), [p.detach().clone() for p in self.model.parameters()]


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_alike(runs):
    eager, compiled = runs
    assert eager.losses == compiled.losses
    (history, weights), (other, others) = eager.state(), compiled.state()
    assert history == other
    assert_equal(weights, others)


def assert_equal(wanted, got):
    for want, have in zip(wanted, got, strict=True):
        assert (want is None) == (have is None)
        assert want is None or (want.dtype == have.dtype and torch.equal(want, have))


def both(case, make=vit, **options):
    return [Run(case, make(), compiled, **options) for compiled in (False, True)]


# Every level


@pytest.mark.parametrize("case", CASES)
def test_compiled_llama_blocks_train_bit_for_bit_as_without(case):
    runs = both(case, llama)
    for run in runs:
        for _ in range(6):
            run.step()
    assert_alike(runs)


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("make", [vit, llama])
def test_gradients_of_a_compiled_block_are_those_without(make, case):
    runs = both(case, make)
    for run in runs:
        run.step()
        run.backward()
    assert_equal(gradients(runs[0].model), gradients(runs[1].model))


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("make", [vit, llama])
def test_a_whole_model_is_one_graph(make, case):
    model = prepare(make(), **options_of(case))[0]

    def call(model):
        return llama_loss(model, half_of(case)) if make is llama else model(images())

    # The hooks of ``prepare`` stand around the model's forward.
    model.forward, whole = model.forward, call
    inner = model.model if make is llama else model.blocks
    inputs = {"input_ids": TOKENS, "use_cache": False} if make is llama else {"input": images()[..., :32]}
    with torch.autocast("cpu", half_of(case)):
        found = torch._dynamo.explain(inner)(**inputs)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
    assert whole(model) is not None


@pytest.mark.parametrize("case", SOME)
def test_a_whole_compiled_model_trains_alike(case):
    runs = [Run(case, llama(), False) for _ in range(2)]
    runs[1].model.compile(backend="aot_eager")
    for run in runs:
        for _ in range(4):
            run.step()
    # torch itself sums gradients of an unconverted Llama in another order when it compiles more than a block.
    torch.testing.assert_close(runs[0].losses, runs[1].losses, rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_inductor_trains_alike_within_its_own_rounding(case):
    runs = [Run(case, vit(1), compiled, "inductor") for compiled in (False, True)]
    for run in runs:
        for i in range(6):
            run.step(i)
    torch.testing.assert_close(runs[0].losses, runs[1].losses, rtol=0.03, atol=0)


@pytest.mark.parametrize("case", ["te_fp8", "msamp_o2"])
def test_a_loop_without_autocast_of_its_own_compiles_the_model(case):
    plain, compiled = (prepare(vit(), **options_of(case))[0] for _ in range(2))
    compiled.compile(backend="aot_eager")
    assert torch.equal(plain(images()), compiled(images()))


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("make", [vit, llama])
@pytest.mark.parametrize("in_place", [False, True])
def test_operators_write_their_results_alone(make, case, in_place, monkeypatch):
    """The compiler gives an argument's memory away, and runs a kernel several times to choose how it runs."""
    dgrad = ReferenceBackend.dgrad

    def adds_in_place(self, grad_output, weight, out_dtype, total=None):
        found = dgrad(self, grad_output, weight, out_dtype, total)
        return found if total is None else total.copy_(found)

    if in_place:  # as the backends of GPUs do
        monkeypatch.setattr(ReferenceBackend, "dgrad", adds_in_place)
    runs, called = both(case, make), watch_operators(monkeypatch)
    for run in runs:
        for _ in range(2):
            run.step()
    assert_alike(runs)
    assert {f"nemo_lowprec::{name}" for name in ("quantize", "fprop", "dgrad", "add_dgrad", "wgrad")} == called


# What is shared


def converted(model, scaling="delayed", backend=None, fp32_wgrad=False, observers=None, **layers):
    recipe = Recipe(scaling, fp8="e4m3")
    histories = new_histories(recipe)
    more = {} if observers is None else {"observers": observers}
    convert_layers(
        model, torch.bfloat16, recipe, backend or ReferenceBackend(), None, LayerFilter(**layers), histories,
        fp32_wgrad=fp32_wgrad, **more,
    )  # fmt: skip
    return model, histories


@pytest.mark.parametrize("scaling", SCALINGS)
def test_q_k_and_v_quantize_their_input_once(scaling):
    backend = Counting()
    model, _ = converted(vit(1), scaling, backend, skip=["embed"])
    compile_blocks(model)
    for i in range(2):
        vit_loss(model, torch.bfloat16, images(i)).backward()
    assert backend.inputs == 2 * (1 + 3)  # of q, k and v; of proj, up and down


@pytest.mark.parametrize("case, options", [*((case, {}) for case in CASES), *((c, {"skip": ["*norm*"]}) for c in SOME)])
def test_blocks_of_the_same_code_share_their_graphs(case, options):
    run = Run(case, vit(4), False, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(run.model, counter)
    run.step()
    assert counter.frame_count == 1
    run.step()
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", [*SOME, "bf16_mixed"])
def test_a_second_model_of_the_same_code_takes_the_graphs_of_the_first(case):
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(2):
        run = Run(case, vit(2), True, counter)
        run.step()
        assert counter.frame_count == 1


@pytest.mark.parametrize("case", [*SOME, "bf16_mixed"])
def test_gradients_are_there_when_the_backward_pass_of_their_block_is_over(case):
    """In the first pass and in later ones: FSDP2 and DDP reduce them then."""
    run, arrived = Run(case, vit(3), True), []

    def watch_input(block, args):
        args[0].register_hook(lambda _: arrived.append("input"))

    for name, param in run.model.blocks.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(int(name[0])))
    for block in run.model.blocks[1:]:
        block.register_forward_pre_hook(watch_input)
    for _ in range(3):
        run.step()
        assert [what for what, _ in groupby(arrived)] == [2, "input", 1, "input", 0]
        arrived.clear()


# How people train


@pytest.mark.parametrize("case", SOME)
def test_micro_batches_accumulate(case):
    runs = both(case)
    for run in runs:
        for i in range(3):
            run.step(3 * i, 3 * i + 1, 3 * i + 2)
    assert_alike(runs)


@pytest.mark.parametrize("case", SOME)
def test_evaluation_in_between_changes_nothing(case):
    runs, seen = both(case), []
    for run in runs:
        for i in range(3):
            run.step(i)
            run.model.eval()
            with torch.no_grad(), torch.autocast("cpu", run.half):
                seen.append(run.model(images(9)))
            with torch.inference_mode(), torch.autocast("cpu", run.half):
                seen.append(run.model(images(8)))
            run.model.train()
    assert_alike(runs)
    assert_equal(seen[:6], seen[6:])


@pytest.mark.parametrize("case", SOME)
def test_weights_are_frozen_and_thawed(case):
    runs = both(case)
    for run in runs:
        weights = [run.model.blocks[0].q.weight, run.model.blocks[1].up.weight]
        for trains in (True, False, True):
            for weight in weights:
                weight.requires_grad_(trains)
            run.backward()
            assert all((weight.grad is not None) is trains for weight in weights)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert_alike(runs)


@pytest.mark.parametrize("case", SOME)
def test_batches_of_varying_length_take_two_graphs(case):
    runs = both(case)
    for block in runs[1].model.blocks:
        block._compiled_call_impl = None
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(runs[1].model, counter)
    for run in runs:
        for i, rows in enumerate((3, 5, 4, 7, 9)):
            run.backward(x=images(i, rows))
            if i % 2:  # so that the second graph is traced while there are gradients
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert_alike(runs)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_compiled(case, reentrant):
    runs = both(case)
    for run in runs:
        for block in run.model.blocks:
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = lambda x, call=call: checkpoint(call, x, use_reentrant=reentrant)
        for i in range(3):
            run.step(i)
    assert_alike(runs)


@pytest.mark.parametrize("case", SOME)
def test_checkpointing_inside_of_a_graph(case):
    class Recomputed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    runs = [Run(case, vit(), False) for _ in range(2)]
    for run in runs:
        run.model.blocks = nn.Sequential(*map(Recomputed, run.model.blocks))
    compile_blocks(runs[1].model)
    for run in runs:
        for i in range(3):
            run.step(i)
    assert_alike(runs)


@pytest.mark.parametrize("case", SOME)
def test_weights_that_are_written_between_passes_are_followed(case):
    runs, other = both(case), vit().state_dict()
    for run in runs:
        run.step(0)
        run.step(1)
        with torch.no_grad():
            run.model.blocks[0].q.weight.mul_(3.0)
        run.backward(2)
        run.model.load_state_dict({name: 2 * value for name, value in other.items()})
        run.backward(3)
    assert runs[0].losses == runs[1].losses
    assert runs[0].state()[0] == runs[1].state()[0]


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed"])
def test_a_copy_of_a_compiled_model_computes_by_itself(case):
    seen = []
    for run in both(case):
        run.step(0)
        clone = copy.deepcopy(run.model)
        run.step(1)
        compile_blocks(clone)
        loss = vit_loss(clone, run.half, images(2))
        loss.backward()
        seen.append((loss, gradients(clone)))
    assert torch.equal(seen[0][0], seen[1][0])
    assert_equal(seen[0][1], seen[1][1])


def test_a_model_that_was_saved_whole_compiles():
    model, _ = converted(vit(), "current")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    compile_blocks(again)
    assert torch.equal(vit_loss(model, torch.bfloat16, images()), vit_loss(again, torch.bfloat16, images()))


@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_a_model_is_reverted_and_converted_again(scaling):
    model, plain = vit(), vit()
    compile_blocks(model)
    for _ in range(2):
        for one in (model, plain):
            converted(one, scaling)
            vit_loss(one, torch.bfloat16, images()).backward()
        assert_equal(gradients(plain), gradients(model))
        for one in (model, plain):
            revert_layers(one)
    assert torch.equal(vit_loss(plain, torch.bfloat16, images()), vit_loss(model, torch.bfloat16, images()))


@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "msamp_o2", "msamp_o3"])
def test_a_compiled_model_is_fitted_twice(case):
    losses = []
    for compiled in (False, True):
        model = Net()
        for layer in (model.inp, model.norm, model.mid, model.head) if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            train(model, case, max_steps=3)
        losses.append(model.losses)
    assert losses[0] == losses[1]


# Autograd


@pytest.mark.parametrize("case", SOME)
def test_hooks_of_weights_see_their_gradients(case):
    runs, seen = both(case), []
    for run in runs:
        weight = run.model.blocks[0].up.weight
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        run.backward(0)
        run.backward(1)
    assert len(seen) == 4
    assert_equal(seen[:2], seen[2:])


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed"])
def test_autograd_grad_reaches_weights_and_inputs(case):
    seen = []
    for run in both(case):
        x = images().requires_grad_()
        loss = vit_loss(run.model, run.half, x)
        seen.append(torch.autograd.grad(loss, [run.model.blocks[1].q.weight, x]))
    assert_equal(*seen)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_input_of_the_caller_gets_the_same_gradient(scaling):
    seen = []
    for compiled in (False, True):
        block, _ = converted(Block(), scaling)
        torch.manual_seed(1)
        nn.init.normal_(block.q.weight)
        for module in (block.norm1, block.norm2):
            module.forward = lambda x: x  # the caller's tensor itself is what q, k and v read
        call = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
        torch.manual_seed(2)
        for param in block.parameters():
            nn.init.normal_(param, std=0.1)
        x = images()[..., :32].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        out.float().pow(2).sum().backward()
        seen.append([out.detach(), x.grad])
    assert_equal(*seen)


def test_weights_replaced_by_functional_call():
    model, _ = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "current")
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x = torch.randn(4, 32)
    compiled = torch.compile(lambda x: torch.func.functional_call(model, other, (x,)), backend="aot_eager")
    assert torch.equal(compiled(x), torch.func.functional_call(model, other, (x,)))


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_current_scaling_mixed"])
def test_backward_reads_the_weight_of_its_own_forward(case):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), **options_of(case))[0]
        other = {name: torch.randn_like(p) for name, p in model.named_parameters()}

        def replaced(x, model=model, other=other):
            return torch.func.functional_call(model[0], {"weight": other["0.weight"]}, (x,))

        call = torch.compile(replaced, backend="aot_eager") if compiled else replaced
        x = torch.randn(4, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
            model(x)  # with its own weight, which the layer keeps now
        out.float().sum().backward()
        results.append(x.grad)
    # The input's history is started anew one operator later than without compile.
    assert (results[0] - results[1]).norm() < 0.05 * results[0].norm()


def test_hooks_of_a_layer_that_breaks_the_graph_run_once():
    model, seen = nn.Sequential(nn.Linear(32, 32)), []
    converted(model, "current")
    model[0].gemm_plan.entry = None
    model[0].register_forward_hook(lambda *_: seen.append(True))
    torch.compile(model, backend="aot_eager")(torch.ones(4, 32))
    assert len(seen) == 1


# Layers of other kinds


@pytest.mark.parametrize("scaling", ["delayed", "blockwise"])
def test_transposed_weights_and_half_gemms(scaling):
    from transformers.pytorch_utils import Conv1D

    def run(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(Conv1D(64, 32), nn.Tanh(), nn.Linear(64, 32))
        recipe = Recipe(scaling, fp8="e4m3", override_linear_precision=(False, True, False))
        convert_layers(
            model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(convert=["*"]), new_histories(recipe)
        )
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = call(torch.randn(24, 32))
        out.sum().backward()
        return [out.detach(), *gradients(model)]

    assert_equal(run(False), run(True))


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2"])
@pytest.mark.parametrize("cross", [False, True])
def test_torchs_attention(case, cross):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.out = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

        def forward(self, x):
            return self.out(self.attn(x, x * 2 if cross else x, x * 2 if cross else x, need_weights=False)[0])

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = prepare(Attends(), **options_of(case))[0]
        if compiled:
            model.attn.compile(backend="aot_eager", fullgraph=True)
        x = images()[..., :32].clone()
        with torch.autocast("cpu", half_of(case)):
            model(x).float().pow(2).sum().backward()
        results.append(gradients(model))
    assert_equal(*results)


@pytest.mark.parametrize("cross", [False, True])
def test_torchs_attention_that_was_left_alone(cross):
    attn = nn.MultiheadAttention(32, 2, batch_first=True)
    convert_layers(nn.ModuleList([attn]), torch.bfloat16, None, ReferenceBackend(), None, LayerFilter(), None)
    assert not attn.gemm_plans
    x = images()[..., :32].clone()
    y = x * 2 if cross else x
    want = attn(x, y, y, need_weights=False)[0]
    call = torch.compile(attn, backend="aot_eager", fullgraph=True)
    assert torch.equal(want, call(x, y, y, need_weights=False)[0])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_half_layers_keep_their_fp32_gradients(half, bias):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias), nn.Linear(32, 16, bias)).to(half)
        converted(model, fp32_wgrad=True, skip=["*"])
        for param in model.parameters():
            param.grad_dtype = torch.float32
        assert all(type(layer) is HalfLinear for layer in model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            call(torch.randn(24, 32, dtype=half)).float().pow(2).sum().backward()
        results.append([layer.weight.grad for layer in model])
        assert all(grad.dtype == torch.float32 for grad in results[-1])
        results[-1] += [layer.bias.grad for layer in model if bias]
        with torch.no_grad():
            results[-1].append(call(torch.ones(3, 32, dtype=half)))
    assert_equal(*results)


def test_inputs_without_elements_and_one_row():
    for rows in (0, 1):
        results = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model, _ = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            x = torch.ones(rows, 32, requires_grad=True)
            call(x).sum().backward()
            results.append([x.grad, *gradients(model)])
        assert_equal(*results)


# Observers


def test_observers_see_the_operands_of_compiled_layers():
    class Sees(Observer):
        def __init__(self):
            self.seen = []

        def quantized(self, layer, kind, values, operand, backend):
            self.seen.append(
                (layer, kind, tuple(values.shape), values.double().sum().item(), backend.describe(operand))
            )

    results = []
    for compiled in (False, True):
        observers, sees = Observers(), Sees()
        model, _ = converted(vit(1), observers=observers)
        if compiled:
            compile_blocks(model)
        with observers.watched_by(sees):
            vit_loss(model, torch.bfloat16, images()).backward()
        results.append(sorted(sees.seen))
    assert results[0] == results[1]


# CUDA graphs: what the operators decide while a graph is recorded


@pytest.fixture
def capturing(monkeypatch):
    """Operators run as if a CUDA graph were recorded."""

    def switch(on):
        monkeypatch.setattr(compiled_ops, "_captures", lambda tensor: on)

    return switch


def tags(model):
    plans = [plan for module in model.modules() for plan in gemm_plans(module).values()]
    return [plan.entry.tag.data_ptr() for plan in plans if plan.recipe is not None]


@pytest.mark.parametrize("case", SOME)
def test_recorded_operators_compute_the_same(case, capturing):
    runs = both(case)
    for run in runs:
        for i in range(4):
            capturing(i != 1)
            run.step(i)
    assert_alike(runs)


def test_a_recorded_operator_measures_and_quantizes_its_weight_itself(capturing):
    run = Run("te_fp8", vit(1), True)
    run.step()
    capturing(True)
    plan = run.model.blocks[0].q.gemm_plan
    kept = plan.weight._kept
    run.model.eval()
    with torch.no_grad():
        weight = run.model.blocks[0].q.weight
        weight.data.mul_(2.0)  # which nobody can see
        run.model(images())
        assert plan.weight.amax == weight.abs().max()
    assert plan.weight._kept is kept


def test_graphs_are_recorded_again_when_an_operands_history_begins_or_starts_anew(capturing):
    run = Run("bf16_with_fp8_mixed", vit(1), True)
    capturing(True)
    run.backward(0)
    cold = tags(run.model.blocks)
    run.backward(1)
    assert tags(run.model.blocks) == cold
    run.optimizer.step()  # the histories begin
    warm = tags(run.model.blocks)
    assert not set(warm) & set(cold)
    run.step(2)
    run.step(3)
    assert tags(run.model.blocks) == warm
    run.model.blocks[0].q.weight.data = run.model.blocks[0].q.weight.data * 2  # which starts a new history
    capturing(False)
    run.step(4)
    changed = [a != b for a, b in zip(warm, tags(run.model.blocks), strict=True)]
    assert 0 < sum(changed) < len(changed)


def test_a_cold_operand_is_asked_for_its_history_though_replays_do_not_record(capturing):
    histories = DelayedScaling(4)
    histories.add_all({"a": E4M3})
    slot, released = histories.slots["a"], []
    slot.captured = lambda: released.append(True)
    slot.record(torch.tensor(0.0))
    histories.update()
    assert slot.cold and not released
    slot.amax.fill_(2.0)  # by a replay
    histories.update()
    assert not slot.cold and released == [True] and slot.captured is None


def test_kept_weights_are_made_anew_before_a_graph_that_reads_them(monkeypatch):
    run, seen = Run("te_fp8", vit(1), False), []
    run.step()
    states = [plan.weight for m in run.model.modules() for plan in gemm_plans(m).values() if plan.weight is not None]
    monkeypatch.setattr(type(states[0]), "refresh", lambda self: seen.append(self))
    run.step()
    assert not seen
    monkeypatch.setattr(GraphEntry, "recorded", True)
    run.step()
    assert set(map(id, seen)) == set(map(id, states))


def test_a_layer_that_is_gone_is_named():
    model, _ = converted(nn.Sequential(nn.Linear(32, 32)), "current")
    entry = model[0].gemm_plan.entry
    entry.prepare()
    tag = entry.tag
    del model, entry
    gc.collect()
    with pytest.raises(RuntimeError, match="that is gone"):
        plan_of(tag)


# Compiled blocks inside of a CUDA graph of the whole model


@pytest.mark.parametrize("make", [vit, llama])
@pytest.mark.parametrize("case", [*SOME, "fp16_amp"])
def test_a_capture_compiles_nothing_and_gives_gradients_to_its_own_leaves(case, make):
    run = Run(case, make(), compiled=True)
    for _ in range(4):
        run.step()
    run.backward()
    params = [param for param in run.model.parameters() if param.requires_grad]
    wanted = [param.grad for param in params]
    twins = [twin_of(param) for param in params]
    context = torch.autocast("cpu", run.half)
    with (
        with_twins(run.model, params, twins),
        disable_saved_tensors_hooks("no"),
        hidden_capture(),
        without_compiling(),
        known_integers_of(run.model),
        context,
    ):
        if make is vit:
            loss = run.model(images()).float().pow(2).mean()
        else:
            loss = run.model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    assert {id(leaf) for leaf in graph_of([loss])[1]} <= {id(twin) for twin in twins}
    with overwriting_saved_tensors():
        found = torch.autograd.grad(loss, twins, retain_graph=True, allow_unused=True)
    stored = [
        GradientTensor.from_float(have) if isinstance(want, GradientTensor) else have
        for want, have in zip(wanted, found, strict=True)
    ]
    assert_equal(wanted, stored)
    assert all(param.grad is want for param, want in zip(params, wanted, strict=True))
    run.model.zero_grad()
    run.step()  # the parameters are back
