"""Checkpoints that are written while training goes on: when each is there, and what is removed when."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from nemo_lowprec.checkpoint import sharded_folder, writing
from nemo_lowprec.checkpoint.sharded_folder import is_folder
from nemo_lowprec.checkpoint.writing import part_of, put_in_place, recover, remove, start_part
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.models.saved_weights import open_checkpoint
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.train import check_ckpt_path
from tests.processes import on_processes
from tests.support import Net, Samples, plugin, trainer


class Gate(Callback):
    """Holds each writing up for a step, and looks at what is there meanwhile."""

    def __init__(self, folder):
        self.folder, self.open, self.seen = folder, [threading.Event() for _ in range(2)], []
        self.save, self.calls = dcp.save, 0

    def on_fit_start(self, trainer, module):
        def held_up(*args, **kwargs):
            gate, self.calls = self.open[self.calls], self.calls + 1
            assert gate.wait(60)
            return self.save(*args, **kwargs)

        dcp.save = held_up

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step in (3, 5):
            self.seen.append([is_folder(self.folder / f"step={step}.ckpt") for step in (2, 4)])
            self.open[trainer.global_step // 2 - 1].set()

    def on_fit_end(self, trainer, module):
        dcp.save = self.save


def fit(rank, folder, *callbacks, **options):
    saving = ModelCheckpoint(folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=2)
    strategy = LowPrecisionShardedStrategy(async_checkpoints=True)
    one = trainer(
        plugin("msamp_o2"), *callbacks, saving, devices=2, strategy=strategy, use_distributed_sampler=False,
        max_epochs=-1, **options,
    )  # fmt: skip
    one.fit(Net(), ResumableLoader(Samples(32), 4, 3, rank, 2, stop_at_epoch_end=False))
    return one


def held_up(rank, folder):
    gate = Gate(folder)
    fit(rank, folder, gate, max_steps=5)
    return gate.seen


def broken(rank, folder):
    save = dcp.save
    dcp.save = lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space left"))
    try:
        with pytest.raises(RuntimeError, match=r"step=2\.ckpt could not be written") as found:
            fit(rank, folder, max_steps=6)
        return str(found.value.__cause__)
    finally:
        dcp.save = save


def broken_on_first(rank, folder):
    """What only the first process does fails: (the error of a thread, of a checkpoint that all wait for)."""
    whole = sharded_folder.put_in_place
    sharded_folder.put_in_place = lambda path: (_ for _ in ()).throw(OSError("read-only"))
    try:
        with pytest.raises(RuntimeError, match=r"step=2\.ckpt could not be written") as found:
            fit(rank, folder, max_steps=6)
        with pytest.raises(OSError, match="read-only"):
            sharded_folder.begin_sharded({"state_dict": {"weight": torch.ones(3)}}, folder / "now.ckpt")()
        return str(found.value.__cause__)
    finally:
        sharded_folder.put_in_place = whole


def after(rank, folder):
    """Saved when the training is over."""
    one = fit(rank, folder / "during", max_steps=1)
    one.save_checkpoint(folder / "after.ckpt")
    return is_folder(folder / "after.ckpt")


def every_one(rank, folder):
    return [f(rank, folder / f.__name__) for f in (held_up, broken, broken_on_first, after)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, place):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_one, place)


def test_the_last_complete_checkpoint_stays_until_the_next_is_complete(ranks, place):
    assert ranks[0][0] == [[False, False], [True, False]]
    assert [p.name for p in (place / "held_up").iterdir()] == ["step=4.ckpt"]
    assert is_folder(place / "held_up" / "step=4.ckpt")


def test_an_error_of_the_writing_thread_ends_the_training(ranks):
    assert [rank[1] for rank in ranks] == ["no space left"] * 2


def test_an_error_of_the_first_process_is_that_of_all(ranks):
    assert [rank[2] for rank in ranks] == ["read-only"] * 2


def test_what_is_saved_after_the_training_is_there_at_once(ranks):
    assert [rank[3] for rank in ranks] == [True, True]


def test_one_file_is_not_written_in_the_background():
    with pytest.raises(ValueError, match="async_checkpoints=True writes folders"):
        LowPrecisionShardedStrategy(async_checkpoints=True, save_distributed_checkpoint=False)


def fill(folder, text):
    start_part(folder)
    (part_of(folder) / "text").write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(writing, "_exchange", lambda one, other: False)
    for text in ("first", "second"):
        fill(tmp_path / "a", text)
        put_in_place(tmp_path / "a")
        assert (tmp_path / "a" / "text").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_a_file(tmp_path, monkeypatch, exchange):
    """Which is there until the folder is, or is found again."""
    place, rename, seen = tmp_path / "a", writing.os.replace, []
    if not exchange:
        monkeypatch.setattr(writing, "_exchange", lambda one, other: False)
    unlink = writing.Path.unlink
    monkeypatch.setattr(writing.Path, "unlink", lambda path, **o: (seen.append(place.is_dir()), unlink(path, **o))[1])
    place.write_text("first")
    fill(place, "second")
    seen.clear()
    monkeypatch.setattr(writing.os, "replace", lambda *args: (rename(*args), seen.append(found_again(place)))[0])
    put_in_place(place)
    assert (place / "text").read_text() == "second"
    assert all(seen) and len(seen) == (1 if exchange else 3)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def found_again(place):
    """Whether what is beside ``place`` would be taken back after a kill, or it is there."""
    return place.is_dir() or writing._old_of(place).read_text() == "first"


def test_a_file_comes_back_where_a_process_was_killed_between_two_renames(tmp_path):
    (tmp_path / "a").write_text("first")
    fill(tmp_path / "a", "second")
    writing.os.replace(tmp_path / "a", writing._old_of(tmp_path / "a"))
    recover(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "first"


def test_a_folder_that_is_removed_is_whole_until_it_is_gone(tmp_path, monkeypatch):
    fill(tmp_path / "a", "first")
    put_in_place(tmp_path / "a")
    rmtree, seen = writing.shutil.rmtree, []
    monkeypatch.setattr(
        writing.shutil, "rmtree", lambda path, **o: (seen.append((tmp_path / "a").exists()), rmtree(path, **o))[1]
    )
    remove(tmp_path / "a")
    assert seen == [False]
    assert list(tmp_path.iterdir()) == []
    remove(tmp_path / "a")  # somebody else has


def exported(folder):
    with pytest.raises(ValueError, match="no complete sharded checkpoint"):  # a folder of a text
        open_checkpoint(folder)


def resumed(folder):
    with pytest.raises(ValueError, match="is a folder, and no checkpoint"):
        check_ckpt_path(folder)


@pytest.mark.parametrize("opener", [recover, resumed, exported])
def test_a_folder_comes_back_where_a_process_was_killed_between_two_renames(tmp_path, monkeypatch, opener):
    """On a file system without exchange."""
    folder, rename, calls = tmp_path / "a", writing.os.replace, []
    fill(folder, "first")
    put_in_place(folder)
    fill(folder, "second")

    def killed(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(rename(*args))

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_exchange", lambda one, other: False)
        patch.setattr(writing.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            put_in_place(folder)
    assert not folder.exists()
    opener(folder)
    assert (folder / "text").read_text() == "first"
