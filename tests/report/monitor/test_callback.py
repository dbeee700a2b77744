"""``PrecisionMonitor`` under a Trainer: its file, and trainings of every kind."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from nemo_lowprec.report.monitor import PrecisionMonitor, read_run
from nemo_lowprec.report.monitor.run_writer import FILE
from tests.plugins.test_gan import GAN, REAL
from tests.plugins.test_gan import STEPS as GAN_STEPS
from tests.support import Net, Overflowing, assert_same, loader, plugin, replay, save_at, stateful_loader, train

STEPS = {"max_epochs": -1, "max_steps": 8}
CASES = [
    "fp16_amp", "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed",
    "bf16_with_fp8_mixed+fp8_params", "fp16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip


def watch(folder, case="bf16_with_fp8_mixed", model=None, *callbacks, every=3, **options):
    """A monitored training and its run."""
    seen = train(model or Net(), case, PrecisionMonitor(every, folder), *callbacks, **(STEPS | options))
    return seen, read_run(folder)


@pytest.mark.parametrize("case", CASES)
def test_a_monitored_training_is_the_same_bit_for_bit(case, tmp_path):
    plain = train(Net(dropout=0.1), plugin(case), gradient_clip_val=0.5, **STEPS)
    watched, run = watch(tmp_path, plugin(case), Net(dropout=0.1), gradient_clip_val=0.5)
    assert_same(watched.state, plain.state)
    assert_same(watched.grads, plain.grads)
    assert run.steps == [2, 3, 6] and len(run.loss) == 8 and run.ended


def test_the_file_tells_of_the_whole_run(tmp_path):
    data = (loader(), loader())
    _, run = watch(tmp_path, data=data, val_check_interval=4, check_val_every_n_epoch=None)
    assert run.about["level"] == "bf16_with_fp8_mixed" and run.about["every_n_steps"] == 3 and run.about["start"] == 0
    assert run.about["engine"] == "single" and run.about["declared"]["Weight"] == "BF16"
    assert {layer for layer, _ in run.operands.rows} == {"inp", "mid"}
    assert [step for step, _ in run.validations] == [4, 8] and run.validations[0][1]["val/loss"] > 0
    assert run.audit["findings"] and run.last_step == 8 and run.warnings == []
    assert [last for last, *_ in run.rates] == [2, 3, 6, 8] and run.peak_bytes is None
    norms = [sample["grad_norm"] for sample in run.samples]
    assert all(norm > 0 for norm in norms)


def test_losses_are_those_of_the_steps(tmp_path):
    model = Net()
    _, run = watch(tmp_path, model=model)
    assert list(run.loss) == list(range(1, 9))
    assert list(run.loss.values()) == pytest.approx(model.losses, rel=1e-5)


def test_the_file_lies_beside_the_checkpoints_or_with_the_logger_or_in_the_root(tmp_path):
    saves = ModelCheckpoint(tmp_path / "run" / "checkpoints", every_n_train_steps=8)
    logger = CSVLogger(tmp_path, "logs", "v")
    for callbacks, options, folder in (
        ([saves], {"logger": logger}, tmp_path / "run"),
        ([], {"logger": logger}, tmp_path / "logs" / "v"),
        ([], {"default_root_dir": tmp_path / "root"}, tmp_path / "root"),
    ):
        monitor = PrecisionMonitor()
        train(Net(), "bf16_mixed", monitor, *callbacks, **(STEPS | options))
        assert monitor.path == folder / FILE and read_run(folder).ended


def test_a_resume_goes_on_behind_a_torn_line(tmp_path):
    data = stateful_loader()
    whole, run = watch(tmp_path / "whole", model=Net(), data=stateful_loader(), max_steps=12)
    with pytest.raises(Killed):
        watch(tmp_path / "run", "bf16_with_fp8_mixed", Net(), save_at(tmp_path, 4), Kills(7), data=data, max_steps=12)
    path = tmp_path / "run" / FILE
    path.write_text(path.read_text() + '{"record":"sample","step":7,"oper')  # as a kill leaves it
    resumed, found = watch(tmp_path / "run", data=stateful_loader(), max_steps=12, ckpt=str(tmp_path / "step=4.ckpt"))
    assert_same(resumed.state["weights"], whole.state["weights"])
    assert [attempt["start"] for attempt in found.attempts] == [0, 4] and found.ended
    assert found.steps == [2, 3, 6, 9, 12] and run.steps == [2, 3, 6, 9, 12]
    assert found.loss == run.loss and found.operands.metrics == run.operands.metrics
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [record["step"] for record in records if record["record"] == "sample"] == [2, 3, 6, 6, 9, 12]


class Killed(Exception):
    pass


class Kills(Callback):
    """Ends the process's training without more ado at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Killed


def test_an_exception_leaves_a_file_of_all_that_was_sampled(tmp_path):
    model = Net()
    with pytest.raises(Killed):
        watch(tmp_path, "bf16_with_fp8_mixed", model, Kills(6))
    run = read_run(tmp_path)
    assert run.steps == [2, 3, 6] and not run.ended and list(run.loss) == [1, 2, 3, 4, 5]
    assert not model.trainer.precision_plugin.engine.observers.before_update


def test_accumulated_gradients_are_one_step(tmp_path):
    batches = [{"x": torch.randn(4, 32), "y": torch.randint(0, 32, (4,))} for _ in range(24)]
    model = Net()
    _, run = watch(tmp_path, model=model, data=replay(batches), accumulate_grad_batches=3, max_steps=8)
    assert run.steps == [2, 3, 6] and list(run.loss) == list(range(1, 9))
    means = torch.tensor(model.losses).view(8, 3).mean(1).tolist()
    assert list(run.loss.values()) == pytest.approx(means, rel=1e-5)


def test_the_gradient_norm_is_the_one_before_clipping(tmp_path):
    _, plain = watch(tmp_path / "plain", "bf16_mixed", max_steps=2)
    _, clipped = watch(tmp_path / "clipped", "bf16_mixed", max_steps=2, gradient_clip_val=1e-3)
    assert clipped.samples[0]["grad_norm"] > 0.01
    first = [run.loss[1] for run in (plain, clipped)]
    assert first[0] == first[1]


@pytest.mark.parametrize("case", ["fp16_mixed", "fp16_with_fp8_mixed", "msamp_o2"])
def test_a_skipped_step_is_counted_and_tells_nothing_of_updates(case, tmp_path, recwarn):
    model = Overflowing(1, 2)  # the second and the third step
    _, run = watch(tmp_path, case, model)
    assert [sample["skipped_steps"] for sample in run.samples] == [1, 2, 2]
    lost = run.params.metrics["lost"]["mid.weight",]
    assert lost[:2] == [None, None] and lost[2] is not None
    assert run.warnings == [] and not [w for w in recwarn if "since step" in str(w.message)]


@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "fp16_with_fp8_mixed", "msamp_o2"])
def test_two_optimizers_in_a_manual_optimization(case, tmp_path):
    data = replay([REAL] * GAN_STEPS)
    plain, watched = GAN(), GAN()
    train(plain, case, data=data)
    _, run = watch(tmp_path, case, watched, every=5, data=data, max_steps=-1, max_epochs=1)
    assert watched.losses == plain.losses
    assert_same(watched.seen, plain.seen)
    assert run.steps and run.ended
    for part in ("generator", "discriminator"):
        assert any(numbers[-1] is not None for (name,), numbers in run.params.metrics["lost"].items() if part in name)


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "10", None])
def test_a_distance_that_is_no_number_of_steps_is_one_sentence(every):
    with pytest.raises(ValueError, match=r"^every_n_steps=.* must be a number of steps, at least 1\.$"):
        PrecisionMonitor(every)


def test_a_trainer_without_a_level_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"^PrecisionMonitor needs a Trainer with a level of nemo_lowprec among its"):
        train(Net(), None, PrecisionMonitor(folder=tmp_path), **STEPS)
    assert not list(tmp_path.iterdir())
