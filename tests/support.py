"""Small models, data and a Trainer for the tests of the plugins and of the engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from nemo_lowprec import CHART, LowPrecision
from nemo_lowprec.compute import ReferenceBackend, te_layers
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.optim import MasterStep
from nemo_lowprec.plugins import LEVELS, processes
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, QuantizedTensor
from nemo_lowprec.weights import master_of

# Every Trainer, and every fit of several processes, reads what is installed: here a process does so once.
registry.entry_points = functools.cache(registry.entry_points)
processes.version = functools.cache(processes.version)

FP16_LEVELS = [name for name in LEVELS if CHART[name].has_loss_scale]
HALF_LEVELS = [name for name in LEVELS if CHART[name].has_half_weights]
MSAMP_LEVELS = [name for name in LEVELS if CHART[name].is_low_bit]
MASTER_LEVELS = [name for name in HALF_LEVELS if name not in MSAMP_LEVELS]
FP8_LEVELS = [name for name in LEVELS if CHART[name].has_fp8]

# Every level, and each that can store its weights in FP8 once more so.
CASES = [*LEVELS, *(f"{name}+fp8_params" for name in LEVELS if CHART[name].fp8_params)]
# Levels whose half format may be chosen, with the other one.
FP16_HALF = [f"{name}+fp16" for name in LEVELS if CHART[name].half]


class Counting(ReferenceBackend):
    """Counts how often an input is quantized."""

    def __init__(self) -> None:
        self.inputs = 0

    def quantize(self, values: Tensor, operand: Any, **kwargs: Any) -> Any:
        self.inputs += operand.kind == "input"
        return super().quantize(values, operand, **kwargs)


def plugin(case: str, **options: Any) -> LowPrecision:
    """A plugin that runs on a CPU, at a case of ``CASES``."""
    name, _, variant = case.partition("+")
    level = level_of(case)
    if level.has_fp8:
        options.setdefault("backend", "reference")
    if variant:
        options |= {"half": "fp16"} if variant == "fp16" else {"fp8_params": True}
    if level.has_loss_scale:
        options.setdefault("loss_scale", 1024.0)
    return LEVELS[name](**options)


def plugin_on(backend: str | None, case: str, **options: Any) -> LowPrecision:
    """The same with another backend, where the case has one."""
    return plugin(case, **({"backend": backend} if backend and level_of(case).has_fp8 else {}), **options)


def level_of(case: str) -> Any:
    """The case's row of the chart."""
    name, _, variant = case.partition("+")
    return CHART[name].with_half("fp16") if variant == "fp16" else CHART[name]


def is_low_bit(case: str) -> bool:
    """Whether the case takes its updates in 16 bits: no FP32 masters, FP8 gradients, Adam only."""
    return case.partition("+")[0] in MSAMP_LEVELS


def kept(case: str, name: str, value: Tensor) -> Tensor:
    """The value that a parameter's FP32 ``value`` becomes at ``case``, as its checkpoints hold it.

    The same but for matrices at the MS-AMP levels: FP16, or FP32 values of FP16 in blocks where O3 has a master (all
    linear layers but the head, and an embedding tied to it).
    """
    if not is_low_bit(case) or value.dim() < 2 or not value.is_floating_point():
        return value
    if CHART[case.partition("+")[0]].master_weight and not name.startswith(("head.", "embed.")):
        return BlockScaledTensor.from_float(value.float(), FP16).dequantize()
    return value.half()


def kept_state(case: str, key: str, value: Tensor) -> Tensor:
    """The same for the optimizer's state ``key``: states of matrices are rounded at O2 and O3, in blocks."""
    if not is_low_bit(case) or value.dim() < 2 or CHART[case.partition("+")[0]].optimizer_states == ("fp32", "fp32"):
        return value
    if key == "exp_avg":
        return BlockScaledTensor.from_float(value.float(), E4M3).dequantize(torch.bfloat16)
    return dequantize_rows(*quantize_rows(value, FP16, positive=True))


def linear_optimizer(case: str, lr: float) -> Any:
    """Makes an optimizer whose update is ``lr`` times the gradient: SGD, or at MS-AMP levels an AdamW that is nearly.

    Without memory and with a large eps, AdamW's update is lr * eps * g / (|g| + eps).
    """
    if not is_low_bit(case):
        return lambda params: torch.optim.SGD(params, lr=lr)
    return lambda params: torch.optim.AdamW(params, lr=lr * 1e3, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0)


def losses_with_sgd(module: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Ten steps of torch's plain SGD on the squared error."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(10):
        loss = (module(x) - y).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Samples(Dataset):
    """Random inputs [32] and classes below 32, both of full precision."""

    def __init__(self, count: int = 16, features: int = 32) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, features, generator=generator)
        self.y = torch.randint(0, 32, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def loader(batch_size: int = 4, count: int = 16, shuffle: bool = False) -> DataLoader:
    """A plain loader that draws nothing from the default generator, unless it shuffles."""
    generator = None if shuffle else torch.Generator()
    return DataLoader(Samples(count), batch_size, shuffle=shuffle, generator=generator)


def stateful_loader(batch_size: int = 4, count: int = 16) -> ResumableLoader:
    """A loader that carries its position."""
    return ResumableLoader(Samples(count), batch_size, seed=3)


def replay(batches: Any) -> DataLoader:
    """A loader that gives these very batches."""
    return DataLoader(list(batches), batch_size=None)


class Net(pl.LightningModule):
    """A classifier with layers that every recipe converts some of, norms and dropout.

    Args:
        dropout: probability.
        recompute: ``reentrant`` or ``non_reentrant`` activation checkpointing of the middle.
        optimizer: of the parameters; None for AdamW.
        stepwise: whether a scheduler lowers the learning rate at every step.
    """

    def __init__(self, dropout: float = 0.0, recompute: str | None = None, optimizer: Any = None, stepwise=False):
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(32, 128)
        self.norm = nn.LayerNorm(128)
        self.mid = nn.Linear(128, 128, bias=False)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(128, 32)
        self.recompute = recompute
        self.make_optimizer = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2))
        self.stepwise = stepwise
        self.losses: list[float] = []

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.mid(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.recompute and self.training:
            x = checkpoint(self.middle, x, use_reentrant=self.recompute == "reentrant")
        else:
            x = self.middle(x)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"]).float(), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch["y"]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if not self.stepwise:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Overflowing(Net):
    """Gradients that are not finite at the steps ``bad``, and a snapshot of what must not move then."""

    def __init__(self, *bad: int, factor: float = float("inf"), **options: Any) -> None:
        super().__init__(stepwise=True, **options)
        self.bad, self.factor = bad, factor
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self.scales: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss * self.factor if self.trainer.global_step in self.bad else loss

    def part(self) -> dict[str, Any]:
        engine = self.trainer.precision_plugin.engine
        histories = engine.amaxes.histories
        return {
            "weights": {k: v.clone() for k, v in self.state_dict().items()},
            "copies": [stored(p).clone() for p in self.parameters()],
            "optimizer": {
                i: {k: v.clone() for k, v in s.items()}
                for i, s in self.trainer.optimizers[0].state_dict()["state"].items()
            },
            "schedule": self.trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            "fp8": {} if histories is None else histories.state_dict(),
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append(self.part())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(self.part())
        loss_scale = self.trainer.precision_plugin.engine.step.loss_scale
        if loss_scale is not None:
            self.scales.append(loss_scale.scale)


def foreach_adamw(params: Any) -> torch.optim.Optimizer:
    """An optimizer that skips no step by itself."""
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """One whose kernel does."""
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def assert_second_skipped(model: Overflowing) -> None:
    """Assert that of three steps the second was skipped whole, and the others were not."""
    assert_same(model.after[1], model.before[1])
    for step in (0, 2):
        assert not torch.equal(model.after[step]["weights"]["mid.weight"], model.before[step]["weights"]["mid.weight"])
    assert [part["schedule"] for part in model.after] == [1, 1, 2]


class Hidden(Net):
    """An infinity in the gradient of what ``mid`` returns, at the third step: FP8 GEMMs saturate it."""

    def __init__(self, on_rank: int = 0) -> None:
        super().__init__()
        self.on_rank = on_rank
        self.skipped_at: list[int] = []

    def spoiled(self) -> nn.Module:
        return self.mid

    def on_fit_start(self) -> None:
        self.spoiled().register_full_backward_pre_hook(self._spoil)

    def _spoil(self, module: nn.Module, grads: Any) -> Any:
        (grad,) = grads
        if self.trainer.global_step == 2 and self.global_rank == self.on_rank:
            grad = grad.clone()
            grad[0, 0] = float("inf")
        return (grad,)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.optimizers[0] in self.trainer.precision_plugin.engine.step.skipped:
            self.skipped_at.append(index)
        assert all(p.isfinite().all() for p in self.parameters())


class HiddenInTE(Hidden):
    """The same in a layer of Transformer Engine's that the model brings."""

    def __init__(self, on_rank: int = 0) -> None:
        super().__init__(on_rank)
        import transformer_engine.pytorch as te

        torch.manual_seed(2)
        self.own = te.Linear(128, 128, bias=False, params_dtype=torch.float32)

    def spoiled(self) -> nn.Module:
        return self.own

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(self.own(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        super().on_train_batch_end(outputs, batch, index)
        assert not te_layers.nonfinite_amaxes(self)


class Observer(Callback):
    """Keeps what is there while the Trainer trains: true gradients at each step, and the state at the end."""

    def __init__(self) -> None:
        self.grads: list[dict[str, Tensor]] = []
        self.state: dict[str, Any] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.grads.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = snapshot(trainer, pl_module)


def snapshot(trainer: pl.Trainer, model: nn.Module) -> dict[str, Any]:
    """Everything that decides how training goes on."""
    params = dict(model.named_parameters())
    masters = {n: master_of(p) for n, p in params.items()}
    return {
        "weights": {n: p.detach().clone() for n, p in model.state_dict().items()},
        "copies": {n: stored(p).clone() for n, p in params.items()},
        "masters": {n: values_of(m).clone() for n, m in masters.items() if m is not None},
        "optimizers": [clone(o.state_dict()) for o in trainer.optimizers],
        "schedulers": [dict(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        "plugin": trainer.precision_plugin.state_dict(),
        "step": trainer.global_step,
    }


def stored(param: Tensor) -> Tensor:
    """The bits that a parameter is stored in."""
    if isinstance(param, Fp16Weight):
        return param.data_fp16
    return param.data_fp8.view(torch.uint8) if isinstance(param, Fp8Weight) else param.detach()


def values_of(tensor: Tensor) -> Tensor:
    """The values of a tensor that may be stored in a format of ours."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach()


def clone(tree: Any) -> Any:
    """A copy of nested dicts and lists of tensors."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: clone(v) for k, v in tree.items()}
    return [clone(v) for v in tree] if isinstance(tree, (list, tuple)) else tree


def kernels_or_skip(found: Any) -> Any:
    """The module of fused kernels, where this machine has one."""
    if found is None:
        pytest.skip("needs Triton and compute capability 9.0")
    return found


def watch_masters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pairs that each ``MasterStep`` takes from now on, which are appended."""
    taken: list[Any] = []
    own = MasterStep.step
    monkeypatch.setattr(MasterStep, "step", lambda self, *a: taken.append(own(self, *a)) or taken[-1])
    return taken


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Assert that two nested states are equal bit for bit, dtypes included."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape, f"{path}: {a} is not {b}"
        assert torch.equal(a, b), f"{path} differs by {(a.double() - b.double()).abs().max():.3g}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{path}: {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, f"{path}: {a} is not {b}"


def trainer(plugins: Any = None, /, *callbacks: Callback, **options: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU that writes nothing by itself."""
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": saves,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(plugins=plugins, callbacks=list(callbacks), **(settings | options))


def train(model: Any, precision: Any, *callbacks: Callback, data: Any = None, ckpt: Any = None, **options: Any):
    """Fit ``model`` and return what an ``Observer`` saw; ``options`` are the Trainer's."""
    if isinstance(precision, str):
        precision = plugin(precision)
    observer = Observer()
    pl.seed_everything(11, verbose=False)
    fit = trainer(precision, observer, *callbacks, **options)
    data = loader() if data is None else data
    fit.fit(model, *(data if isinstance(data, tuple) else (data,)), ckpt_path=ckpt)
    observer.trainer = fit
    return observer


def save_at(folder: Path, step: int, **options: Any) -> ModelCheckpoint:
    """Save once, after ``step`` optimizer steps, as ``step.ckpt``."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1, **options)
