"""Layers that transformers recomputes in backward, as CUDA graphs: the losses equal the losses without graphs."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import release
from nemo_lowprec import prepare
from nemo_lowprec.compat.transformers import CHECKPOINT
from nemo_lowprec.compute.graphs.graphed import GraphedForward
from nemo_lowprec.compute.graphs.recomputed import RecomputedPass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LEVELS = ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"]


def made(level, graphs, recomputes=True, reentrant=False, dropout=0.0, hidden=128, layers=3, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, use_cache=False, attention_dropout=dropout,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return prepare(model, optimizer, level, graphs=graphs, **options)


def train(model, optimizer, steps=9, micro=1, together=False, rows=2, length=64):
    """Losses. ``together``: the losses of the micro-batches are added before backward."""
    generator = torch.Generator("cuda").manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        waiting = 0
        for _ in range(micro):
            tokens = torch.randint(256, (rows, length), device="cuda", generator=generator)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
            losses.append(loss.detach())
            if together:
                waiting = waiting + loss
            else:
                loss.backward()
        if together:
            waiting.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def captured(model):
    """Passes of the layers that recompute, and all other passes."""
    forwards = [f for m in model.modules() if isinstance(f := m.__dict__.get("forward"), GraphedForward)]
    found = [one for forward in forwards for passes in forward._passes.values() for one in passes]
    recomputed = sum(isinstance(one, RecomputedPass) for one in found)
    return recomputed, len(found) - recomputed


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_losses_equal_the_losses_without_graphs(level, reentrant):
    expected = train(*made(level, False, reentrant=reentrant))
    model, optimizer = made(level, True, reentrant=reentrant)
    assert train(model, optimizer) == expected
    assert captured(model) == (3, 0)


@pytest.mark.parametrize("together", [False, True])
def test_micro_batches_of_which_several_wait_for_backward(together):
    """One graph of a layer serves all of them: it keeps nothing of its own."""
    run = partial(train, micro=3, together=together)
    expected = run(*made("bf16_with_fp8_mixed", False))
    model, optimizer = made("bf16_with_fp8_mixed", True)
    assert run(model, optimizer) == expected
    assert captured(model) == (3, 0)


def test_random_numbers_are_drawn_again():
    expected = train(*made("bf16_with_fp8_mixed", False, dropout=0.2))
    model, optimizer = made("bf16_with_fp8_mixed", True, dropout=0.2)
    assert train(model, optimizer) == expected
    assert captured(model) == (3, 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_layers_that_keep_fp8_activations(level, reentrant):
    expected = train(*made(level, False, reentrant=reentrant, activations="fp8"))
    model, optimizer = made(level, "auto", reentrant=reentrant, activations="fp8")
    assert train(model, optimizer) == expected
    assert captured(model) == (3, 0)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_compiled_models_recompute_without_graphs(steps_before):
    def run(graphs):
        model, optimizer = made("bf16_with_fp8_mixed", graphs, backend="torch", skip=["*norm"])
        losses = train(model, optimizer, steps_before) if steps_before else []
        model.compile(backend="aot_eager")
        return losses + train(model, optimizer), captured(model)

    assert run(True) == (run(False)[0], (0, 0))


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_memory_is_that_of_one_layer(activations):
    peaks = {}
    for graphs in (False, True):
        chosen = "auto" if graphs and activations else graphs
        model, optimizer = made("bf16_with_fp8_mixed", chosen, hidden=512, layers=12, activations=activations)
        run = partial(train, model, optimizer, rows=4, length=1024)
        run(steps=9)
        assert captured(model) == ((12, 0) if graphs else (0, 0))
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(steps=2)
        peaks[graphs] = torch.cuda.max_memory_allocated() - held
        del model, optimizer, run
        release()
    hidden = 4 * 1024 * 512 * 2  # bytes of what a layer hands on
    assert peaks[True] < peaks[False] + 4 * hidden


def test_recomputation_that_ends_and_begins_in_mid_run():
    def run(model, optimizer):
        found = train(model, optimizer)
        seen = [captured(model)]
        model.gradient_checkpointing_disable()
        found += train(model, optimizer)
        seen.append(captured(model))
        model.gradient_checkpointing_enable()
        return found + train(model, optimizer), seen

    expected, _ = run(*made("bf16_with_fp8_mixed", False))
    found, (first, second) = run(*made("bf16_with_fp8_mixed", True))
    assert found == expected and first == (3, 0) and second[1] > 0


def test_copies_are_checkpointed_by_torch():
    model, optimizer = made("bf16_with_fp8_mixed", True)
    train(model, optimizer)
    own = copy.deepcopy(model).model.layers[0].__dict__[CHECKPOINT]
    assert isinstance(own, partial) and own.func is checkpoint


def test_selective_checkpointing_stays_as_it_is():
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def run(graphs):
        model, optimizer = made("bf16_mixed", graphs, recomputes=False)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        return train(model, optimizer), captured(model)

    assert run(True) == (run(False)[0], (0, 0))
