"""Plans against what real runs of two processes hold and send."""

import gc
import io
import os

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from nemo_lowprec.compute import computation
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import plan_training
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from tests.processes import on_processes
from tests.report.holdings import Measure
from tests.support import level_of, plugin, trainer

# All that store something of their own: other ways of scaling differ in GEMMs only.
MEASURED = [
    "fp16_amp", "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed",
    "bf16_with_fp8_mixed+fp8_params",
]  # fmt: skip
RUNS = [(case, "lowprec_sharded") for case in MEASURED if case != "msamp_o1"]
RUNS += [(case, "ddp") for case in ("fp16_amp", "msamp_o1", "msamp_o3", "bf16_mixed")]
RUNS += [(case, "lowprec_ddp") for case in ("te_fp8", "msamp_o2", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params")]
VARIOUS = [(case, "lowprec_sharded") for case in ("te_fp8", "msamp_o2", "msamp_o3", "fp16_mixed")]
VARIOUS += [("msamp_o2", "lowprec_ddp")]
RUNS += [("msamp_o3", "accumulated"), ("bf16_mixed", "accumulated"), ("bf16_mixed", "zero2")]


class Llama(pl.LightningModule):
    """2M parameters, of which vectors are a thousandth."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=510, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, index):
        logits = self.model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Adapted(Llama):
    """LoRA beside all layers of a base that came in BF16."""

    def __init__(self):
        super().__init__()
        self.model = get_peft_model(self.model.bfloat16(), LoraConfig(r=16, target_modules="all-linear"))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


class Various(pl.LightningModule):
    """What levels keep in FP32 for torch, attention and experts in one parameter each, and half of all else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(510, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True) for _ in range(2)
        )  # fmt: skip
        self.lstm = nn.LSTM(256, 512, batch_first=True)
        self.experts = nn.Parameter(torch.randn(4, 512, 256) / 22)
        self.norm = nn.BatchNorm1d(256)
        self.head = nn.Linear(256, 510)

    def training_step(self, batch, index):
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = torch.einsum("bti,eij->btj", self.lstm(x)[0], self.experts)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())

    configure_optimizers = Llama.configure_optimizers


def options_of(name):
    """(Lightning's strategy, the plan's arguments) of a run."""
    if name == "zero2":
        return LowPrecisionShardedStrategy(reshard_after_forward=False), {
            "strategy": "lowprec_sharded", "reshard_after_forward": False
        }  # fmt: skip
    if name == "accumulated":
        return "lowprec_sharded", {"strategy": "lowprec_sharded", "micro_batches": 2}
    return name, {"strategy": name}


def run(case, name, world=2, model=Llama):
    gc.collect()
    gc.freeze()  # what earlier runs have left does not count
    measure, (strategy, wanted) = Measure(), options_of(name)
    processes = {"devices": world, "strategy": strategy, "use_distributed_sampler": False} if world > 1 else {}
    accumulate = wanted.get("micro_batches", 1)
    tokens = torch.randint(510, (4 * accumulate, 9), generator=torch.Generator().manual_seed(1))
    fit = trainer(
        plugin(case), measure, max_epochs=None, max_steps=2, accumulate_grad_batches=accumulate, **processes
    )  # fmt: skip
    fit.fit(model(), torch.utils.data.DataLoader(tokens, batch_size=2))
    return {"found": measure.found, "sent": measure.sent}


def every_run(rank, runs, world):
    found = {f"{case} {name}": run(case, name, world) for case, name in runs}
    return found | {f"various {case} {name}": run(case, name, world, Various) for case, name in VARIOUS if world > 1}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("two"), every_run, RUNS, 2)


def planned(case, name, world, model=Llama):
    return plan_training(model(), plugin(case), 1, world, accelerator="cpu", **options_of(name)[1])


def assert_planned(got, ranks):
    """Within 5 %: each column, all of them, and what is sent. The plan is of the process with the largest shards."""
    found = {key: max(r["found"].get(key, 0) for r in ranks) for key in {k for r in ranks for k in r["found"]}}
    whole = found.pop("everything")
    wanted = {c.name: c.bytes for c in got.columns}
    assert found.keys() - {k for k, v in found.items() if not v} <= wanted.keys()
    for name, size in wanted.items():
        assert size == pytest.approx(found.get(name, 0), rel=0.05), name
    assert sum(wanted.values()) == pytest.approx(sum(found.values()), rel=0.05)
    sent = {}
    for one in got.traffic:
        sent[one.kind] = sent.get(one.kind, 0) + one.bytes
    assert sent == pytest.approx(ranks[0]["sent"], rel=0.05)
    # Nothing else is there, right after backward.
    there = sum(c.bytes for c in got.columns if c.when != "at most")
    assert there == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(("case", "name"), RUNS, ids=[f"{c}-{n}" for c, n in RUNS])
def test_two_processes_hold_and_send_what_is_planned(two, case, name):
    assert_planned(planned(case, name, 2), [r[f"{case} {name}"] for r in two])


@pytest.mark.parametrize(("case", "name"), VARIOUS)
def test_other_kinds_of_modules_too(two, case, name):
    assert_planned(planned(case, name, 2, Various), [r[f"various {case} {name}"] for r in two])


def on_machines(rank):
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    return run("msamp_o2", "lowprec_ddp", 4)


def test_two_processes_on_each_of_two_machines(tmp_path):
    got = plan_training(Llama(), plugin("msamp_o2"), 2, 2, "lowprec_ddp", accelerator="cpu")
    assert_planned(got, on_processes(4, tmp_path, on_machines))


@pytest.mark.parametrize("case", ["fp16_amp", "msamp_o3", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"])
def test_one_process(case):
    assert_planned(plan_training(Llama(), plugin(case), accelerator="cpu"), [run(case, "auto", 1)])


@pytest.mark.parametrize("case", ["te_fp8", "msamp_o2", "bf16_mixed", "bf16_with_fp8_mixed"])
def test_adapters_of_peft(case):
    got, fp8 = plan_training(Adapted(), plugin(case), accelerator="cpu"), level_of(case).has_fp8
    assert_planned(got, [run(case, "auto", 1, Adapted)])
    base = sum(p.numel() for n, p in Adapted().named_parameters() if ".base_layer." in n)
    scales = 4 * 3 * 7  # one for each layer
    assert got.column("Weight").parts["frozen in FP8"] == (base + scales if fp8 else 0)


def test_a_model_is_left_as_it_was():
    model = Llama()
    before = {n: (type(m), set(m.__dict__)) for n, m in model.named_modules()}
    values = {n: (p, p.dtype) for n, p in model.named_parameters()}
    plan_training(model, plugin("msamp_o3"), 1, 2)
    assert {n: (type(m), set(m.__dict__)) for n, m in model.named_modules()} == before
    assert all(values[n][0] is p and values[n][1] == p.dtype for n, p in model.named_parameters())


def test_frozen_parameters_take_no_gradient_and_no_states():
    model = Llama()
    model.model.model.layers.requires_grad_(False)
    got, whole = plan_training(model, plugin("bf16_mixed")), plan_training(Llama(), plugin("bf16_mixed"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights, frozen = got.column("Weight"), sum(p.numel() for p in model.parameters()) - trained
    assert (weights.bytes, weights.formats) == (whole.column("Weight").bytes, whole.column("Weight").formats)
    assert weights.parts["frozen"] == 2 * frozen
    assert got.column("Weight gradient").bytes == 4 * trained
    assert got.column("Optimizer states").bytes == 8 * trained
    assert got.column("Master weight").bytes == 4 * trained


def quantized(precision, **options):
    """(column of quantized weights or None, elements of the converted weights); the head is not converted."""
    model = Llama()
    elements = sum(m.weight.numel() for m in model.model.model.modules() if isinstance(m, nn.Linear))
    found = [c for c in plan_training(model, precision, **options).columns if c.name == "Quantized weights"]
    return (found[0] if found else None), elements


SCALES = 4 * 3 * 7  # an FP32 number for each of seven weights in three layers


@pytest.mark.parametrize(
    ("case", "accelerator", "per_element", "scales", "fmt"),
    [
        ("te_fp8", "gpu", 2, SCALES, "fp8"),
        ("te_fp8", "cpu", 1, SCALES, "fp8"),
        ("bf16_with_fp8_current_scaling_mixed", "gpu", 2, SCALES, "fp8"),
        ("msamp_o2", "gpu", 2, SCALES, "fp8"),
        ("msamp_o3", "gpu", 1, 0, "fp8"),
        ("bf16_with_fp8_mixed+fp8_params", "gpu", 1, 0, "fp8"),
        ("bf16_with_mxfp8_mixed", "gpu", 2 + 2 / 32, 0, "fp8"),
        ("bf16_with_nvfp4_mixed", "gpu", 1 + 2 / 256, 0, "fp4"),
    ],
)
def test_quantized_weights_that_layers_keep(case, accelerator, per_element, scales, fmt):
    column, elements = quantized(plugin(case), accelerator=accelerator)
    assert column.bytes == per_element * elements + scales
    assert (column.when, column.formats, set(column.parts)) == ("kept", fmt, {"converted"})


@pytest.mark.parametrize("case", ["msamp_o3", "bf16_with_fp8_mixed+fp8_params"])
def test_a_weight_in_fp8_is_its_own_operand_on_a_cpu(case):
    assert quantized(plugin(case), accelerator="cpu")[0] is None


@pytest.mark.parametrize(
    ("case", "options", "processes"),
    [
        ("bf16_mixed", {}, {}),
        ("te_fp8", {"weight_cache": False}, {}),
        ("te_fp8", {}, {"gpus": 2, "strategy": "lowprec_sharded"}),
    ],
)
def test_quantized_weights_that_are_not_kept(case, options, processes):
    assert quantized(plugin(case, **options), **processes)[0] is None


def test_the_whole_model_decides_and_not_the_blocks_that_are_traced(monkeypatch):
    def planned_with(**options):
        return plan_training(model, plugin("te_fp8", **options), micro_batch_size=1, seq_length=32)

    model = CausalLM("llama_tiny", config={"num_hidden_layers": 6}, vocab_size=512)
    model.configure_model()
    kept, plain = planned_with(weight_cache=True), planned_with(weight_cache=False)
    elements = sum(w.numel() for m in model.model.model.modules() if isinstance(m, nn.Linear) for w in [m.weight])
    monkeypatch.setattr(computation, "_KEPT_WEIGHTS", elements)
    assert planned_with().columns == kept.columns
    monkeypatch.setattr(computation, "_KEPT_WEIGHTS", elements - 1)  # as many as five blocks have, and more
    assert planned_with().columns == plain.columns
    # The transposes, which backward reads, are among what is kept.
    more = plain.column("Activations").bytes - kept.column("Activations").bytes
    assert more == elements + 4 * 7 * 6


def test_weights_of_gpt_2_lie_the_other_way():
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32, use_cache=False)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for case, bytes_each in (("te_fp8", 2), ("msamp_o3", 1)):
        model = GPT2LMHeadModel(config)
        got = plan_training(model, plugin(case), batch={"input_ids": tokens})
        elements = sum(m.weight.numel() for m in model.modules() if isinstance(m, Conv1D))
        assert got.column("Quantized weights").bytes // elements == bytes_each
        assert not got.without


def test_tied_weights_count_once():
    model = Llama()
    model.model.lm_head.weight = model.model.model.embed_tokens.weight
    assert (
        plan_training(Llama(), plugin("fp16_amp")).parameters - plan_training(model, plugin("fp16_amp")).parameters
        == 510 * 256
    )


def test_released_gradients_are_there_one_at_a_time():
    got = plan_training(Llama(), plugin("msamp_o2", gradient_release=True)).column("Weight gradient")
    assert got.when == "at most" and 0 < got.bytes < 2 * 256 * 512


def test_padding_of_shards_is_told():
    # 510 rows on 512 processes and 128 on as many: a row each, and three rows of four are padding.
    got = plan_training(Llama(), plugin("msamp_o3"), 64, 8)
    assert got.padding == pytest.approx(sum(-(-p.shape[0] // 512) * 512 * p[0].numel() for p in Llama().parameters())
                                        / got.parameters - 1)  # fmt: skip
    assert "Padding" in printed(got)


def test_peers_of_one_machine_have_memory_of_their_own():
    one = plan_training(Llama(), plugin("msamp_o2"), 1, 8, "lowprec_ddp").column("Communication buffers").bytes
    eight = plan_training(Llama(), plugin("msamp_o2"), 8, 1, "lowprec_ddp").column("Communication buffers").bytes
    assert one > eight > 0  # nine messages to everyone against at most five


def test_gpus_that_nccl_keeps_apart_have_the_buffers_of_collectives(monkeypatch):
    buffers = lambda *devices: plan_training(Llama(), plugin("msamp_o2"), *devices, "lowprec_ddp").column(  # noqa: E731
        "Communication buffers"
    )
    peers, machines = buffers(1, 8), buffers(8, 1)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert buffers(1, 8).bytes == machines.bytes < peers.bytes


def printed(got):
    console = Console(width=160, file=io.StringIO())
    console.print(got.table())
    return console.file.getvalue()


def test_the_table_says_what_is_planned_and_what_is_not():
    got = plan_training(Llama(), plugin("msamp_o3"), 1, 2)
    text = printed(got)
    assert all(c.name in text for c in got.columns if c.bytes)
    assert all(f"Sent: {t.kind}" in text for t in got.traffic)
    assert "Activations are not planned: give plan_training" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"nodes": 0}, ValueError, "nodes=0 must be an integer"),
        ({"gpus": 2, "strategy": "single_device"}, ValueError, "single_device is one process"),
        ({"strategy": "fsdp"}, ValueError, "Unknown strategy 'fsdp'. Choose one of"),
        ({"gpus": 4, "shard_size": 3}, ValueError, "shard_size=3 must divide the number of processes, 4"),
        ({"gpus": 4, "strategy": "ddp", "shard_size": 2}, TypeError, "ddp has no option 'shard_size'"),
        ({"accelerator": "tpu"}, ValueError, "must be 'gpu' or 'cpu'"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_training(Llama(), plugin("bf16_mixed"), **arguments)


def test_gradients_that_are_released_are_not_averaged():
    with pytest.raises(ValueError, match="gradient_release=True"):
        plan_training(Llama(), plugin("msamp_o2", gradient_release=True), 1, 2)


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="configure_model"):
        plan_training(CausalLM("llama_tiny"), plugin("bf16_mixed"))


def test_a_converted_model():
    model, precision = Llama(), plugin("bf16_mixed")
    precision.convert_module(model)
    with pytest.raises(ValueError, match="converted already"):
        plan_training(model, precision)
