"""A sharded folder that is not what was written, or that holds code, is refused in one sentence; nothing is run."""

import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from nemo_lowprec.checkpoint.dcp_folder import write_checksums
from nemo_lowprec.models.export import export_checkpoint
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from tests.checkpoint.damage import Trap, flip, flip_in_tensor, member_at, sprung
from tests.models.test_megatron_saved import saved as of_megatron  # noqa: F401
from tests.processes import on_processes
from tests.strategies.test_sharded import wholes
from tests.support import MSAMP_LEVELS, Net, kept, loader, plugin, save_at, trainer

LEVEL = "msamp_o2"
INDEX, META = ".metadata", "meta.pt"


def _index(folder: Path) -> Metadata:
    return pickle.loads((folder / INDEX).read_bytes())


def _flip_in_tensor(folder: Path) -> None:
    flip_in_tensor(folder, "mid.weight")
    flip_in_tensor(folder, "embeddings.weight")


def _flip_in_index(folder: Path) -> None:
    """Where a part of a tensor begins, or its file; as before the folder had checksums it would open."""
    data = (folder / INDEX).read_bytes()
    flip(folder / INDEX, data.index(b"requires_grad") if b"requires_grad" in data else len(data) // 2, 0)


def _trap(folder: Path, protocol: int = 4) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(Trap(folder.parent), protocol))
    (folder / "checksums.json").unlink(missing_ok=True)


def _trap_inside(folder: Path) -> None:
    """In an index that is as it should be otherwise."""
    index = _index(folder)
    index.planner_data = Trap(folder.parent)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    (folder / "checksums.json").unlink(missing_ok=True)


def _elsewhere(folder: Path) -> None:
    """An index that sends its reader to a pipe outside the folder."""
    index = _index(folder)
    os.mkfifo(folder.parent / "pipe")
    for info in index.storage_data.values():
        info.relative_path = "../pipe"
    (folder / INDEX).write_bytes(pickle.dumps(index))
    (folder / "checksums.json").unlink(missing_ok=True)


def _flip_in_meta(folder: Path) -> None:
    with zipfile.ZipFile(folder / META) as file:
        found = next(i for i in file.infolist() if i.filename.endswith("data.pkl"))
    flip(folder / META, member_at((folder / META).read_bytes(), found) + found.file_size // 2)


def _trap_meta(folder: Path) -> None:
    torch.save({"hyper_parameters": Trap(folder.parent)}, folder / META)


def _pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def _short(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 100)


HARMS = {
    "a bit of a tensor": (_flip_in_tensor, r"(mid|embeddings)\.weight in \S+distcp is damaged"),
    "a bit of the index": (_flip_in_index, r"\.metadata is damaged"),
    "a bit of meta.pt": (_flip_in_meta, r"meta\.pt is damaged"),
    "code for an index, protocol 2": (lambda folder: _trap(folder, 2), r"\.metadata holds posix\.system"),
    "code for an index, protocol 4": (_trap, r"\.metadata holds posix\.system"),
    "code in the index": (_trap_inside, r"\.metadata holds posix\.system"),
    "code in meta.pt": (_trap_meta, r"meta\.pt holds posix\.system"),
    "files of other folders": (_elsewhere, r"\.metadata is damaged"),
    "a file gone": (lambda folder: (folder / "__0_0.distcp").unlink(), "incomplete .*does not exist"),
    "a file cut short": (_short, "incomplete|no complete checkpoint"),
    "a pipe for a file": (_pipe, "is a pipe"),
}  # fmt: skip


def harmed(folder: Path, harm: str, place: Path) -> Path:
    """A copy that was harmed, made by the first process."""
    copy = place / harm.replace(" ", "_") / "x.ckpt"
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(folder, copy)
        HARMS[harm][0](copy)
    if dist.is_initialized():
        dist.barrier()
    return copy


def sharded(case, *callbacks, **options):
    return trainer(plugin(case), *callbacks, devices=2, strategy=LowPrecisionShardedStrategy(), **options)


class Large(Net):
    """With a value beyond FP16."""

    def __init__(self):
        super().__init__(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        with torch.no_grad():
            self.mid.weight[3, 5] = 7e4


def job(rank, place):
    warnings.simplefilter("ignore")
    sharded(LEVEL, save_at(place, 1), max_steps=1).fit(Net(), loader())
    found = {}
    for harm, (_, message) in HARMS.items():
        path = harmed(place / "step=1.ckpt", harm, place)
        for stage in ("fit", "test"):
            model = Net()
            with pytest.raises(ValueError, match=message) as error:
                getattr(sharded(LEVEL, max_steps=2), stage)(model, loader(), ckpt_path=path)
            assert not model.losses and str(path.parent) in str(error.value)
            found[f"{harm} {stage}"] = str(error.value)
    old = shutil.copytree(place / "step=1.ckpt", place / f"old{rank}")  # of an earlier version: without checksums
    (old / "checksums.json").unlink()
    resumed = sharded(LEVEL, max_steps=2)
    resumed.fit(Net(), loader(), ckpt_path=place / "old0")
    found["old"] = resumed.global_step
    sharded("te_fp8", save_at(place / "large", 1), max_steps=1).fit(Large(), loader())
    one = LowPrecisionShardedStrategy(save_distributed_checkpoint=False)
    trainer(plugin("te_fp8"), save_at(place / "file", 1), devices=2, strategy=one, max_steps=1).fit(Large(), loader())
    for case in MSAMP_LEVELS:
        for form in ("large", "file"):
            model = Net()
            want = {name: kept(case, name, p.detach().clone()).float() for name, p in model.named_parameters()}
            with pytest.raises(RuntimeError, match=r"mid\.weight has values beyond 65504, the largest of FP16"):
                sharded(case, max_steps=2).fit(model, loader(), ckpt_path=place / form / "step=1.ckpt")
            now = wholes(dict(model.named_parameters()))
            found[f"{case} {form}"] = all(torch.equal(now[name], want[name]) for name in want) and not model.losses
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, place):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), job, place)


@pytest.mark.parametrize("harm", HARMS)
def test_all_processes_refuse_a_folder(ranks, place, harm):
    for stage in ("fit", "test"):
        one, other = (found[f"{harm} {stage}"] for found in ranks)
        assert one == other and "\n" not in one
    assert not sprung(place / harm.replace(" ", "_")).exists()


def test_a_folder_of_an_earlier_version_opens(ranks):
    assert [found["old"] for found in ranks] == [2, 2]


@pytest.mark.parametrize("form", ["large", "file"])
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_values_beyond_fp16_are_refused_before_anything_is_changed(ranks, case, form):
    assert all(found[f"{case} {form}"] for found in ranks)


@pytest.mark.parametrize("harm", HARMS)
def test_an_export_refuses_it(ranks, place, tmp_path, harm):
    path = harmed(place / "step=1.ckpt", harm, tmp_path)
    with pytest.raises(ValueError, match=HARMS[harm][1]) as error:
        export_checkpoint(path, tmp_path / "out")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert not sprung(path.parent).exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", HARMS)
def test_an_export_refuses_megatrons_folder(of_megatron, tmp_path, harm):  # noqa: F811
    write_checksums(of_megatron[1])
    path = harmed(of_megatron[1], harm, tmp_path / "harmed")
    with pytest.raises(ValueError, match=HARMS[harm][1]) as error:
        export_checkpoint(path, tmp_path / "out")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert not sprung(path.parent).exists() and not (tmp_path / "out").exists()
