"""The loader's position, alone and through real Lightning runs."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from nemo_lowprec.data.loader import ResumableLoader, validation_loader
from nemo_lowprec.data.module import TextDataModule
from nemo_lowprec.data.packed import PackedDataset


class Numbers:
    """A dataset whose sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"n": torch.tensor(index)}


def numbers(batches) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def flat(parts) -> list:
    return list(chain.from_iterable(parts))


def take(loader, count: int) -> list[list[int]]:
    iterator = iter(loader)
    return numbers(next(iterator) for _ in range(count))


def test_an_epoch_has_every_sample_once_and_the_next_another_order():
    loader = ResumableLoader(Numbers(23), 4, seed=5)
    assert len(loader) == 5
    first, second, third = numbers(loader), numbers(loader), numbers(loader)
    assert flat(first) == list(range(20))
    for epoch in (second, third):
        assert len(epoch) == 5
        assert len(set(flat(epoch))) == 20
    assert second != third
    again = ResumableLoader(Numbers(23), 4, seed=5)
    assert [numbers(again), numbers(again)] == [first, second]
    other = ResumableLoader(Numbers(23), 4, seed=6)
    assert [numbers(other), numbers(other)] != [first, second]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("endless", [False, True])
def test_position_counts_what_was_handed_out(workers, endless):
    def make():
        return ResumableLoader(Numbers(22), 4, seed=1, num_workers=workers, stop_at_epoch_end=not endless)

    reference = make_stopping(make())
    whole = flat(numbers(reference) for _ in range(4))
    for stop in (1, 4, 5, 7, 10):
        loader = make()
        taken = []
        while len(taken) < stop:
            for batch in loader:
                taken.append(batch["n"].tolist())
                if len(taken) == stop:
                    break
        assert taken == whole[:stop]
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        rest = numbers(make_stopping(resumed))
        assert rest == whole[stop : (stop // 5 + 1) * 5]


def make_stopping(loader):
    loader.stop_at_epoch_end = True
    return loader


def test_ranks_share_the_order_of_one_rank():
    single = ResumableLoader(Numbers(50), 6, seed=2, global_batch_size=12)
    ranks = [
        ResumableLoader(Numbers(50), 3, seed=2, rank=rank, world_size=2, global_batch_size=12) for rank in range(2)
    ]
    for _ in range(2):
        expected = numbers(single)
        parts = [numbers(loader) for loader in ranks]
        assert set(flat(parts[0])).isdisjoint(flat(parts[1]))
        assert [a + b for a, b in zip(*parts, strict=True)] == expected


def test_resume_at_another_world_size_with_the_same_global_batch():
    def make(rank, world_size):
        return ResumableLoader(Numbers(50), 3, seed=2, rank=rank, world_size=world_size, global_batch_size=12)

    single = make(0, 1)
    whole = flat(numbers(single) for _ in range(3))
    pair = [make(rank, 2) for rank in range(2)]
    taken = [take(make_endless(loader), 10) for loader in pair]
    assert flat(zip(*taken, strict=True)) == whole[:20]
    assert pair[0].state_dict() == pair[1].state_dict()
    four = [make(rank, 4) for rank in range(4)]
    for loader in four:
        loader.load_state_dict(pair[0].state_dict())
    rest = [take(make_endless(loader), 4) for loader in four]
    assert flat(zip(*rest, strict=True)) == whole[20:36]


def make_endless(loader):
    loader.stop_at_epoch_end = False
    return loader


def test_the_default_random_generator_is_left_alone():
    before = torch.get_rng_state()
    numbers(ResumableLoader(Numbers(20), 4, num_workers=1))
    numbers(validation_loader(Numbers(20), 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_in_other_data_is_left_with_a_warning():
    loader = ResumableLoader(Numbers(20), 4)
    take(loader, 2)
    for other in (ResumableLoader(Numbers(24), 4), ResumableLoader(Numbers(20), 4, seed=1)):
        with pytest.warns(UserWarning, match="belongs to other data or another seed"):
            other.load_state_dict(loader.state_dict())
        assert take(other, 1) == [[0, 1, 2, 3]]


def test_validation_batches_are_whole_equal_in_number_and_the_same_each_time():
    loaders = [validation_loader(Numbers(19), 2, rank, world_size=3) for rank in range(3)]
    parts = [numbers(loader) for loader in loaders]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert sorted(flat(flat(parts))) == list(range(18))
    assert [numbers(loader) for loader in loaders] == parts


def test_too_few_validation_samples_are_refused():
    with pytest.raises(ValueError, match="There are 19 validation samples, too few for a batch of 4 on each of 5"):
        validation_loader(Numbers(19), 4, world_size=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": 2, "rank": 2, "world_size": 2}, "rank=2"),
        ({"micro_batch_size": 4, "global_batch_size": 6}, "global_batch_size=6 must be a multiple"),
        ({"micro_batch_size": 32}, "have 20 samples, less than one global batch of 32"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResumableLoader(Numbers(20), **arguments)


class Recorder(LightningModule):
    """Writes the ids of every batch it trains on to a file of its rank."""

    def __init__(self, folder: Path, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.folder = folder
        self.fail_at = fail_at
        self.seen = 0

    def training_step(self, batch, batch_idx):
        if self.fail_at is not None and self.seen == self.fail_at:
            raise RuntimeError("stopped")
        self.seen += 1
        with (self.folder / f"rank{self.global_rank}").open("a") as stream:
            stream.write(json.dumps(batch["input_ids"].tolist()) + "\n")
        return self.weight * batch["labels"].float().mean()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    """Saves a checkpoint the `count`-th time that a hook is called."""

    def __init__(self, hook: str, count: int, path: Path) -> None:
        def save(trainer, *args, **kwargs):
            self.calls += not trainer.sanity_checking
            if self.calls == count and not path.exists():
                trainer.save_checkpoint(path)

        self.calls = 0
        setattr(self, hook, save)


def train(prepared, folder, callbacks=(), ckpt_path=None, workers=0, fail_at=None, **options):
    """Trains on 64-token samples, 8 a batch and rank; returns the batches that were trained on."""
    folder.mkdir()
    data = TextDataModule(
        train_prefix=prepared.train_prefix,
        validation_prefix=prepared.validation_prefix,
        seq_length=64,
        micro_batch_size=8,
        num_workers=workers,
        pin_memory=False,
    )
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, OnExceptionCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"devices": 1, "max_epochs": -1, **options},
    )
    trainer.fit(Recorder(folder, fail_at), data, ckpt_path=ckpt_path, weights_only=False)
    return read(folder)


def read(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]


def epoch_length(prepared, global_batch=8):
    """Micro-batches of 8 in an epoch."""
    samples = len(PackedDataset(prepared.train_prefix, 64))
    return samples // global_batch * global_batch // 8


# Hook, at which call of it to save, how many batches were done then, options of the trainer.
CASES = {
    "mid-epoch": ("on_train_batch_end", 7, 7, {}),
    "mid-epoch of the second": ("on_train_batch_end", 27, 27, {}),
    "mid-epoch, bounded by epochs": ("on_train_batch_end", 27, 27, {"max_epochs": 3}),
    "within accumulation": ("on_train_batch_end", 7, 7, {"accumulate_grad_batches": 2}),
    "validation in mid-epoch": ("on_validation_end", 2, 12, {"val_check_interval": 6}),
    "a limited epoch's end": (
        "on_train_epoch_end",
        2,
        14,
        {"limit_train_batches": 7, "max_epochs": 5},
    ),
    "within a limited epoch": (
        "on_train_batch_end",
        24,
        24,
        {"limit_train_batches": 7, "max_epochs": 5},
    ),
    "a limited epoch's end, bounded by steps": (
        "on_train_epoch_end",
        2,
        14,
        {"limit_train_batches": 7},
    ),
}


@pytest.mark.parametrize(
    ("case", "workers"),
    [*((case, 0) for case in CASES), ("mid-epoch", 2), ("mid-epoch of the second", 2)],
)
def test_resumed_run_gets_the_batches_of_the_uninterrupted_one(prepared, tmp_path, case, workers):
    hook, at, done, options = CASES[case]
    if "max_epochs" not in options:
        options = {**options, "max_steps": 45 // options.get("accumulate_grad_batches", 1)}
    saved = tmp_path / "saved.ckpt"
    options = {"limit_val_batches": 1, "workers": workers, **options}
    whole = train(prepared, tmp_path / "whole", [SaveAt(hook, at, saved)], **options)
    resumed = train(prepared, tmp_path / "resumed", ckpt_path=saved, **options)
    assert len(whole) >= 34
    assert resumed == whole[done:]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("bound", ["epochs", "steps"])
def test_resume_from_the_end_of_an_epoch(prepared, tmp_path, hook, bound):
    length = epoch_length(prepared)
    at = length if hook == "on_train_batch_end" else 1
    options = {"max_epochs": 3} if bound == "epochs" else {"max_steps": 2 * length + 5}
    options["limit_val_batches"] = 1
    saved = tmp_path / "saved.ckpt"
    whole = train(prepared, tmp_path / "whole", [SaveAt(hook, at, saved)], **options)
    resumed = train(prepared, tmp_path / "resumed", ckpt_path=saved, **options)
    assert whole[:length] != whole[length : 2 * length]
    assert resumed == whole[length:]


def test_longer_run_goes_on_where_max_steps_ended_the_first(prepared, tmp_path):
    whole = train(prepared, tmp_path / "whole", max_steps=40, limit_val_batches=0)
    saved = tmp_path / "saved.ckpt"
    options = {"limit_val_batches": 0}
    first = train(prepared, tmp_path / "first", [SaveAt("on_train_end", 1, saved)], max_steps=9, **options)
    second = train(prepared, tmp_path / "second", ckpt_path=saved, max_steps=40, **options)
    assert first + second == whole


def test_a_batch_whose_step_failed_comes_again(prepared, tmp_path):
    options = {"max_steps": 12, "limit_val_batches": 0}
    whole = train(prepared, tmp_path / "whole", **options)
    save = OnExceptionCheckpoint(tmp_path, filename="saved")
    with pytest.raises(RuntimeError, match="stopped"):
        train(prepared, tmp_path / "first", [save], fail_at=5, **options)
    resumed = train(prepared, tmp_path / "second", ckpt_path=tmp_path / "saved.ckpt", **options)
    assert resumed == whole[5:]


def test_lightning_keeps_our_sampler_on_two_ranks(prepared, tmp_path):
    options = {"max_steps": 11, "limit_val_batches": 0}
    single = train(prepared, tmp_path / "single", accumulate_grad_batches=2, **options)
    train(prepared, tmp_path / "pair", devices=2, strategy="ddp_fork", **options)
    ranks = [read(tmp_path / "pair", rank) for rank in range(2)]
    assert len(single) == 22 > epoch_length(prepared, global_batch=16)
    assert flat(zip(*ranks, strict=True)) == single


def test_overfit_batches_sees_the_same_ones_in_every_epoch(prepared, tmp_path):
    seen = train(prepared, tmp_path / "run", overfit_batches=2, max_epochs=3)
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]
    assert seen[0] != seen[1]
