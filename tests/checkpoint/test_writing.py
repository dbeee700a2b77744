"""What cannot be written leaves nothing behind, keeps what was there, and says why in one sentence.

A limit on the size of files stands for a full disk: the system refuses a write in the middle of a file, as it does
there.
"""

import os
import resource
import shutil
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.checkpoint.writing import NotWrittenError, file_in_place
from nemo_lowprec.cli import main
from nemo_lowprec.data import prepare_data
from nemo_lowprec.models.export import export_checkpoint
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from tests.processes import on_processes
from tests.support import MSAMP_LEVELS, Net, loader, plugin, save_at, trainer

SMALL = 20_000  # bytes: less than a checkpoint of Net


@contextmanager
def full_disk(free=SMALL):
    """No file may grow beyond ``free`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    """Bytes of all files, hidden ones too, by their paths."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Saves(Callback):
    """Saves to one place after each step, where there is no room from the step ``full`` on."""

    before = None

    def __init__(self, path, free, full):
        self.path, self.free, self.full = path, free, full

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx < self.full:
            trainer.save_checkpoint(self.path)
        else:
            self.before = contents(self.path.parent)
            with full_disk(self.free):
                trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("free", [0, 100, SMALL])
@pytest.mark.parametrize("case", ["bf16_mixed", *MSAMP_LEVELS])
def test_a_file_on_a_full_disk(tmp_path, case, free):
    for full in (0, 1):  # without and with an earlier one
        saves = Saves(tmp_path / "x.ckpt", free, full)
        with pytest.raises(NotWrittenError, match=r"x\.ckpt could not be written: File too large; an earlier") as found:
            trainer(plugin(case), saves, max_steps=3).fit(Net(), loader())
        assert "\n" not in str(found.value)
        assert contents(tmp_path) == saves.before and list(saves.before) == ["x.ckpt"] * full
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["global_step"] == 1


def test_the_device_that_is_always_full(tmp_path):
    """ENOSPC of the system itself."""
    place = tmp_path / "x"
    place.write_text("earlier")
    full = pytest.raises(NotWrittenError, match="x could not be written: No space left on device")
    with full, file_in_place(place) as file:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        torch.save(torch.randn(10_000), file)
    assert contents(tmp_path) == {"x": b"earlier"}


def test_an_interrupt_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), file_in_place(tmp_path / "x") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed(tmp_path):
    """A folder that cannot be made: a file is in its way (a user without rights is no other case, and root has all)."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "folder"


def test_a_folder_that_cannot_be_made(tmp_path, closed):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(closed / "x.ckpt")

    with pytest.raises(NotWrittenError, match=r"x\.ckpt could not be written: (Not a directory|File exists)"):
        trainer(plugin("bf16_mixed"), Saves(), max_steps=1).fit(Net(), loader())


def test_an_export(tmp_path, closed):
    trainer(plugin("msamp_o2"), save_at(tmp_path, 1), max_steps=1).fit(Net(), loader())
    path, before = tmp_path / "step=1.ckpt", contents(tmp_path)
    left = "out could not be written: .*File too large.*nothing is left"
    with full_disk(), pytest.raises(NotWrittenError, match=left):
        export_checkpoint(path, tmp_path / "out", "fp32")
    with pytest.raises(NotWrittenError, match="could not be written: Not a directory"):
        export_checkpoint(path, closed / "out")
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*"))
    assert main(["export", str(path), str(closed / "out")]) == 2


def test_prepared_data(tmp_path, closed, capsys):
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(f"word{j * i % 97}" for j in range(300)))
    before = contents(tmp_path)
    for free in (200, 3000):  # the tokenizer's file; those of the tokens
        with full_disk(free), pytest.raises(NotWrittenError, match=r"out could not be written: .*File too large"):
            prepare_data(tmp_path / "out", source=tmp_path / "texts", vocab_size=260, validation_fraction=0.2)
    with pytest.raises(NotWrittenError, match="could not be written: Not a directory"):
        prepare_data(closed / "out", source=tmp_path / "texts", vocab_size=260, validation_fraction=0.2)
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*"))
    options = ["--source", str(tmp_path / "texts"), "--validation-fraction", "0.2"]
    assert main(["prepare-data", "--out", str(closed / "out"), *options]) == 2
    assert "prepare-data: " in capsys.readouterr().err


# Several processes

FORMS = {
    "ddp": lambda: "ddp",
    "lowprec_ddp": lambda: "lowprec_ddp",
    "folder": LowPrecisionShardedStrategy,
    "file": lambda: LowPrecisionShardedStrategy(save_distributed_checkpoint=False),
    "async": lambda: LowPrecisionShardedStrategy(async_checkpoints=True),
}


class SavesOnFew(Callback):
    """The same on several processes: the disk is full for ``rank`` only."""

    def __init__(self, path, rank):
        self.path, self.rank, self.earlier = path, rank, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)
            wait(strategy)
            self.earlier = contents(self.path.parent)
        else:
            with full_disk() if dist.get_rank() == self.rank else warnings.catch_warnings():
                trainer.save_checkpoint(self.path)
                wait(strategy)


def wait(strategy):
    writer = getattr(strategy, "_writer", None)
    if writer is not None:
        writer.wait()
    dist.barrier()


def job(rank, place):
    warnings.simplefilter("ignore")
    found = {}
    for form, strategy in FORMS.items():
        for full in (0, 1) if form in ("folder", "async") else (0,):
            saves = SavesOnFew(place / f"{form}{full}" / "x.ckpt", full)
            with pytest.raises(NotWrittenError, match=r"x\.ckpt could not be written: .*File too large") as error:
                trainer(plugin("msamp_o2"), saves, devices=2, strategy=strategy(), max_steps=3).fit(Net(), loader())
            dist.barrier()
            left = contents(saves.path.parent)
            found[f"{form}{full}"] = "\n" not in str(error.value) and left == saves.earlier and len(left) > 0
            dist.barrier()
            trainer(
                plugin("msamp_o2"), devices=2, strategy=strategy(), max_steps=2
            ).fit(Net(), loader(), ckpt_path=saves.path)  # fmt: skip
    return found


def test_all_processes_stop_and_the_earlier_checkpoint_is_whole(tmp_path):
    place = tmp_path / "saved"
    one, other = on_processes(2, tmp_path, job, place)
    assert all(one.values()) and one == other and len(one) == 7
    for folder in place.iterdir():
        assert [p.name for p in folder.iterdir()] == ["x.ckpt"]
    shutil.rmtree(place)
