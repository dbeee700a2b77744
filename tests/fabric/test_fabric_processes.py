"""Fabric on two processes of gloo: DDP and FSDP2, beside the Trainer's strategies."""

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import nemo_lowprec
from tests.faces import FACE_LEVELS, STEPS, Task, batches, make_model, make_optimizer
from tests.processes import on_processes
from tests.support import plugin, trainer

KINDS = {"ddp": "ddp", "fsdp2": "lowprec_sharded"}  # of Fabric and of the Trainer


def device():
    """Where this process trains: ``tests/gpu`` runs the same job over NCCL."""
    return "gpu" if dist.get_backend() == "nccl" else "cpu"


def at(level):
    return plugin(level, backend="auto" if device() == "gpu" else "reference")


def fabric(kind, level, parallelize=nemo_lowprec.shard_blocks, **options):
    strategy = "ddp" if kind == "ddp" else ModelParallelStrategy(parallelize, 2, 1, **options)
    made = Fabric(accelerator=device(), devices=2, strategy=strategy, plugins=at(level))
    made.launch()
    return made


def set_up(made):
    model = made.setup_module(make_model("llama"))
    return model, made.setup_optimizers(make_optimizer(model))


def parts(rank):
    """This process's half of each batch."""
    return [{name: value[rank::2] for name, value in batch.items()} for batch in batches("llama")]


def step(made, model, optimizer, *micro_batches):
    optimizer.zero_grad()
    for index, part in enumerate(micro_batches):
        with made.no_backward_sync(model, enabled=index + 1 < len(micro_batches)):
            loss = model(**made.to_device(part)).loss
            made.backward(loss / len(micro_batches))
    made.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    return loss.item()


def under_trainer(rank, kind, level, every=1):
    task = Task("llama")
    options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": every, "use_distributed_sampler": False}
    options |= {"strategy": KINDS[kind], "accelerator": device(), "devices": 2, "max_steps": STEPS // every}
    made = trainer(at(level), **options)
    made.fit(task, DataLoader(parts(rank), batch_size=None))
    return task.losses


def refusals(rank):
    """The sentences of errors that come before the first step."""

    def only_part(model, mesh):
        fully_shard(model.model, mesh=mesh["data_parallel"])
        return model

    said = {}
    for name, parallelize in (("part", only_part), ("nothing", lambda model, mesh: model)):
        with pytest.raises(ValueError) as error:
            set_up(fabric("fsdp2", "msamp_o2", parallelize))
        said[name] = str(error.value)
    made = fabric("fsdp2", "msamp_o2")
    model = make_model("llama")
    with pytest.raises(ValueError) as error:
        made.setup(model, make_optimizer(model))
    said["early"] = str(error.value)
    with pytest.raises(ValueError) as error:
        set_up(fabric("ddp", ("msamp_o2", "msamp_o3")[rank]))
    said["level"] = str(error.value)
    return said


def job(rank, kind, folder):
    found = {}
    for level in FACE_LEVELS:
        data = parts(rank)
        made = fabric(kind, level)
        model, optimizer = set_up(made)
        losses = [step(made, model, optimizer, part) for part in data[:6]]
        path = f"{folder}/{level}.ckpt"
        made.save(path, {"model": model, "optimizer": optimizer, "at": 6})
        losses += [step(made, model, optimizer, part) for part in data[6:]]
        found[level, "fabric"], found[level, "trainer"] = losses, under_trainer(rank, kind, level)

        made = fabric(kind, level)
        model, optimizer = set_up(made)
        state = {"model": model, "optimizer": optimizer, "at": 0}
        found[level, "rest"], found[level, "at"] = made.load(path, state), state["at"]
        found[level, "resumed"] = [step(made, model, optimizer, part) for part in data[6:]]

        made = fabric(kind, level)
        model, optimizer = set_up(made)
        pairs = zip(data[::2], data[1::2], strict=True)
        found[level, "accumulated"] = [step(made, model, optimizer, *pair) for pair in pairs]
        found[level, "trainer accumulated"] = under_trainer(rank, kind, level, every=2)[1::2]
    if kind == "fsdp2":
        made = fabric(kind, "msamp_o2", save_distributed_checkpoint=False)
        model, optimizer = set_up(made)
        losses = [step(made, model, optimizer, part) for part in data[:6]]
        made.save(f"{folder}/whole.ckpt", {"model": model, "optimizer": optimizer})
        found["whole"] = [*losses, step(made, model, optimizer, data[6])]
        made = fabric(kind, "msamp_o2")
        model, optimizer = set_up(made)
        made.load(f"{folder}/whole.ckpt", {"model": model, "optimizer": optimizer})
        found["whole resumed"] = step(made, model, optimizer, data[6])
        found["refusals"] = refusals(rank)
    return {repr(name): value for name, value in found.items()}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    first, second = on_processes(2, folder, job, request.param, str(folder))
    return request.param, folder, first, second


@pytest.mark.parametrize("level", FACE_LEVELS)
def test_the_losses_are_the_trainers(run, level):
    kind, _, *processes = run
    for found in processes:
        assert found[repr((level, "fabric"))] == found[repr((level, "trainer"))], kind
        assert len(found[repr((level, "fabric"))]) == STEPS


@pytest.mark.parametrize("level", FACE_LEVELS)
def test_micro_batches_without_synchronization_are_the_trainers(run, level):
    kind, _, *processes = run
    for found in processes:
        assert found[repr((level, "accumulated"))] == found[repr((level, "trainer accumulated"))], kind


@pytest.mark.parametrize("level", FACE_LEVELS)
def test_a_run_resumes_bit_for_bit(run, level):
    _, _, *processes = run
    for found in processes:
        assert found[repr((level, "resumed"))] == found[repr((level, "fabric"))][6:]
        assert found[repr((level, "rest"))] == {} and found[repr((level, "at"))] == 6


def test_one_file_of_a_sharded_run_is_the_file_of_any_run(run):
    kind, folder, first, _ = run
    path = folder / ("whole.ckpt" if kind == "fsdp2" else "msamp_o2.ckpt")
    made = Fabric(accelerator="cpu", devices=1, plugins=plugin("msamp_o2"))
    model, optimizer = set_up(made)
    made.load(path, {"model": model, "optimizer": optimizer})
    whole = batches("llama")[6]
    assert step(made, model, optimizer, whole) == pytest.approx(4.884, abs=0.2)
    if kind == "fsdp2":
        assert first[repr("whole resumed")] == first[repr("whole")][6]
        assert {type(value) for value in torch.load(path, weights_only=True)["model"].values()} == {torch.Tensor}


def test_mistakes_are_sentences_before_the_first_step(run):
    kind, _, first, second = run
    if kind == "fsdp2":
        said = first[repr("refusals")]
        assert said == second[repr("refusals")]
        assert "lm_head.weight is in no unit of FSDP2" in said["part"]
        assert said["nothing"].startswith("parallelize_fn has called fully_shard for no module.")
        assert "holds parameters of 0 models" in said["early"] and "after fabric.setup_module" in said["early"]
        assert "msamp_o2" in said["level"] and "msamp_o3" in said["level"]
