"""Private names of Accelerate."""

import accelerate
import pytest
import torch
from torch import nn

from nemo_lowprec.compat import accelerate as compat


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_prepared_model_is_known_until_it_is_forgotten(accelerator):
    model = nn.Linear(2, 2)
    assert not compat.is_prepared(model)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert compat.is_prepared(model)
    compat.forget_prepared(model)
    assert not compat.is_prepared(model)
    compat.forget_prepared(model)


def test_a_step_within_which_it_is_noted_counts_as_skipped(accelerator):
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    skips = []
    optimizer.register_step_post_hook(lambda *_: compat.note_skipped(accelerator, optimizer) if skips else None)
    model, prepared = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2)).sum())
        prepared.step()
        assert accelerator.optimizer_step_was_skipped == bool(skips)
        skips.append(1)
