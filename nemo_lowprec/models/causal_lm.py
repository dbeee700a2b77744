"""A LightningModule around a transformers causal language model built from a config: nothing is downloaded."""

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from nemo_lowprec.arguments import checked
from nemo_lowprec.checkpoint.torch_zip import check_file, reading
from nemo_lowprec.extras import needs_extras
from nemo_lowprec.lines import one_line
from nemo_lowprec.models.architecture import check_architecture
from nemo_lowprec.models.loss import IGNORE, summed_cross_entropy
from nemo_lowprec.models.optimizer import default_warmup, make_optimizer, warmup_cosine
from nemo_lowprec.models.presets import get_preset
from nemo_lowprec.models.throughput import TokenRate, data_parallel_size

_VOCAB_MULTIPLE = 128  # a head of this many rows fits FP8 GEMMs and splits over tensor-parallel ranks


class CausalLM(LightningModule):
    """Next-token prediction with AdamW or another optimizer, warm-up and a cosine schedule.

    A batch is a dict of ``input_ids`` and ``labels``, int64 [batch, sequence]; ``labels[:, t]`` is the token that
    follows ``input_ids[:, t]`` (already shifted), and the loss ignores labels of -100.

    Logged each ``log_every_n_steps``: ``train/loss`` (nats a token, of the last micro-batch), ``train/perplexity``,
    ``train/tokens_per_sec`` (all ranks, validation excluded), ``lr``. Logged at validation and test: ``val/loss`` and
    ``val/perplexity`` (``test/...``), the mean over tokens of all ranks.

    ``configure_model`` makes the weights, so that a sharding strategy can make them in place. Outside of a Trainer call
    ``configure_model()`` by hand, and pass ``vocab_size`` or a preset with a vocabulary.

    Args:
        preset: an architecture of ``models/presets.py``; None with ``model_type``.
        model_type: transformers' name of any other architecture with a causal language model, such as ``qwen3``.
        config: fields of the transformers config, on top of the preset's.
        vocab_size: ids of the tokenizer; None: the config's, else the data module's. Where the config has none, the
            model has this number rounded up to a multiple of 128; the ids above ``vocab_size`` are never a label.
        lr: peak learning rate.
        min_lr: learning rate at the end of the schedule.
        weight_decay: of matrices, embeddings included; biases and norms do not decay.
        betas, eps: AdamW's; the betas also Lion's, and of SGD the first is the momentum.
        warmup_steps: optimizer steps of linear warm-up; None: a tenth of the run, at most 2,000.
        schedule_steps: optimizer steps until ``min_lr``; None: the Trainer's whole run.
        fused: torch's fused AdamW; None: where the parameters are on a GPU.
        activation_checkpointing: recompute each layer in backward in place of keeping its activations.
        attn_implementation: transformers' name: ``sdpa``, ``eager``, ...
        init_seed: seed of the initial weights; None draws from torch's global random state.
        optimizer: ``adamw``, ``muon`` (for hidden matrices, with AdamW's learning rate and AdamW for the rest),
            ``lion`` or ``sgd``.

    Raises:
        ValueError: a bad value, at construction; a vocabulary that is missing or too small, or samples longer than
            the model's positions, at ``configure_model``.
    """

    model: nn.Module | None
    _eval_sums: Tensor  # float64 [2]: the loss summed over tokens, and the number of tokens

    @checked
    def __init__(
        self,
        preset: str | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        lr: float = 3e-4,
        min_lr: float = 3e-5,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int | None = None,
        schedule_steps: int | None = None,
        fused: bool | None = None,
        activation_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
        init_seed: int | None = 1234,
        optimizer: Literal["adamw", "muon", "lion", "sgd"] = "adamw",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        if (preset is None) == (model_type is None):
            raise ValueError("CausalLM takes one of preset (see nemo_lowprec.models.presets) and model_type.")
        if min_lr > lr:
            raise ValueError(f"min_lr={min_lr} must be between 0 and lr={lr}.")
        if fused is not None and optimizer != "adamw":
            raise ValueError(f"fused={fused!r} is AdamW's; optimizer={optimizer!r} has no such choice. Leave it out.")
        config, betas = dict(config or {}), (float(betas[0]), float(betas[1]))
        self.save_hyperparameters({**arguments, "config": config, "betas": betas})
        if preset is not None:
            found = get_preset(preset)
            self._model_type, self._fields = found.model_type, {**found.config, **config}
        else:
            assert model_type is not None
            self._model_type, self._fields = model_type, config
        self.model = None
        self.token_rate = TokenRate()

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's method, with a check of the checksums of a local file.

        Raises:
            ValueError: the file is missing or damaged; the message is one sentence.
        """
        if not isinstance(checkpoint_path, (str, os.PathLike)) or "://" in str(checkpoint_path):
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[arg-type]
        check_file(Path(checkpoint_path))
        with reading(Path(checkpoint_path)):
            return super().load_from_checkpoint(Path(checkpoint_path), *args, **kwargs)

    # ------------------------------------------------------------------ the model

    def configure_model(self) -> None:
        """Makes the weights, in FP32; a second call does nothing."""
        if self.model is not None:
            return
        with needs_extras("CausalLM"):
            from transformers import AutoModelForCausalLM

        config = self.transformers_config()
        seed = self.hparams["init_seed"]
        # With a strategy that shards the weights, one process makes all weights.
        once = getattr(getattr(self._trainer, "strategy", None), "init_on_first_process", nullcontext)
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(gpus, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            with once():
                self.model = self._build(AutoModelForCausalLM, config)

    def agreement(self) -> dict[str, Any]:
        """Values that must be equal on every process: the arguments, except the path of weights."""
        return {name: value for name, value in self.hparams.items() if name != "weights"}

    def transformers_config(self) -> Any:
        """The transformers config of the model, with the vocabulary that the model gets.

        Raises:
            ValueError: see the class.
        """
        with needs_extras("CausalLM"):
            from transformers import AutoConfig

        vocab_size = self._resolve_vocab_size()
        fields = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        check_architecture(self._model_type, {**self._fields, "vocab_size": vocab_size})
        config = AutoConfig.for_model(self._model_type, **{**fields, **self._fields, "vocab_size": vocab_size})
        sequence = getattr(self._datamodule(), "seq_length", None)
        positions = getattr(config, "max_position_embeddings", None)
        if sequence is not None and positions is not None and sequence > positions:
            raise ValueError(f"Samples of {sequence} tokens are longer than the model's {positions} positions.")
        return config

    def _build(self, auto: Any, config: Any) -> nn.Module:
        try:
            model = auto.from_config(
                config, attn_implementation=self.hparams["attn_implementation"], dtype=torch.float32
            )
        except Exception as error:  # in classes and words of several libraries
            raise ValueError(f"transformers builds no {type(config).__name__} like this: {one_line(error)}") from error
        if self.hparams["activation_checkpointing"]:
            # transformers has renamed this method and warns where the old name is called.
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model.train()

    def _resolve_vocab_size(self) -> int:
        """The model's vocabulary, saved as a hyperparameter so that a checkpoint opens without the data."""
        wanted = self.hparams["vocab_size"]
        data = getattr(self._datamodule(), "vocab_size", None)
        fixed = self._fields.get("vocab_size")
        if wanted is None:
            wanted = fixed if fixed is not None else data
        if wanted is None:
            raise ValueError(
                "CausalLM has no vocab_size: pass it, or train with a data module that has the attribute vocab_size."
            )
        if data is not None and data > wanted:
            raise ValueError(f"vocab_size={wanted} is too small for the data, whose tokenizer has {data} ids.")
        self.hparams["vocab_size"] = wanted
        return wanted if wanted == fixed else math.ceil(wanted / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    def _datamodule(self) -> Any:
        return getattr(self._trainer, "datamodule", None)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, sequence, vocabulary] of the ids [batch, sequence]."""
        if self.model is None:
            raise RuntimeError("CausalLM has no weights yet: call configure_model() first (a Trainer does).")
        logits: Tensor = self.model(input_ids=input_ids).logits
        return logits

    # ------------------------------------------------------------------ steps

    def _loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the loss over the tokens of a batch, and the number of tokens; both stay on the device."""
        labels = batch["labels"]
        return summed_cross_entropy(self(batch["input_ids"]), labels), (labels != IGNORE).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        total, tokens = self._loss_sum(batch)
        loss = total / tokens.clamp(min=1)
        self._log_step(loss.detach(), batch["labels"].numel())
        return loss

    def _log_step(self, loss: Tensor, tokens: int) -> None:
        """Log a training step of ``tokens`` tokens; Lightning reads logged tensors only at the log interval."""
        self.token_rate.add(tokens)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/perplexity", loss.exp())
        if self._is_log_step(self.trainer.global_step + 1):
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def _is_log_step(self, step: int) -> bool:
        """Whether Lightning writes to its loggers once ``step`` optimizer steps are done."""
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return interval > 0 and step % interval == 0

    def on_train_start(self) -> None:
        self.token_rate = TokenRate()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches or not self._is_log_step(self.trainer.global_step):
            return
        rate = self.token_rate.read()
        if rate is not None:
            self.log("train/tokens_per_sec", rate * data_parallel_size(self.trainer), prog_bar=True)

    def _end_eval(self, stage: str) -> None:
        total, tokens = self.trainer.strategy.reduce(self._eval_sums, reduce_op="sum")
        loss = total / tokens.clamp(min=1)
        self.log(f"{stage}/loss", loss.float(), prog_bar=True)
        self.log(f"{stage}/perplexity", loss.exp().float())

    def on_validation_start(self) -> None:
        self.token_rate.pause()
        self._eval_sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._eval_sums += torch.stack([value.double() for value in self._loss_sum(batch)])

    def on_validation_epoch_end(self) -> None:
        self._end_eval("val")

    def on_validation_end(self) -> None:
        self.token_rate.resume()

    on_test_start = on_validation_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._end_eval("test")

    # ------------------------------------------------------------------ optimizer

    def configure_optimizers(self) -> Any:
        h = self.hparams
        total = h["schedule_steps"] or self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError("The Trainer has no end: give it max_steps or max_epochs, or the model schedule_steps.")
        warmup = default_warmup(int(total)) if h["warmup_steps"] is None else h["warmup_steps"]
        settings = {name: h[name] for name in ("lr", "weight_decay", "betas", "eps")}
        optimizer = make_optimizer(h.get("optimizer", "adamw"), self, fused=h.get("fused"), **settings)
        scheduler = LambdaLR(optimizer, warmup_cosine(warmup, int(total), h["min_lr"] / h["lr"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
