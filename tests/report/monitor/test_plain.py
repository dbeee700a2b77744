"""``nemo_lowprec.monitor`` in a loop of the user's own."""

import pytest
import torch
from torch import nn

from nemo_lowprec import monitor, prepare
from nemo_lowprec.report.monitor import read_run

STEPS = 8


def train(folder=None, level="bf16_with_fp8_mixed", start=0, steps=STEPS, spoil=False, **options):
    """The losses of a training, monitored where there is a ``folder``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, backend="reference")
    watch = None if folder is None else monitor(model, folder, every_n_steps=3, start=start)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator)
        x[:, 0] *= 1e5 if spoil else 1
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.add_loss(loss)
    if watch is not None:
        watch.add_validation(**{"val/loss": 2.5})
        watch.close(**options)
    return losses


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2", "bf16_with_fp8_subchannel_scaling_mixed"])
def test_a_monitored_loop_is_the_same_and_has_a_file(level, tmp_path):
    losses = train(tmp_path, level)
    assert losses == train(level=level)
    run = read_run(tmp_path)
    assert run.steps == [2, 3, 6] and run.ended and run.about["level"] == level and run.audit is None
    assert list(run.loss.values()) == pytest.approx(losses, rel=1e-5) and run.validations == [(8, {"val/loss": 2.5})]


def test_a_resumed_loop_goes_on_in_the_file(tmp_path):
    train(tmp_path, finished=False)
    assert not read_run(tmp_path).ended
    train(tmp_path, start=8)
    run = read_run(tmp_path)
    assert run.steps == [2, 3, 6, 9, 10, 12, 15] and run.ended
    assert [*run.loss] == [*range(1, 6), *range(9, 17)]  # a loop that is cut short loses those behind its last sample


def test_a_context_closes_the_file_and_says_whether_the_loop_has_ended(tmp_path):
    model, _ = prepare(model := nn.Linear(32, 32), torch.optim.AdamW(model.parameters()), "bf16_mixed")
    with monitor(model, tmp_path / "ended"):
        pass
    with pytest.raises(KeyboardInterrupt), monitor(model, tmp_path / "cut"):
        raise KeyboardInterrupt
    assert read_run(tmp_path / "ended").ended and not read_run(tmp_path / "cut").ended


def test_a_loop_warns_of_the_layer_that_is_served_badly(tmp_path):
    with pytest.warns(UserWarning, match=r"^0: its input has .* since step \d+.*\(.*skip=\[\"0\"\]\)"):
        train(tmp_path, steps=26, spoil=True)
    assert ("0", "input") in {(found["layer"], found["operand"]) for found in read_run(tmp_path).warnings}


def test_a_model_without_a_level_and_a_bad_distance_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"^monitor\(\) needs a model at a level of this package: call nemo_lowprec\."):
        monitor(nn.Linear(4, 4), tmp_path)
    with pytest.raises(ValueError, match=r"^every_n_steps=0 must be a number of steps, at least 1\.$"):
        monitor(nn.Linear(4, 4), tmp_path, every_n_steps=0)
    assert not list(tmp_path.iterdir())
