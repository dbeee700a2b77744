"""The host learns of a skipped step in the next backward pass: nothing waits for the device, and nothing differs."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Net, Overflowing, foreach_adamw, fused_adamw, plugin, train
from torch.optim import lr_scheduler

from nemo_lowprec.grads import FoundInf

LATE = ["bf16_mixed", "bf16_with_fp8_mixed", "fp16_mixed", "msamp_o1", "msamp_o2", "msamp_o3"]
SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.5**step),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),  # changes betas, too
    "warmup and cosine": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 5)], [3]
    ),
}


class Reads(Net):
    """``events``: what happened in the steps, and each time that the host read a flag."""

    def __init__(self, events, **options):
        super().__init__(stepwise=True, **options)
        self.events = events

    def training_step(self, batch, index):
        return self.loss(batch)

    def on_before_backward(self, loss):
        self.events.append("backward")

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.events.append("stepped")

    def on_train_batch_end(self, *_):
        self.events.append("end")


@pytest.fixture
def events(monkeypatch):
    found, reads = [], FoundInf.__bool__
    monkeypatch.setattr(FoundInf, "__bool__", lambda flag: found.append("read") or reads(flag))
    return found


@pytest.mark.parametrize("case", LATE)
def test_the_host_reads_the_flag_of_a_step_in_the_next_backward_pass(case, events):
    train(Reads(events, optimizer=fused_adamw), case, max_steps=5, max_epochs=-1, log_every_n_steps=100)
    later = events[events.index("end", events.index("end") + 1) + 1 :]  # scales are computed on the host at first
    flags = 1 if case.startswith("msamp") else 2  # the other one tells of half copies that were written
    step = ["read"] * flags + ["backward", "stepped", "end"]
    assert later == step * 3 + ["read"] * flags


def test_an_optimizer_that_does_not_read_the_flag_waits(events):
    train(Reads(events, optimizer=foreach_adamw), "bf16_mixed", max_steps=3, log_every_n_steps=100)
    assert [event for event in events if event != "read"] == ["backward", "stepped", "end"] * 3
    assert all(events[i + 1] == "read" for i, event in enumerate(events) if event == "backward")
    assert events[-1] == "end"


class Scheduled(Overflowing):
    def __init__(self, *bad, scheduler, optimizer):
        super().__init__(*bad, optimizer=optimizer)
        self.scheduler, self.used = scheduler, []

    def part(self):
        return {}

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        optimizer.register_step_pre_hook(lambda opt, *_: self.used.append(self.settings(opt)))
        return [optimizer], [{"scheduler": SCHEDULERS[self.scheduler](optimizer), "interval": "step"}]

    @staticmethod
    def settings(optimizer):
        (group,) = optimizer.param_groups
        return float(group["lr"]), *(float(beta) for beta in group["betas"])


def tensor_rate(params):
    return torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True)


@pytest.mark.parametrize("optimizer", [fused_adamw, tensor_rate])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_schedulers_go_back_with_the_step(case, scheduler, optimizer):
    skipping = Scheduled(2, 3, scheduler=scheduler, optimizer=optimizer)
    plain = Scheduled(scheduler=scheduler, optimizer=optimizer)
    train(skipping, plugin(case), max_steps=7, max_epochs=-1)
    train(plain, plugin(case), max_steps=5, max_epochs=-1)
    used = skipping.used
    assert used[2] == used[3] == used[4] and used[:2] + used[4:] == plain.used


def test_a_checkpoint_right_after_a_skipped_step_has_no_trace_of_it(tmp_path):
    model = Scheduled(2, scheduler="lambda", optimizer=fused_adamw)
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    train(model, "bf16_with_fp8_mixed", every, max_steps=5, max_epochs=-1, log_every_n_steps=100)
    saved = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=False) for step in range(1, 6)]
    assert [one["lr_schedulers"][0]["last_epoch"] for one in saved] == [1, 2, 2, 3, 4]
    rates = [one["optimizer_states"][0]["param_groups"][0]["lr"] for one in saved]
    assert rates == [1e-2 * 0.5**epoch for epoch in (1, 2, 2, 3, 4)]
    parts = [part for one in saved for part in one.values() if isinstance(part, dict) and "skipped_steps" in part]
    counts = [part["skipped_steps"] for part in parts]
    assert counts == [0, 0, 1, 1, 1]


class Writes(Net):
    """Writes a weight through ``.data`` before the optimizer's step ``at``."""

    def __init__(self, at):
        super().__init__(optimizer=fused_adamw)
        self.at = at

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == self.at:
            self.mid.weight.data.fill_(1.0)


@pytest.mark.parametrize("at", [1, 3])  # the next backward pass says so, and the end of the training
def test_a_weight_that_was_written_without_a_trace_is_an_error(at):
    with pytest.raises(RuntimeError, match=r"mid\.weight was written in place through \.data"):
        train(Writes(at), "bf16_mixed", max_steps=4)
