"""A training job of two processes that may kill themselves; started again, it goes on from the last checkpoint."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from nemo_lowprec.comm.buckets import Fp8Bucket, Fp8ShardBucket
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionShardedStrategy, replace
from nemo_lowprec.strategies.sharded_checkpoint import in_full
from tests.support import Net, Samples, loader, plugin, trainer

STEPS = 8
STRATEGIES = {
    "ddp": lambda: "ddp",
    "lowprec_ddp": lambda: "lowprec_ddp",
    "sharded": LowPrecisionShardedStrategy,
    "async": lambda: LowPrecisionShardedStrategy(async_checkpoints=True),
}


class Killer(Callback):
    """Sends this process a signal in one phase of one step."""

    def __init__(self, phase, step, number=signal.SIGKILL):
        self.phase, self.step, self.number = phase, step, number

    def at(self, trainer, phase):
        # A checkpoint in the background may be renamed a step later.
        late = phase == "checkpoint" and trainer.global_step > self.step
        if phase == self.phase and (late or trainer.global_step == self.step):
            self.phase = "none"  # once, where one survives it
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, *_):
        self.at(trainer, "validation")

    def on_fit_start(self, trainer, module):
        module.mid.register_forward_hook(lambda *_: self.at(trainer, "forward"))
        module.mid.register_full_backward_hook(lambda *_: self.at(trainer, "backward"))
        for kind, name, phase in (
            (Fp8Bucket, "advance", "reduction"),
            (Fp8ShardBucket, "advance", "reduction"),
            (os, "fsync", "writing"),  # tensors are written, and what says where they are is not
            (os, "replace", "checkpoint"),
            (replace, "_exchange", "checkpoint"),
        ):
            self.before(trainer, kind, name, phase)

    def before(self, trainer, owner, name, phase):
        whole = getattr(owner, name)

        def watched(*args):
            self.at(trainer, phase)
            return whole(*args)

        setattr(owner, name, watched)

    def on_before_zero_grad(self, trainer, module, optimizer):
        for one in trainer.optimizers:
            one.register_step_post_hook(lambda *_: self.at(trainer, "step"))


def main(rank, env, output, folder, strategy, phase, step, number=signal.SIGKILL, level="msamp_o2"):
    """One process; ``phase`` none trains to the end, and writes the weights to folder/end.pt.

    A ``phase`` of SIGKILL is one process's; of other signals there is one for each, ``none`` for none.
    """
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(env)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    # The one that writes checkpoints is killed while it does; in the other phases it is the other one.
    killer = Killer(phase, step) if rank == (0 if phase == "checkpoint" else 1) else Killer("none", -1)
    if number != signal.SIGKILL:
        killer = Killer(phase[rank], step, number)
    saving = ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=1)
    fit = trainer(
        [plugin(level), *([SLURMEnvironment()] if number == signal.SIGUSR1 else [])], saving, killer, devices=2,
        strategy=STRATEGIES[strategy](), use_distributed_sampler=False, max_steps=STEPS, max_epochs=-1,
        default_root_dir=Path(folder).parent / "requeued", val_check_interval=2, check_val_every_n_epoch=None,
    )  # fmt: skip
    model = Net(dropout=0.2)
    torch.manual_seed(rank)
    data = ResumableLoader(Samples(32), 4, 3, rank, 2, stop_at_epoch_end=False)
    last = Path(folder) / "last.ckpt"
    print("starts at", opened(last)["global_step"] if last.exists() else 0, flush=True)
    validation = loader(count=32) if "validation" in phase else None
    fit.fit(model, data, validation, ckpt_path=last if last.exists() else None)
    end = in_full(snapshot_of(fit, model))
    if rank == 0:
        torch.save(end, Path(folder) / "end.pt")
    dist.barrier()


def opened(path):
    """A checkpoint, or of a folder what lies beside the tensors."""
    return torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)


def snapshot_of(fit, model):
    return {"weights": model.state_dict(), "optimizer": fit.optimizers[0].state_dict()}
