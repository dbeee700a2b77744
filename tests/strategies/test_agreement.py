"""Processes that are about to train with different settings say what differs, before they train or wait."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.data.indexed import import_megatron
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.models import CausalLM
from nemo_lowprec.strategies import LowPrecisionDDPStrategy, LowPrecisionShardedStrategy
from tests.processes import on_processes
from tests.support import Net, Samples, loader, plugin, save_at, trainer

AGREE = "Processes that train one model must agree on "
STRATEGIES = {"ddp": "ddp", "lowprec_ddp": "lowprec_ddp", "lowprec_sharded": "lowprec_sharded"}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip

# By what differs: the Trainer's option on each process.
TRAINER = {
    "the Trainer's accumulate_grad_batches": ("accumulate_grad_batches", [1, 2]),
    "the Trainer's max_steps": ("max_steps", [2, 3]),
    "the Trainer's max_epochs": ("max_epochs", [1, 2]),
    "the Trainer's val_check_interval": ("val_check_interval", [1, 2]),
    "the Trainer's check_val_every_n_epoch": ("check_val_every_n_epoch", [1, 2]),
    "the Trainer's limit_train_batches": ("limit_train_batches", [1.0, 2]),
    "the Trainer's limit_val_batches": ("limit_val_batches", [1.0, 0]),
    "the Trainer's gradient_clip_val": ("gradient_clip_val", [None, 1.0]),
    "the Trainer's gradient_clip_algorithm": ("gradient_clip_algorithm", ["norm", "value"]),
    "the Trainer's num_sanity_val_steps": ("num_sanity_val_steps", [0, 1]),
    "the Trainer's sync_batchnorm": ("sync_batchnorm", [False, True]),
}


def optimizers(make):
    """A net for each process."""
    return [Net(optimizer=lambda params: make(params, 0)), Net(optimizer=lambda params: make(params, 1))]


MODELS = {
    "the optimizer's lr": lambda: optimizers(lambda params, rank: torch.optim.AdamW(params, lr=1e-2 * (1 + rank))),
    "the optimizer's betas": lambda: optimizers(
        lambda params, rank: torch.optim.AdamW(params, betas=(0.9, 0.95 if rank else 0.99))
    ),
    "the optimizers": lambda: optimizers(
        lambda params, rank: (torch.optim.Adam if rank else torch.optim.AdamW)(params, weight_decay=0.0)
    ),
    "the schedulers": lambda: [Net(), Net(stepwise=True)],
    "the model's parameters": lambda: [Net(), Wider()],
}


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


def attempt(rank, strategy="ddp", model=None, callbacks=(), data=None, ckpt=None, case="bf16_mixed", **options):
    """(what the Trainer raised, seconds)."""
    data = data or ResumableLoader(Samples(32), 4, 3, rank, 2)
    # Of the same lengths: max_steps ends the training.
    options = {"max_steps": 2, **options}
    fit = trainer(
        plugin(case) if case else None,
        *callbacks,
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
        **options,
    )
    start = time.monotonic()
    try:
        fit.fit(model or Net(), *(data if isinstance(data, tuple) else (data,)), ckpt_path=ckpt)
    except (ValueError, RuntimeError) as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def seeded(rank, strategy, seeds):
    os.environ["PL_GLOBAL_SEED"] = str(seeds[rank])
    try:
        return attempt(rank, strategy)
    finally:
        del os.environ["PL_GLOBAL_SEED"]


def text(rank, strategy, folder, name, **options):
    """A run of the recipes' parts; of ``options`` each process has one."""
    mine = {key: values[rank] for key, values in options.items()}
    corpus = mine.pop("corpus", "one")
    config = {"lr": mine.pop("lr", 1e-2), "warmup_steps": mine.pop("warmup_steps", 0)}
    data = TextDataModule(
        train_prefix=folder / corpus, validation_prefix=folder / "one", vocab_size=64,
        **{"seq_length": 16, "micro_batch_size": 2, **mine},
    )  # fmt: skip
    model = CausalLM("llama_tiny", config=SIZES, schedule_steps=4, vocab_size=64, **config)
    return attempt(rank, strategy, model, data=data, limit_val_batches=0)


DATA = {
    "the data's seq_length": {"seq_length": [16, 8]},
    "the data's seed": {"seed": [0, 1]},
    "the data's micro_batch_size": {"micro_batch_size": [2, 1]},
    "the data's train corpus": {"corpus": ["one", "other"]},
    "the model's lr": {"lr": [1e-2, 1e-3]},
    "the model's warmup_steps": {"warmup_steps": [0, 2]},
}


class Said(Callback):
    """A callback that only reports."""


EPOCH = "the number of batches in an epoch (limit_train_batches cuts them alike)"
EVALUATION = "the number of batches in an evaluation (limit_val_batches cuts them alike)"


def every_case(rank, folder):
    found = {}
    for strategy in STRATEGIES.values():
        for name, (option, values) in TRAINER.items():
            found[strategy, name] = attempt(rank, strategy, **{option: values[rank]})
        for name, models in MODELS.items():
            found[strategy, name] = attempt(rank, strategy, models()[rank])
        for name, options in DATA.items():
            found[strategy, name] = text(rank, strategy, folder, name, **options)
        found[strategy, "the seed (seed_everything)"] = seeded(rank, strategy, [1, 2])
        epochs = {"max_steps": -1, "max_epochs": 2}
        uneven, same = loader(4, 12 if rank else 16), loader(4, 16)
        found[strategy, EPOCH] = attempt(rank, strategy, data=uneven, **epochs)
        found[strategy, EPOCH + " "] = attempt(rank, strategy, data=uneven, accumulate_grad_batches=2, **epochs)
        found[strategy, "as far as max_steps"] = attempt(rank, strategy, data=uneven, max_steps=3)
        name = EVALUATION if strategy == "lowprec_sharded" else "evaluated by itself"
        found[strategy, name] = attempt(rank, strategy, data=(same, uneven), val_check_interval=1)
        found[strategy, name + " "] = attempt(rank, strategy, data=(same, uneven), num_sanity_val_steps=-1)
        # Everything the same, and what may differ.
        found[strategy, ""] = attempt(rank, strategy, callbacks=[Said()] * rank)
        found[strategy, "workers"] = text(rank, strategy, folder, "", num_workers=[0, 1])
        place = folder / strategy
        attempt(rank, strategy, callbacks=[save_at(place, 1)], max_steps=2)
        ckpt, other = place / "step=1.ckpt", place / "step=2.ckpt"
        found[strategy, "ckpt_path"] = attempt(rank, strategy, ckpt=ckpt if rank else None)
        found[strategy, "ckpt_path "] = attempt(rank, strategy, ckpt=ckpt if rank else other, max_steps=4)
        found[strategy, "resumed"] = attempt(rank, strategy, ckpt=ckpt)
    steps = {"callbacks": [ModelCheckpoint(folder / "x", every_n_train_steps=1 + rank)]}
    for strategy in STRATEGIES.values():
        name = "the callbacks that save, end or change the training"
        found[strategy, name] = attempt(rank, strategy, **steps)
        found[strategy, f"{name} "] = attempt(rank, strategy, callbacks=[ModelCheckpoint(folder / "x")] * rank)
        found[strategy, f"{name}  "] = attempt(rank, strategy, callbacks=[EarlyStopping("loss")] * rank)
    sharded = {
        "the strategy's async_checkpoints": {"async_checkpoints": bool(rank)},
        "the strategy's reshard_after_forward": {"reshard_after_forward": bool(rank)},
        "the strategy's shard_size": {"shard_size": 1 + rank},
    }
    for name, options in sharded.items():
        found["lowprec_sharded", name] = attempt(rank, LowPrecisionShardedStrategy(**options))
    found["lowprec_ddp", "the strategy's bucket_cap_mb"] = attempt(
        rank, LowPrecisionDDPStrategy(bucket_cap_mb=1 + rank)
    )
    found["either", "the strategy"] = attempt(rank, "lowprec_ddp" if rank else "lowprec_sharded")
    found["any", "the strategy"] = attempt(rank, "lowprec_ddp" if rank else "ddp")
    found["either", "the level"] = attempt(rank, "lowprec_ddp", case="bf16_mixed" if rank else "te_fp8")
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    build = import_megatron("datasets.indexed_dataset").IndexedDatasetBuilder
    for number, name in enumerate(("one", "other")):
        random = np.random.RandomState(number)
        builder = build(f"{folder / name}.bin", dtype=np.uint16)
        for _ in range(20):
            builder.add_document(torch.from_numpy(random.randint(0, 64, 50)), [50])
        builder.finalize(f"{folder / name}.idx")
    first, second = on_processes(2, tmp_path_factory.mktemp("ranks"), every_case, folder)
    assert first.keys() == second.keys()
    return first, second


def test_what_differs_is_named_on_every_process(ranks):
    for first, second in zip(*(rank.items() for rank in ranks), strict=True):
        (strategy, name), (mine, seconds) = first
        theirs, others = second[1]
        if name.strip() in ("", "workers", "resumed", "as far as max_steps", "evaluated by itself"):
            assert mine == theirs == "", (strategy, name)
            continue
        assert mine == theirs, (strategy, name)
        assert f"{AGREE}{name.strip()}. There is " in mine, (strategy, name, mine)
        assert "on rank 0" in mine and "on rank 1" in mine
        assert max(seconds, others) < 20, (strategy, name)


def test_a_message_says_which_process_has_what(ranks):
    found = ranks[1]
    assert (
        found["ddp", "the optimizer's lr"][0] == f"{AGREE}the optimizer's lr. There is 0.01 on rank 0; 0.02 on rank 1."
    )
    assert (
        found["lowprec_sharded", "ckpt_path"][0] == f"{AGREE}ckpt_path. There is None on rank 0; step=1.ckpt on rank 1."
    )
    assert found["either", "the strategy"][0] == (
        f"{AGREE}the strategy. There is LowPrecisionShardedStrategy on rank 0; LowPrecisionDDPStrategy on rank 1."
    )


def mixed(rank, strategy, seconds):
    """One process has no level, and comes to collectives of callbacks and data at once."""
    kind = LowPrecisionDDPStrategy if strategy == "lowprec_ddp" else DDPStrategy
    return attempt(
        rank, kind(timeout=timedelta(seconds=seconds)) if rank else "ddp", case="bf16_mixed" if rank else None
    )


@pytest.mark.parametrize("strategy", ["ddp", "lowprec_ddp"])
def test_a_process_that_does_not_come_is_waited_for_no_longer_than_it_may_take(tmp_path, strategy):
    first, second = on_processes(2, tmp_path, mixed, strategy, 2)
    kind = "LowPrecisionDDPStrategy" if strategy == "lowprec_ddp" else "DDPStrategy"
    assert first[0] and f"Rank 0 has not come to the start of {kind} within 2 s" in second[0]
    assert max(first[1], second[1]) < 30
