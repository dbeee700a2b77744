"""A folder of Megatron-core's is looked through before Megatron-core opens it: on the CPU, over gloo."""

import io
import multiprocessing
import pickle
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from benchmarks.cpu_for_cuda import CpuForCuda
from nemo_lowprec.checkpoint.writing import NotWrittenError
from tests.checkpoint.damage import Trap, flip, flip_in_tensor, sprung
from tests.megatron.test_optimizer import FORMS, build, train
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


def at_work(chunk, stepper):
    """What ``megatron.checkpoint`` asks of a ``MegatronEngine``, which needs a GPU."""
    guard = stepper.guard
    return SimpleNamespace(
        is_pipelined=False, chunks=[chunk], optimizer=stepper, columns=guard.columns, guard=guard, layout=None
    )  # fmt: skip


def job(rank, place):
    from nemo_lowprec.megatron.checkpoint import load, save
    from nemo_lowprec.megatron.parallel import ParallelLayout

    found, saved = {}, place / "x.ckpt"
    with CpuForCuda():
        ParallelLayout().initialize()
        chunk, stepper = build("bf16_mixed")
        train(chunk, stepper, rank, range(1))
        engine, form = at_work(chunk, stepper), FORMS[1]  # the form that has objects beside its tensors
        rest = {"state_dict": {}, "optimizer_states": [], "global_step": 1}
        save(rest, saved, engine, form)
        assert not multiprocessing.active_children()  # who would outlive a kill of this process
        before = sorted(path.name for path in saved.iterdir())
        for full in (0, 1):
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
            with pytest.raises(NotWrittenError, match=r"x\.ckpt could not be written: ") as error:
                save(rest, saved, engine, form)
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            dist.barrier()
            found[f"full {full}"] = str(error.value)
            assert sorted(path.name for path in saved.iterdir()) == before
            assert [path.name for path in place.iterdir()] == ["x.ckpt"]
        assert load(saved, at_work(*build("bf16_mixed")), form)["global_step"] == 1
        chunk, stepper = build("te_fp8")
        with torch.no_grad():
            chunk.module.first.weight[3, 5] = 7e4
        stepper.reload_masters()
        large = {"state_dict": {}, "optimizer_states": []}
        save(large, place / "large.ckpt", at_work(chunk, stepper), FORMS[0])
        for case in ("msamp_o1+fp16", "msamp_o2+fp16"):
            with pytest.raises(ValueError, match=r"first\.weight has values beyond 65504, the largest of FP16"):
                load(place / "large.ckpt", at_work(*build(case)), FORMS[0])
        for harm, (spoil, message) in HARMS.items():
            copy = place.parent / harm.replace(" ", "_") / "x"
            if rank == 0:
                shutil.copytree(saved, copy)
                spoil(copy)
            dist.barrier()
            chunk, stepper = build("bf16_mixed")
            start = [param.detach().clone() for param in chunk.module.parameters()]
            with pytest.raises(ValueError, match=message) as error:
                load(copy, at_work(chunk, stepper), form)
            found[harm] = str(error.value)
            assert not sprung(copy.parent).exists()
            assert all(map(torch.equal, chunk.module.parameters(), start))
    return found


def test_all_processes_refuse_it(tmp_path):
    one, other = on_processes(2, tmp_path, job, tmp_path / "saved" / "run")
    assert one.keys() == other.keys() == HARMS.keys() | {"full 0", "full 1"}
    assert all("\n" not in message for message in (*one.values(), *other.values()))
    # Which process meets which tensor first is not said; a full disk is, by the process whose disk it is.
    assert all("File too large" in ranks[f"full {i}"] for i, ranks in enumerate((one, other)))
