"""``torch.compile`` over converted layers on a GPU: one graph, and the losses without it."""

from functools import partial
from itertools import groupby, product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nemo_lowprec import prepare
from tests.gpu.test_graphs import LEVELS, Model, passes, reasons, train, train_llama
from tests.operators import watch_operators
from tests.processes import on_processes
from tests.strategies.test_sharded import run as run_sharded
from tests.strategies.test_sharded_models import Alike
from tests.support import assert_same

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("fresh_compiler"),
]  # fmt: skip

SOME = ["bf16_with_fp8_mixed", "msamp_o2"]
OPTIONS = {"backend": "torch"}
OF_TE = [
    "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "msamp_o2",
    "msamp_o3",
]  # fmt: skip
SHARDED = [
    ("bf16_mixed", None), *product([*SOME, "msamp_o3", "bf16_with_fp8_mixed+fp8_params"], ["torch"]),
    *product(OF_TE, ["te"]),
]  # fmt: skip


def made(level, compile_options, graphs=False, **options):
    torch.manual_seed(0)
    model = Model(dropout=0.0).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = prepare(model, optimizer, level, graphs=graphs, **options)
    for block in model.blocks if compile_options is not None else ():
        block.compile(fullgraph=True, **compile_options)
    return model, optimizer


def assert_losses_are_alike(level, compile_options, rtol, run=train, graphs=False, **options):
    losses = []
    for each in (None, compile_options):
        model, optimizer = made(level, each, graphs, **options)
        losses.append(torch.tensor(run(model, optimizer, level)))
    assert losses[0].isfinite().all()
    # The mean result of an evaluation is near zero.
    torch.testing.assert_close(losses[1], losses[0], rtol=rtol, atol=rtol / 5)


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_blocks_train_bit_for_bit_as_without(level):
    """But for norms, which the compiler computes by torch's operations."""
    has_fp8 = level not in ("fp16_amp", "bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed")
    options = {**OPTIONS, "skip": ["*norm"]} if has_fp8 else {}
    if "subchannel" in level:
        options = {"backend": "reference"}
    assert_losses_are_alike(level, {"backend": "aot_eager"}, 0, **options)


@pytest.mark.parametrize("level", OF_TE)
def test_layers_of_te_train_bit_for_bit_as_without(level):
    assert_losses_are_alike(level, {"backend": "aot_eager"}, 0, backend="te", skip=["*norm"])


@pytest.mark.parametrize("level", OF_TE)
def test_inductor_over_layers_of_te(level):
    assert_losses_are_alike(level, {}, 0.03, backend="te")


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("level", SOME)
@pytest.mark.parametrize("graphs", [False, "auto"])
def test_reduce_overhead(level, backend, graphs):
    def run(model, optimizer, level):
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        return train(model, optimizer, level, steps=12, evaluate=True)

    assert_losses_are_alike(level, {"mode": "reduce-overhead"}, 0.03, run, graphs, backend=backend)


@pytest.mark.parametrize("level", SOME)
@pytest.mark.parametrize("options, accumulate", [({}, 2), ({"mode": "reduce-overhead"}, 1)])
def test_a_whole_model(level, options, accumulate):
    """The hooks of ``prepare`` stand around the model's graph.

    With ``reduce-overhead`` torch overwrites the gradients of a micro-batch in the next one, also without a level.
    """
    losses = []
    for compiled in (False, True):
        model, optimizer = made(level, None, **OPTIONS)
        if compiled:
            model.compile(**options)
        losses.append(torch.tensor(train(model, optimizer, level, steps=10, accumulate=accumulate)))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=6e-3)


@pytest.mark.parametrize("level", SOME)
@pytest.mark.parametrize("graphs", [False, "auto"])
def test_inductor_trains_alike_within_its_own_rounding(level, graphs):
    assert_losses_are_alike(level, {}, 0.03, graphs=graphs, **OPTIONS)


@pytest.mark.parametrize("level", [*SOME, "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed"])
@pytest.mark.parametrize("backend", ["torch", "te"])
def test_inductor_compiles_layers_that_share_an_input(level, backend, monkeypatch):
    """Not from a cache: inductor runs a kernel that was compiled now several times, in the memory that it has."""
    if backend == "te" and "rowwise" in level:
        pytest.skip("Transformer Engine has no rowwise scaling")
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    called = watch_operators(monkeypatch)
    wanted, found = (
        train_llama(level, compile_options, 5, graphs=False, backend=backend)[0]
        for compile_options in (None, {"fullgraph": True})
    )
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=0)
    assert "nemo_lowprec::add_dgrad" in called


@pytest.mark.parametrize("level, backend", [*product(OF_TE, ["torch", "te"]), ("bf16_mixed", None)])
def test_blocks_of_the_same_code_share_a_graph_and_give_their_gradients_in_time(level, backend):
    """The second model finds the graph of the first."""
    counter, arrived = CompileCounterWithBackend("aot_eager"), []
    options = {"backend": backend} if backend is not None else {}

    def watch_input(block, args):
        args[0].register_hook(lambda _: arrived.append("x"))

    for _ in range(2):
        model, optimizer = made(level, {"backend": counter}, **options)
        for name, param in model.blocks.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(int(name[0])))
        for block in model.blocks[1:]:
            block.register_forward_pre_hook(watch_input)
        for _ in range(3):
            arrived.clear()
            train(model, optimizer, level, steps=1)
            assert [what for what, _ in groupby(arrived)] == [2, "x", 1, "x", 0]
        assert counter.frame_count == 1


def sharded(rank):
    """The runs of plain and of compiled blocks, and how many graphs these have."""
    found = {}
    for case, backend in SHARDED:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        level = {"skip": ["*norm*"]} if backend is not None else {}  # the compiler computes norms otherwise
        options = {"world": 1, "accelerator": "gpu", "max_steps": 3, "backend": backend, "level": level}
        runs = [run_sharded(case, rank, partial(Alike, 3, each), **options) for each in (None, counter)]
        found[case, backend] = runs, counter.frame_count
    return found


@pytest.fixture(scope="module")
def of_sharded(tmp_path_factory):
    return on_processes(1, tmp_path_factory.mktemp("sharded"), sharded, backend="nccl")[0]


@pytest.mark.parametrize("case, backend", SHARDED)
def test_sharded_blocks_share_a_graph_and_train_bit_for_bit_as_without(of_sharded, case, backend):
    (plain, compiled), graphs = of_sharded[case, backend]
    assert graphs == 1
    assert compiled["losses"] == plain["losses"]
    assert_same(compiled["grads"], plain["grads"])
    assert_same(compiled["weights"], plain["weights"])


@pytest.mark.parametrize("level", [*SOME, "msamp_o3", "bf16_mixed"])
def test_compiled_blocks_are_in_the_graph_of_their_model(level):
    losses = []
    for graphs in (False, True):
        model, optimizer = made(level, {}, graphs, **(OPTIONS if level != "bf16_mixed" else {}))
        losses.append(train(model, optimizer, level, steps=12, accumulate=2, evaluate=True))
        assert (passes(model) > 0) == graphs, reasons(model)
    assert losses[0] == losses[1]


def accumulated(model, optimizer, level):
    """Two micro-batches a step, evaluation in between, and the model's state read again."""
    losses = train(model, optimizer, level, steps=4, accumulate=2, evaluate=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    losses += train(model, optimizer, level, steps=2, accumulate=2, evaluate=True)
    model.load_state_dict(state)
    return losses + train(model, optimizer, level, steps=4, accumulate=2, evaluate=True)


@pytest.mark.parametrize("level", SOME)
def test_micro_batches_validation_and_loaded_weights(level):
    assert_losses_are_alike(level, {}, 0.05, accumulated, **OPTIONS)
