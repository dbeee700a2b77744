"""Models that only the first process makes, or nobody does: values where the model is sharded."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.models import CausalLM
from nemo_lowprec.strategies import LowPrecisionShardedStrategy, shard
from tests.processes import on_processes
from tests.strategies.test_sharded import Blocks, run, weights_of, wholes
from tests.support import Samples, assert_same, plugin, trainer

CASES = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_mixed", "bf16_with_fp8_mixed+fp8_params"]


class Norm(nn.Module):
    """An RMSNorm as transformers writes it: nothing resets it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.25))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Shift(Norm):
    """With a buffer that no state_dict holds."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("shift", torch.full((size,), 0.25), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.shift


class Later(Blocks):
    """Blocks of other norms and tied weights, made in ``configure_model``."""

    first, second = Norm, Shift

    def __init__(self, **options):
        super().__init__(**options)
        del self.blocks, self.odd
        self.on_meta = None

    def make(self):
        torch.manual_seed(7)
        block = lambda norm: nn.Sequential(norm(128), nn.Linear(128, 144), nn.GELU(), nn.Linear(144, 128))  # noqa: E731
        self.blocks = nn.ModuleList([block(self.first), nn.ModuleList([block(self.second)]), block(nn.LayerNorm)])
        self.odd, self.tied = (nn.Linear(128, 33, bias=False) for _ in range(2))
        self.tied.weight = self.odd.weight

    def middle(self, x):
        return super().middle(x) + self.tied(x)

    def configure_model(self):
        if self.on_meta is None:
            self.make()
            self.on_meta = self.odd.weight.is_meta


class OnFirst(Later):
    def configure_model(self):
        with self.trainer.strategy.init_on_first_process():
            super().configure_model()


class OnNone(Later):
    """Of modules that can be initialized, and of one that cannot."""

    first = second = nn.LayerNorm

    def configure_model(self):
        with torch.device("meta"):
            super().configure_model()


class NoReset(OnNone):
    first = Norm


class TooLarge(OnFirst):
    """What only the first process can see."""

    def make(self):
        super().make()
        with torch.no_grad():
            self.odd.weight[0, 0] = 1e6


class Attribute(OnFirst):
    def make(self):
        super().make()
        self.blocks[0][1].offset = torch.zeros(3)


def start(net, rank):
    """(weights before the first step, whether this process had them on the meta device)"""
    model, found = net(), {}

    def note():
        found.update(weights_of(model))
        assert model.tied.weight is model.odd.weight

    model.on_train_start = note
    options = {"devices": 2, "strategy": LowPrecisionShardedStrategy(), "use_distributed_sampler": False}
    trainer(plugin("bf16_mixed"), max_steps=1, **options).fit(model, ResumableLoader(Samples(32), 4, 3, rank, 2))
    return found, model.on_meta


def refused(net, rank, case="bf16_mixed"):
    with pytest.raises(ValueError) as found:
        run(case, rank, net)
    return str(found.value)


def held_while_sharding(rank):
    """The most elements that plain parameters have at a time, of a model of eight blocks on the meta device."""

    def held():
        found = (o for o in gc.get_objects() if type(o) is nn.Parameter and not o.is_meta)
        return sum(p.numel() for p in found)

    def noted(unit, **options):
        gc.collect()
        most.append(held() - before)
        return fully_shard(unit, **options)

    with torch.device("meta"):
        model = nn.Sequential()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(8))
    gc.collect()
    most, before, fully_shard = [], held(), shard.fully_shard
    shard.fully_shard = noted
    try:
        shard.shard_model(model, init_device_mesh("cpu", (2,)), torch.device("cpu"), MixedPrecisionPolicy(), True)
    finally:
        shard.fully_shard = fully_shard
    return most


def every_case(rank):
    found = {case: {net.__name__: run(case, rank, net, max_steps=3) for net in (Later, OnFirst)} for case in CASES}
    found["start"] = {net.__name__: start(net, rank) for net in (Later, OnFirst, OnNone)}
    found["refused"] = {net.__name__: refused(net, rank) for net in (NoReset, Attribute)}
    found["refused"]["TooLarge"] = refused(TooLarge, rank, "msamp_o2")
    found["held"] = held_while_sharding(rank)
    found["language model"] = language_model(rank, 2)
    return found


def language_model(rank, world):
    seen = []

    class Model(CausalLM):
        def configure_model(self):
            super().configure_model()
            seen.append(all(p.is_meta for p in self.parameters()))

    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
    model = Model(model_type="llama", config=config, vocab_size=128, lr=1e-3)
    tokens = torch.randint(128, (16, 17), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens[rank::world].split(4 // world)]
    options = {"devices": 2, "strategy": LowPrecisionShardedStrategy(), "use_distributed_sampler": False}
    one = trainer(plugin("bf16_mixed"), max_steps=2, **(options if world > 1 else {}))
    losses = []
    model.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"].detach()))
    one.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    return {"meta": seen, "losses": losses, "weights": wholes(dict(model.named_parameters()))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


@pytest.mark.parametrize("case", CASES)
def test_what_one_process_makes_trains_as_what_all_make(ranks, case):
    for rank in ranks:
        assert_same(rank[case]["OnFirst"], rank[case]["Later"])


def test_other_processes_hold_no_values(ranks):
    assert [rank["start"]["OnFirst"][1] for rank in ranks] == [False, True]
    assert [rank["start"]["Later"][1] for rank in ranks] == [False, False]


def test_modules_initialize_what_nobody_has_made(ranks):
    assert [rank["start"]["OnNone"][1] for rank in ranks] == [True, True]
    weights = ranks[0]["start"]["OnNone"][0]
    assert_same(weights, ranks[1]["start"]["OnNone"][0])
    assert torch.equal(weights["blocks.0.0.weight"], torch.ones(128))
    for name in ("odd.weight", "blocks.2.1.weight"):  # nn.Linear's: uniform
        bound = weights[name].shape[1] ** -0.5
        assert 0.95 * bound < weights[name].abs().max() <= bound, name
        assert weights[name].std() == pytest.approx(bound / 3**0.5, rel=0.05), name


def test_what_cannot_get_values_is_refused_on_all_processes(ranks):
    for rank in ranks:
        by_nobody, apart = rank["refused"]["NoReset"], rank["refused"]["Attribute"]
        assert "blocks.0.0 (Norm)" in by_nobody and "init_on_first_process" in by_nobody
        assert "blocks.0.1.offset is on the meta device" in apart
        assert "odd.weight has values beyond 65504" in rank["refused"]["TooLarge"]


def test_one_block_at_a_time_is_whole(ranks):
    for rank in ranks:
        assert rank["held"] == [64 * 65] * 8 + [0]


def test_a_language_model_is_made_by_the_first_process(ranks):
    alone = language_model(0, 1)
    assert [rank["language model"]["meta"] for rank in ranks] == [[False], [True]]
    losses = torch.tensor([rank["language model"]["losses"] for rank in ranks]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"]), rtol=1e-3, atol=0)
    for name, value in alone["weights"].items():
        assert (ranks[0]["language model"]["weights"][name] - value).norm() <= 0.02 * value.norm() + 1e-6, name
