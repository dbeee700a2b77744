"""``torch.compile`` over converted layers on a GPU: one graph, and the losses without it."""

import pytest
import torch

from nemo_lowprec import prepare
from tests.gpu.test_graphs import LEVELS, Model, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SOME = ["bf16_with_fp8_mixed", "msamp_o2"]
OPTIONS = {"backend": "torch"}  # te breaks graphs


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


@pytest.mark.parametrize("level", SOME)
@pytest.mark.parametrize("graphs", [False, "auto"])
def test_inductor_trains_alike_within_its_own_rounding(level, graphs):
    assert_losses_are_alike(level, {}, 0.03, graphs=graphs, **OPTIONS)


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
