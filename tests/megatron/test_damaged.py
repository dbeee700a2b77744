"""A folder of Megatron-core's is looked through before Megatron-core opens it: on the CPU, over gloo."""

import io
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_lowprec.checkpoint.dcp_folder import check_folder, write_checksums
from tests.checkpoint.damage import Trap, flip, flip_in_tensor, sprung
from tests.megatron.cpu import CpuForCuda
from tests.megatron.test_optimizer import FORMS, build, saved, train
from tests.processes import on_processes


def _trap_index(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(folder.parent)))
    (folder / "checksums.json").unlink()


def _trap_object(folder):
    """In an object beside the tensors, which Megatron-core opens as a pickle."""
    index, file = pickle.loads((folder / ".metadata").read_bytes()), io.BytesIO()
    torch.save(Trap(folder.parent), file)
    for item, info in index.storage_data.items():
        if isinstance(index.state_dict_metadata[item.fqn], BytesStorageMetadata):
            path = folder / info.relative_path
            info.offset, info.length = path.stat().st_size, len(file.getvalue())
            with path.open("ab") as sink:
                sink.write(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / "checksums.json").unlink()


HARMS = {
    "a bit of a tensor": (lambda folder: flip_in_tensor(folder, "exp_avg"), r"exp_avg\S* in \S+distcp is damaged"),
    "a bit of the index": (lambda folder: flip(folder / ".metadata", 300), r"\.metadata is damaged"),
    "a bit of metadata.json": (lambda folder: flip(folder / "metadata.json", 5), r"metadata\.json is damaged"),
    "code for an index": (_trap_index, r"\.metadata holds posix\.system"),
    "code in common.pt": (
        lambda folder: torch.save(Trap(folder.parent), folder / "common.pt"), r"common\.pt holds posix\.system"
    ),
    "code in an object": (_trap_object, r"distcp holds posix\.system"),
}  # fmt: skip


def job(rank, place):
    from nemo_lowprec.megatron.parallel import ParallelLayout

    found = {}
    with CpuForCuda():
        ParallelLayout().initialize()
        chunk, stepper = build("msamp_o2+fp16")
        train(chunk, stepper, rank, range(1))
        for form in FORMS:
            saved(chunk, stepper, rank, place / form, form)
            if rank == 0:
                write_checksums(place / form)
            dist.barrier()
            check_folder(place / form)
        for harm, (spoil, message) in HARMS.items():
            # The other form has no objects; the one that has them holds its states in one tensor.
            copy = place / harm.replace(" ", "_") / "x"
            if rank == 0:
                shutil.copytree(place / FORMS[1], copy)
                spoil(copy)
            dist.barrier()
            with pytest.raises(ValueError, match=message) as error:
                check_folder(copy)
            found[harm] = str(error.value)
            assert not sprung(copy.parent).exists()
    return found


def test_all_processes_refuse_it(tmp_path):
    one, other = on_processes(2, tmp_path, job, tmp_path / "saved")
    assert one.keys() == other.keys() == HARMS.keys()  # each may have met another tensor first
    assert all("\n" not in message for message in (*one.values(), *other.values()))
