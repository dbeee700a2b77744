"""Transformers resume bit for bit on a GPU: the first step after a resume runs the kernels that the run before had."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import nemo_lowprec
from tests.faces import TASKS, Task, batches, make_model, make_optimizer
from tests.support import assert_same, level_of, plugin, save_at, trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LEVELS = ["te_fp8", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed", "msamp_o2", "msamp_o2+fp16", "bf16_mixed"]


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", LEVELS)
def test_under_the_trainer(case, task, graphs, tmp_path):
    options = {"graphs": graphs} | ({} if case == "bf16_mixed" else {"backend": "auto"})
    whole, resumed, data = Task(task), Task(task), batches(task)
    first = trainer(plugin(case, **options), save_at(tmp_path, 6), accelerator="gpu", max_steps=9)
    first.fit(whole, DataLoader(data, batch_size=None))
    again = trainer(plugin(case, **options), accelerator="gpu", max_steps=9)
    again.fit(resumed, DataLoader(data[6:], batch_size=None), ckpt_path=tmp_path / "step=6.ckpt")
    assert resumed.losses[:3] == whole.losses[6:9]
    assert_same(resumed.state_dict(), whole.state_dict())


def prepared(task, case):
    model = make_model(task).cuda()
    return nemo_lowprec.prepare(model, make_optimizer(model), level=case.partition("+")[0], graphs=False)


def gradients(model, optimizer, scaler, batch, case):
    """One step in a loop; the gradients before it."""
    low_bit = case.startswith("msamp")
    with torch.autocast("cuda", torch.float16 if scaler.is_enabled() else torch.bfloat16, enabled=low_bit):
        loss = model(**{name: value.cuda() for name, value in batch.items()}).loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    found = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    scaler.step(optimizer)
    scaler.update()
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", LEVELS)
def test_in_a_loop(case, task):
    def scaler():
        return torch.amp.GradScaler("cuda", enabled=level_of(case).has_loss_scale, init_scale=1024.0)

    run, data = (*prepared(task, case), scaler()), batches(task)
    for batch in data[:4]:
        gradients(*run, batch, case)
    saved = copy.deepcopy([dict(run[0].state_dict()), run[1].state_dict(), run[2].state_dict()])
    again = (*prepared(task, case), scaler())
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for batch in data[4:7]:
        assert_same(gradients(*again, batch, case), gradients(*run, batch, case))
