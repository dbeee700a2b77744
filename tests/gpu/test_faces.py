"""Every face trains as the Trainer does on a GPU, with CUDA graphs and without, and Fabric on two GPUs."""

import accelerate
import pytest
import torch
from lightning.fabric import Fabric
from transformers import TrainingArguments

from nemo_lowprec.accelerate import prepare
from tests.fabric import test_fabric_processes as fabric_processes
from tests.faces import FACE_LEVELS, STEPS, TASKS, batches, make_model, make_optimizer, trainer_losses
from tests.loops.test_transformers import Recording, samples
from tests.processes import on_processes
from tests.support import plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def by_fabric(task, level, folder, **options):
    fabric = Fabric(accelerator="gpu", devices=1, plugins=plugin(level, **options))
    model = make_model(task)
    model, optimizer = fabric.setup(model, make_optimizer(model))
    losses = []
    for batch in batches(task):
        optimizer.zero_grad()
        loss = model(**fabric.to_device(batch)).loss
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_accelerate(task, level, folder, **options):
    accelerator, model = accelerate.Accelerator(), make_model(task)
    model, optimizer = prepare(accelerator, model, make_optimizer(model), level=level, **options)
    losses = []
    for batch in batches(task):
        optimizer.zero_grad()
        loss = model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_transformers(task, level, folder, **options):
    model = make_model(task)
    settings = TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=STEPS, report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", save_strategy="no", max_grad_norm=0.0,
    )  # fmt: skip
    settings._n_gpu = 1  # transformers would copy the model to every GPU by DataParallel
    optimizers = make_optimizer(model), None
    trainer = Recording(
        model, settings, train_dataset=samples(task), level=level, level_options=options, optimizers=optimizers
    )
    trainer.model_accepts_loss_kwargs = False  # else the loss is a sum over the number of tokens
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", FACE_LEVELS)
@pytest.mark.parametrize("face", [by_fabric, by_accelerate, by_transformers])
def test_the_losses_are_the_trainers(face, level, task, graphs, tmp_path):
    options = {"backend": "auto", "graphs": graphs}
    assert face(task, level, tmp_path, **options) == trainer_losses(task, level, "gpu", **options)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("kind", fabric_processes.KINDS)
def test_fabric_on_two_gpus_has_the_losses_of_the_trainer_and_resumes_bit_for_bit(kind, tmp_path):
    for found in on_processes(2, tmp_path, fabric_processes.job, kind, str(tmp_path), backend="nccl"):
        for level in FACE_LEVELS:
            losses = found[repr((level, "fabric"))]
            assert losses == found[repr((level, "trainer"))] and len(losses) == STEPS
            assert found[repr((level, "resumed"))] == losses[6:]
            assert found[repr((level, "accumulated"))] == found[repr((level, "trainer accumulated"))]
        if kind == "fsdp2":
            assert found[repr("whole resumed")] == found[repr("whole")][6]
