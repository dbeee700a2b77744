"""Blocks that run as CUDA graphs: the same losses, bit for bit, as without graphs."""

import copy
import gc
import pickle
import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.measure import idle_in_graphs
from nemo_lowprec import prepare
from nemo_lowprec.compute.graphs import graphed
from nemo_lowprec.compute.graphs.graphed import GraphedForward
from nemo_lowprec.tensors import GradientTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LEVELS = [
    "fp16_amp", "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "bf16_mixed", "bf16_with_fp8_mixed",
    "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip
WIDTH, ROWS = 128, 64


class Block(nn.Module):
    def __init__(self, dropout=0.1, recompute=None):
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.factor = 1.0

    def forward(self, x, shift=None):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.recompute == "inside":
            mixed = checkpoint(self.project, mixed, use_reentrant=False)
        else:
            mixed = self.project(mixed)
        x = x + mixed * self.factor
        if shift is not None:
            x = x + shift
        return x + self.down(F.gelu(self.up(x)))

    def project(self, x):
        return self.drop(self.out(x))


class Model(nn.Module):
    def __init__(self, layers=3, dropout=0.1, recompute=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, recompute) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 16)
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.training and self.recompute in ("reentrant", "non-reentrant"):
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def made(level, graphs, kind=Model, **options):
    """A prepared model. ``graphs``: False, "auto", "whole" (one graph) or "blocks" (a graph for each block)."""
    torch.manual_seed(0)
    names = {"weight_cache": "auto", "activations": None} if level not in ("fp16_amp", "bf16_mixed") else {}
    kept = {name: options.pop(name, default) for name, default in names.items()}
    model = kind(**options).cuda()
    if graphs == "blocks":
        model.first.register_forward_hook(lambda *_: None)  # so that the model is not one graph
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return prepare(model, optimizer, level, graphs=graphs in ("whole", "blocks") or graphs, **kept)


def passes(block):
    forward = block.__dict__.get("forward")
    return sum(len(p) for p in forward._passes.values()) if isinstance(forward, GraphedForward) else 0


def captured(model):
    """(captured passes of the model, of its blocks)."""
    return passes(model), sum(map(passes, model.blocks))


def as_asked(model, graphs):
    whole, blocks = captured(model)
    return (whole > 0, blocks > 0) == (graphs == "whole", graphs == "blocks")


def reasons(model):
    return {m.__dict__["forward"]._off for m in (model, *model.blocks) if "forward" in m.__dict__}


def half_of(level):
    return torch.float16 if level.startswith("fp16") else torch.bfloat16


def train(model, optimizer, level, steps=9, accumulate=1, clip=None, evaluate=False, batch=None):
    """Losses; the inputs of each micro-batch are new."""
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    scaler = torch.amp.GradScaler("cuda", enabled=level.startswith("fp16"), init_scale=2.0**10)
    for step in range(steps):
        for _ in range(accumulate):
            size = ROWS if batch is None else batch[step]
            shape = size if isinstance(size, tuple) else (2, size, WIDTH)
            x = torch.randn(shape, device="cuda", generator=generator)
            with torch.autocast("cuda", dtype=half_of(level)):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss / accumulate).backward()
            losses.append(loss.detach())
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if evaluate and step % 3 == 1:
            model.eval()
            with torch.no_grad(), torch.autocast("cuda", dtype=half_of(level)):
                losses.append(model(torch.ones(2, ROWS, WIDTH, device="cuda")).float().mean())
            model.train()
    return torch.stack(losses).tolist()


def assert_losses_are_the_same(level, run, ways=("whole", "blocks"), **options):
    """The results of ``run`` are those without graphs."""
    found = []
    for graphs in (False, *ways):
        model, optimizer = made(level, graphs, **options)
        torch.manual_seed(2)
        found.append(run(model, optimizer))
        assert as_asked(model, graphs), (graphs, captured(model), reasons(model))
    assert all(each == found[0] for each in found)
    return model


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_without_graphs(level):
    assert_losses_are_the_same(level, lambda model, optimizer: train(model, optimizer, level, clip=1.0, evaluate=True))


@pytest.mark.parametrize("level", ["fp16_amp", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed"])
def test_accumulated_gradients(level):
    assert_losses_are_the_same(level, lambda model, optimizer: train(model, optimizer, level, accumulate=3))


def test_weights_that_are_not_kept():
    level = "bf16_with_fp8_mixed"
    assert_losses_are_the_same(level, lambda model, optimizer: train(model, optimizer, level), weight_cache=False)


def test_two_shapes_have_a_graph_each():
    batch = [64, 32] * 6
    assert_losses_are_the_same(
        "bf16_with_fp8_mixed", lambda m, o: train(m, o, "bf16_with_fp8_mixed", steps=12, batch=batch)
    )


def test_a_weight_that_is_written_is_read():
    def run(model, optimizer):
        losses = train(model, optimizer, "bf16_with_fp8_mixed", steps=6)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2.0)
        return losses + train(model, optimizer, "bf16_with_fp8_mixed", steps=6)

    assert_losses_are_the_same("bf16_with_fp8_mixed", run)


def test_an_attribute_that_changes_is_read():
    def run(model, optimizer):
        losses = []
        for factor in (1.0, 1.0, 1.0, 0.5, 0.25):
            for block in model.blocks:
                block.factor = factor
            losses += train(model, optimizer, "bf16_with_fp8_mixed", steps=2)
        return losses

    assert_losses_are_the_same("bf16_with_fp8_mixed", run)


def test_a_block_that_is_used_twice():
    class Twice(Model):
        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    level = "bf16_with_fp8_mixed"
    model = assert_losses_are_the_same(level, lambda model, optimizer: train(model, optimizer, level), kind=Twice)
    assert captured(model) == (0, 6)


def test_losses_that_are_added_before_backward():
    """Two forward passes wait for their backward passes, and the first one's may come first."""

    def run(model, optimizer):
        losses = []
        for step in range(16):
            torch.manual_seed(step)
            pair = []
            for _ in range(2):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    pair.append(model(torch.randn(2, ROWS, WIDTH, device="cuda")).float().pow(2).mean())
            for loss in pair:
                loss.backward()
            losses += [loss.detach() for loss in pair]
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).tolist()

    assert_losses_are_the_same("bf16_with_fp8_mixed", run)


def test_results_that_somebody_holds_keep_their_values():
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "blocks")
    train(model, optimizer, level, steps=6)
    assert as_asked(model, "blocks")
    held = []
    hook = model.blocks[1].register_forward_hook(lambda m, args, out: held.append((out.detach(), out.detach().clone())))
    train(model, optimizer, level, steps=4)
    hook.remove()
    assert len(held) == 4
    assert all(torch.equal(a, b) for a, b in held)


def test_results_may_be_changed_in_place():
    class InPlace(Model):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x += 0.5
            return self.head(x)

    level = "bf16_with_fp8_mixed"
    assert_losses_are_the_same(level, lambda model, optimizer: train(model, optimizer, level), kind=InPlace)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant", "inside"])
def test_checkpointing_runs_without_graphs(recompute):
    """Also where a block recomputes a part of itself."""
    level = "bf16_with_fp8_mixed"
    found = []
    for graphs in (False, "whole"):
        model, optimizer = made(level, graphs, recompute=recompute)
        torch.manual_seed(2)
        found.append(train(model, optimizer, level))
    assert captured(model) == (0, 0)
    assert found[0] == found[1]


class Kernels:
    """Context that notes the names of the kernels that run, if ``wanted``."""

    def __init__(self, wanted):
        self.names, self._profile = [], profile(activities=[ProfilerActivity.CUDA]) if wanted else None

    def __enter__(self):
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *args):
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__exit__(*args)
            self.names = [event.name for event in self._profile.events()]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_transformers_is_the_one_that_runs_without_graphs(masked):
    """In a capture transformers makes an explicit mask, with which attention takes a slower kernel.

    Of a mask that the caller gives the host asks whether it hides anything, so that the model cannot be one graph.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, intermediate_size=512,
        vocab_size=128, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.randint(128, (2, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mask = {"attention_mask": torch.ones_like(tokens)} if masked else {}
    kernels, losses = [], []
    for graphs in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).train()
        model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16_mixed", graphs=graphs)
        for step in range(16):
            with torch.autocast("cuda", torch.bfloat16), Kernels(step == 15) as seen:
                loss = model(input_ids=tokens, **mask).logits.float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kernels.append(Counter(n for n in seen.names if any(part in n for part in ("sdpa", "flash", "fmha"))))
        losses.append(loss.item())
    graphs = [name for name, module in model.named_modules() if passes(module)]
    why = {m.__dict__["forward"].name: m.__dict__["forward"]._off for m in model.modules() if "forward" in m.__dict__}
    assert graphs == (["model.layers.0", "model.layers.1"] if masked else [""]), why
    assert kernels[0] and kernels[0] == kernels[1]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("what", ["hook", "random", "attribute", "sync", "argument"])
def test_a_block_that_cannot_be_captured_says_why(what, caplog):
    class Other(Block):
        def forward(self, x, shift=None):
            if what == "random" and torch.rand(()) < 0:
                return x
            if what == "attribute":
                self.calls = getattr(self, "calls", 0) + 1
            if what == "sync" and x.sum().item() == 12345.0:
                return x
            return super().forward(x, shift if isinstance(shift, torch.Tensor) else None)

    class Others(Model):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, object()) if what == "argument" else block(x)
            return self.head(x)

    def make():
        model = Others()
        model.blocks = nn.ModuleList([Other() for _ in range(3)])
        if what == "hook":
            model.blocks[0].up.register_forward_hook(lambda *_: None)
        return model

    found = []
    for graphs in (False, "blocks" if what == "argument" else "whole"):
        model, optimizer = made("bf16_with_fp8_mixed", graphs, kind=make)
        torch.manual_seed(2)
        with caplog.at_level("INFO", "nemo_lowprec"):
            found.append(train(model, optimizer, "bf16_with_fp8_mixed"))
    reason = {
        "hook": "up has a hook", "random": "random numbers on the host", "attribute": "changes calls",
        "sync": "its capture failed", "argument": "an argument is a object",
    }[what]  # fmt: skip
    assert any("CUDA graphs" in r.getMessage() and reason in r.getMessage() for r in caplog.records)
    assert found[0] == found[1]  # dropout draws the same numbers after a capture that failed
    cached = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del cached
    torch.cuda.empty_cache()  # the allocator knows that the capture is over
    assert torch.cuda.memory_reserved() <= reserved - 2**28


def loss_over_graphs():
    """A model whose blocks are captured, what computes its loss anew, and its input."""
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "blocks", dropout=0.0)
    train(model, optimizer, level, steps=6)
    x = torch.randn(2, ROWS, WIDTH, device="cuda", requires_grad=True)

    def loss():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float().pow(2).mean()

    return model, loss, x


def test_create_graph_is_an_error():
    _, loss, x = loss_over_graphs()
    with pytest.raises(RuntimeError, match="graphs=False"):
        torch.autograd.grad(loss(), x, create_graph=True)


def test_what_a_graph_cannot_do_is_an_error():
    model, loss, _ = loss_over_graphs()
    kept = loss()
    kept.backward(retain_graph=True)
    kept.backward(retain_graph=True)  # nothing has run in between
    loss().backward()
    with pytest.raises(RuntimeError, match="graphs=False"):
        kept.backward()
    before = loss()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("level", ["fp16_amp", "bf16_with_fp8_mixed", "msamp_o2"])
@pytest.mark.parametrize("graphs", ["whole", "blocks"])
def test_a_second_backward_pass_over_what_is_kept(level, graphs):
    """Each pass finds the same gradients, with dropout, too; after a pass without retain_graph it is an error."""
    model, optimizer = made(level, graphs, dropout=0.5)
    train(model, optimizer, level, steps=9)
    assert as_asked(model, graphs)
    for p in model.parameters():
        p.grad = None
    with torch.autocast("cuda", dtype=half_of(level)):
        out = model(torch.randn(2, ROWS, WIDTH, device="cuda"))
    found = []
    for again in (True, True, False):
        found.append(torch.autograd.grad(out.float().pow(2).sum(), list(model.parameters()), retain_graph=again))
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        out.backward(torch.ones_like(out))
    assert train(model, optimizer, level, steps=2)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(12)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("level", ["fp16_amp", "bf16_with_fp8_mixed", "msamp_o2"])
def test_a_whole_model_takes_no_more_memory_as_one_graph(level):
    """Backward writes gradients into memory that activations left; side by side they would take a third more."""
    peaks = {}
    for graphs in (False, "whole"):
        gc.collect()
        torch.cuda.empty_cache()
        idle = torch.cuda.memory_allocated() + idle_in_graphs()
        torch.manual_seed(0)
        model = Wide().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = prepare(model, optimizer, level, graphs=graphs == "whole")
        train(model, optimizer, level, steps=8, batch=[(4096, 4096)] * 8)
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, level, steps=2, batch=[(4096, 4096)] * 2)
        peaks[graphs] = torch.cuda.max_memory_allocated() + idle_in_graphs() - idle
        if graphs:
            assert passes(model) == 1
            assert idle_in_graphs() > 12 * 4096**2  # its activations count, at a byte a value or more
    assert peaks["whole"] < 1.1 * peaks[False]


def test_copies_and_pickles_have_no_graphs():
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "whole", dropout=0.0)
    train(model, optimizer, level, steps=6)
    assert as_asked(model, "whole")
    x = torch.randn(2, ROWS, WIDTH, device="cuda")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert not any(isinstance(m.__dict__.get("forward"), GraphedForward) for m in twin.modules())
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
            assert twin(x).isfinite().all()
        assert twin.blocks[0].forward.__self__ is twin.blocks[0]


class Busy(Block):
    """The GPU multiplies matrices of ``size`` for it, ``launches`` times; the host sleeps."""

    launches, size, sleep = 8, 8192, 0.0

    def forward(self, x, shift=None):
        x = super().forward(x, shift)
        big = x.new_ones(self.size, self.size)
        for _ in range(self.launches):
            big = big @ big
        time.sleep(self.sleep)
        return x + big[0, 0].nan_to_num(0, 0, 0) * 0


@pytest.mark.parametrize("what", ["large", "many", "slow pass"])
def test_auto_leaves_a_model_alone_that_keeps_the_gpu_busy(what):
    """With more launches than the queue of launches holds, too, and where the host has other work in one pass."""
    model = Model()
    model.blocks = nn.ModuleList([Busy() for _ in range(12 if what == "many" else 3)])
    for block in model.blocks:
        block.launches, block.size = (150, 3072) if what == "many" else (8, 8192)
    model.cuda()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()), "bf16_with_fp8_mixed")
    for steps, sleep in ((3, 0.0), (1, 0.1 if what == "slow pass" else 0.0), (5, 0.0)):
        for block in model.blocks:
            block.sleep = sleep
        train(model, optimizer, "bf16_with_fp8_mixed", steps=steps)
    assert reasons(model) == {"its GPU time is longer than its host time"}


def outside_graphs():
    """Bytes that the allocator has for tensors that are not in a graph's memory."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == (0, 0))


def test_a_capture_takes_the_memory_of_the_passes_before():
    model, optimizer = made("bf16_with_fp8_mixed", "whole")
    gc.collect()
    torch.cuda.empty_cache()
    idle = outside_graphs()
    large = [2**15] * 3
    train(model, optimizer, "bf16_with_fp8_mixed", steps=3, batch=large)
    assert not as_asked(model, "whole")
    before = outside_graphs() - idle
    train(model, optimizer, "bf16_with_fp8_mixed", steps=3, batch=large)
    assert as_asked(model, "whole")
    assert outside_graphs() - idle < before / 2


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_auto_takes_a_model_that_waits_for_the_host(activations):
    model, optimizer = made("bf16_with_fp8_mixed", "auto", activations=activations)
    train(model, optimizer, "bf16_with_fp8_mixed", steps=6)
    assert as_asked(model, "whole")


def test_auto_takes_no_blocks_where_memory_counts():
    model, optimizer = made("bf16_with_fp8_mixed", "auto", activations="fp8")
    model.first.register_forward_hook(lambda *_: None)  # so that the model is not one graph
    train(model, optimizer, "bf16_with_fp8_mixed", steps=6)
    assert captured(model) == (0, 0)
    assert any("activations is there to save" in str(reason) for reason in reasons(model))


def test_under_the_trainer(tmp_path):
    import lightning.pytorch as pl

    from nemo_lowprec import msamp_o2

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.losses, self.had_gradients = [], []

        def training_step(self, batch, index):
            self.had_gradients.append(any(p.grad is not None for p in self.parameters()))
            loss = self.model(batch).float().pow(2).mean()
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch, index):
            self.losses.append(self.model(batch).float().mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        module = Module()
        data = torch.randn(20, 2, ROWS, WIDTH)
        trainer = pl.Trainer(
            accelerator="gpu", devices=1, max_steps=6, plugins=msamp_o2(graphs=graphs), val_check_interval=6,
            accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        seen = []
        module.on_train_end = lambda seen=seen, module=module: seen.append(passes(module.model) > 0)
        trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(data[:2], batch_size=None))
        assert seen == [graphs]
        # A graph overwrites gradients: before a step's first batch they are gone, and the second batch adds to copies.
        assert module.had_gradients[-4:] == [not graphs, True] * 2
        found.append(torch.stack(module.losses).tolist())
    assert found[0] == found[1]


def test_a_counter_of_operations_sees_all_of_them():
    from torch.utils.flop_counter import FlopCounterMode

    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "whole", dropout=0.0)
    x = torch.randn(2, ROWS, WIDTH, device="cuda")

    def flops():
        with FlopCounterMode(display=False) as counter, torch.autocast("cuda", torch.bfloat16):
            model(x)
        return counter.get_total_flops()

    before = flops()
    train(model, optimizer, level, steps=6)
    assert as_asked(model, "whole")
    assert flops() == before > 0


def test_one_call_with_other_arguments_turns_nothing_off():
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "blocks", dropout=0.0)
    with torch.autocast("cuda", torch.bfloat16):
        x = torch.randn(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        model.blocks[0](x, shift=torch.ones((), device="cpu"))
    train(model, optimizer, level, steps=6)
    assert captured(model) == (0, 3)


def test_a_model_with_large_results_is_not_one_graph(monkeypatch):
    monkeypatch.setattr(graphed, "_LARGE", 2 * ROWS * 16)
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "whole")
    train(model, optimizer, level, steps=6)
    assert captured(model) == (0, 3) and "its results are large" in reasons(model)


def test_a_hook_that_comes_later_is_called():
    level = "bf16_with_fp8_mixed"
    model, optimizer = made(level, "whole")
    train(model, optimizer, level, steps=6)
    assert as_asked(model, "whole")
    seen = []
    model.blocks[1].up.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    train(model, optimizer, level, steps=6)
    assert len(seen) == 6
    assert captured(model) == (0, 2)


@pytest.mark.parametrize("level", ["fp16_amp", "bf16_with_fp8_mixed"])
def test_gradients_that_somebody_holds_keep_their_values(level):
    """As PCGrad does: the gradients of two losses, taken from one forward pass, and those of the pass before."""

    def run(model, optimizer):
        found, earlier = train(model, optimizer, level, steps=2), []  # histories begin with steps
        for step in range(7):
            torch.manual_seed(step)
            with torch.autocast("cuda", dtype=half_of(level)):
                out = model(torch.randn(2, ROWS, WIDTH, device="cuda")).float()
            held = []
            for loss in (out.pow(2).mean(), out.abs().mean()):
                loss.backward(retain_graph=True)
                held.append([p.grad for p in model.blocks.parameters()])
                for p in model.parameters():
                    p.grad = None
            found += [float(g.float().norm()) for grads in held for g in grads]
            found += [float(g.float().norm()) for g in earlier]
            earlier = held[0]
            del out, loss
        return found

    assert_losses_are_the_same(level, run)


def test_layers_that_compute_otherwise_get_another_graph():
    def run(model, optimizer):
        losses = train(model, optimizer, "msamp_o2", steps=6)
        forward = model.__dict__.get("forward")
        for found in [p for passes in forward._passes.values() for p in passes] if forward is not None else ():
            found._reads = [object() for _ in found._reads]  # as where they begin to compute as one
        return losses + train(model, optimizer, "msamp_o2", steps=4)

    model = assert_losses_are_the_same("msamp_o2", run, ways=("whole",))
    (passes_of_key,) = model.__dict__["forward"]._passes.values()
    assert [found.runs for found in passes_of_key] == [4]


@pytest.mark.parametrize("level", ["msamp_o1", "msamp_o2", "msamp_o3"])
def test_gradients_are_stored_in_fp8_by_the_graph(level, monkeypatch):
    model, optimizer = made(level, "whole")
    train(model, optimizer, level, steps=6)
    assert as_asked(model, "whole"), reasons(model)
    stored = []
    store = GradientTensor.from_float
    monkeypatch.setattr(GradientTensor, "from_float", lambda values: stored.append(values) or store(values))
    train(model, optimizer, level, steps=3)
    assert not stored


class Ends(Block):
    """Ends with an operation that keeps its result for backward."""

    def forward(self, x):
        return super().forward(x).sigmoid()


class EndsModel(Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = nn.ModuleList([Ends(0.0) for _ in self.blocks])


@pytest.mark.parametrize("kind", [Model, EndsModel])
@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_results_and_gradients_that_somebody_holds(level, kind):
    """For a step and longer, and results that the caller writes to."""

    def run(model, optimizer):
        held, kept = [], []
        model.blocks[0].register_forward_hook(lambda m, args, out: held.append(out))
        model.blocks[1].register_forward_hook(lambda m, args, out: out.mul_(2.0) if kind is Model else None)
        for _ in range(9):
            x = torch.randn(2, ROWS, WIDTH, device="cuda", generator=generator, requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(x).float().pow(2).mean().backward()
            kept.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach().float().sum().item() for t in (*held, *kept)]

    found = []
    for graphs in (False, "blocks"):
        generator = torch.Generator("cuda").manual_seed(1)
        model, optimizer = made(level, graphs, kind=kind, dropout=0.0)
        found.append(run(model, optimizer))
    assert found[0] == found[1]
    assert passes(model.blocks[2]) > 0


class Cross(Block):
    """Reads a tensor that other blocks read, too, as the decoder of Whisper and the blocks of T5 do."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, memory):
        k, v = self.kv(memory).unflatten(-1, (2, 4, 32)).permute(2, 0, 3, 1, 4)
        q = x.unflatten(-1, (4, 32)).transpose(1, 2)
        return super().forward(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Decoder(Model):
    def __init__(self, layers=4):
        super().__init__(layers, dropout=0.0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Cross() for _ in self.blocks])

    def forward(self, x):
        memory = self.before(x).repeat(1, 3, 1)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


@pytest.mark.parametrize("level", ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"])
def test_a_tensor_that_all_blocks_read(level):
    """Its gradients wait for each other, while earlier blocks' backward passes run."""
    found = []
    for graphs in (False, "blocks"):
        model, optimizer = made(level, graphs, kind=Decoder)
        found.append(train(model, optimizer, level, steps=12))
        assert as_asked(model, graphs), reasons(model)
    # Converted layers add their gradients in their GEMMs. Between graphs autograd adds them, in half precision.
    assert found[1] == (found[0] if level == "bf16_mixed" else pytest.approx(found[0], rel=2e-3))


def train_llama(level, compile_options, steps, **options):
    """Losses of a Llama of transformers, and the model; its blocks are compiled where there are ``compile_options``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)
    for layer in model.model.layers if compile_options is not None else ():
        layer.compile(**compile_options)
    generator, losses = torch.Generator("cuda").manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(1024, (2, 64), device="cuda", generator=generator)
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), model


@pytest.mark.parametrize("compile_options", [None, {}])
@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_the_body_of_a_model_of_transformers_is_one_graph(level, compile_options, monkeypatch, fresh_compiler):
    """Though the host reads integers there, which are made of constants; the model's logits are too large for one."""
    monkeypatch.setattr(graphed, "_LARGE", 2 * 64 * 1024)
    found = []
    for graphs in (False, True):
        losses, model = train_llama(level, compile_options, 9, graphs=graphs)
        found.append(losses.tolist())
        assert (passes(model), passes(model.model) > 0) == (0, graphs)
        assert not any(map(passes, model.model.layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("level", ["msamp_o2", "msamp_o3", "bf16_with_fp8_mixed"])
def test_gradients_of_matrices_that_belong_to_no_layer(level):
    """At the MS-AMP levels layers compute their gradients in BF16, and torch's operations in FP32."""

    class WithTable(Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.table = nn.Parameter(torch.randn(ROWS, WIDTH) * 0.1)

        def forward(self, x):
            return super().forward(x + self.table)

    assert_losses_are_the_same(level, lambda *run: train(*run, level), ways=("whole",), kind=WithTable)
