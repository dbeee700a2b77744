"""Presets, loss, schedule, parameter groups and the token stopwatch."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.compute.logits import MIN_CLASSES
from nemo_lowprec.models import PRESETS, CausalLM
from nemo_lowprec.models import throughput as throughput_module
from nemo_lowprec.models.loss import summed_cross_entropy
from nemo_lowprec.models.optimizer import decay_groups, default_warmup, muon_groups, warmup_cosine
from nemo_lowprec.models.throughput import TokenRate

# Parameters of the published checkpoints (tied weights once), and of ours at a vocabulary of 4,096.
PARAMETERS = {
    "llama_tiny": 4096 * 128 + 787_584,
    "llama_100m": 4096 * 768 + 84_953_856,
    "llama32_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "gpt2_tiny": 4096 * 128 + 924_416,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = CausalLM(name, vocab_size=PRESETS[name].config.get("vocab_size", 4096), init_seed=None)
        model.configure_model()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("tokens_at_once", [7, 24, 4096])
def test_loss_in_slices_is_cross_entropy(tokens_at_once: int) -> None:
    logits = torch.randn(4, 6, 50, requires_grad=True)
    labels = torch.randint(0, 50, (4, 6))
    labels[0, :3] = -100
    loss = summed_cross_entropy(logits, labels, tokens_at_once)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, logits)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, expected_grad)


def test_loss_in_slices_keeps_no_fp32_copy_of_all_logits() -> None:
    saved: list[torch.Tensor] = []
    logits = torch.randn(64, 100, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 100, (64,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = summed_cross_entropy(logits, labels, tokens_at_once=16)
    assert loss.dtype == torch.float32
    assert sum(t.numel() for t in saved if t.dtype == torch.float32) == 0


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_loss_of_a_converted_head_needs_no_slices(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.Linear(64, 64), lm_head=nn.Linear(64, MIN_CLASSES)))
    model, _ = prepare(model, torch.optim.AdamW(model.parameters()), level)
    labels = torch.randint(0, MIN_CLASSES, (2, 16))
    labels[0, :3] = -100
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(2, 16, 64))
    loss = summed_cross_entropy(logits, labels, tokens_at_once=8)
    assert "CrossEntropy" in loss.grad_fn.name()
    expected = F.cross_entropy((logits + 0).flatten(0, 1).float(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_schedule_warms_up_and_ends_at_the_floor() -> None:
    factor = warmup_cosine(10, 110, floor=0.1)
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0)
    assert factor(60) == pytest.approx(0.55)  # half of the cosine
    assert factor(110) == factor(500) == pytest.approx(0.1)
    after = [factor(step) for step in range(10, 111)]
    assert after == sorted(after, reverse=True)
    assert warmup_cosine(0, 100, 0.0)(0) == 1.0
    assert default_warmup(200) == 20 and default_warmup(10**6) == 2000


@pytest.mark.parametrize("warmup", [-1, 100, 101])
def test_warmup_must_end_before_the_run(warmup: int) -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        warmup_cosine(warmup, 100, 0.1)


def test_schedule_of_a_resumed_run_has_the_new_horizon() -> None:
    def scheduler(total: int) -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(0, total, 0.0))

    short, long = scheduler(10), scheduler(1000)
    long.load_state_dict(short.state_dict())
    assert long.lr_lambdas[0](10) > 0.99


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    groups = {group["name"]: group for group in decay_groups(model, 0.1)}
    assert [id(p) for p in groups["decay"]["params"]] == [id(model["embed"].weight)]
    expected = {id(model["norm"].weight), id(model["norm"].bias), id(model["head"].bias)}
    assert {id(p) for p in groups["no_decay"]["params"]} == expected
    assert groups["decay"]["weight_decay"] == 0.1 and groups["no_decay"]["weight_decay"] == 0.0


def test_token_rate_leaves_out_validation_and_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput_module, "_now", lambda: now[0])
    rate = TokenRate()
    rate.pause()  # a validation before the first step
    rate.resume()
    now[0] = 100.0  # the first step compiles
    rate.add(50)
    assert rate.read() is None and rate.mean is None
    now[0] += 2.0
    rate.add(60)
    rate.pause()
    now[0] += 1000.0
    rate.resume()
    now[0] += 1.0
    assert rate.read() == pytest.approx(20.0)
    now[0] += 1.0
    rate.add(60)
    assert rate.read() == pytest.approx(60.0)
    assert rate.mean == pytest.approx(30.0)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_the_optimizer_is_a_choice(name):
    model = CausalLM(preset="llama_tiny", vocab_size=64, optimizer=name, schedule_steps=4)
    model.configure_model()
    made = model.configure_optimizers()["optimizer"]
    assert type(made).__name__.lower() == name
    held = [p for group in made.param_groups for p in group["params"]]
    assert {*map(id, held)} == {*map(id, model.parameters())} and len(held) == len(list(model.parameters()))
    no_decay = [p for group in made.param_groups if not group["weight_decay"] for p in group["params"]]
    assert no_decay and all(p.dim() == 1 for p in no_decay)
    if name == "muon":
        names = {id(p): n for n, p in model.named_parameters()}
        of_adamw = {names[id(p)] for group in made.param_groups if not group["use_muon"] for p in group["params"]}
        assert all("norm" in n or "embed" in n or "lm_head" in n for n in of_adamw)
        assert any("embed" in n for n in of_adamw)


def test_a_choice_of_adamw_with_another_optimizer():
    with pytest.raises(ValueError, match="fused=True is AdamW's; optimizer='muon'"):
        CausalLM(preset="llama_tiny", fused=True, optimizer="muon")
    with pytest.raises(ValueError, match="optimizer='adam'"):
        CausalLM(preset="llama_tiny", optimizer="adam")


def test_groups_of_muon_leave_embeddings_heads_and_convolutions_to_adamw():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.conv = nn.Conv1d(4, 4, 3)
            self.layer = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.experts = nn.Parameter(torch.zeros(3, 4, 4))
            self.pos_embed = nn.Parameter(torch.zeros(6, 4))
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.head = nn.Linear(4, 8)

    model = Parts()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {group["name"]: [names[id(p)] for p in group["params"]] for group in muon_groups(model)}
    assert groups == {
        "muon": ["experts", "layer.weight"],
        "adamw": ["pos_embed", "token", "embed.weight", "conv.weight", "head.weight"],
        "adamw_no_decay": ["conv.bias", "layer.bias", "head.bias"],
    }
    with pytest.raises(ValueError, match="Embedding has no hidden matrix"):
        muon_groups(nn.Embedding(4, 4))
