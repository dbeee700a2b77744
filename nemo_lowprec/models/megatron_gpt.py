"""A LightningModule around Megatron-core's GPTModel, for ``MegatronStrategy``; ``CausalLM`` is for other strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemo_lowprec.arguments import checked
from nemo_lowprec.checkpoint.dcp_folder import check_sums
from nemo_lowprec.checkpoint.torch_zip import check_regular
from nemo_lowprec.models.causal_lm import CausalLM
from nemo_lowprec.models.loss import IGNORE
from nemo_lowprec.models.megatron_llama import GptArchitecture, build_gpt, gpt_architecture
from nemo_lowprec.models.megatron_weights import from_transformers, of_stage, part_of
from nemo_lowprec.strategies.megatron import MegatronStrategy

if TYPE_CHECKING:
    from nemo_lowprec.megatron.engine import MegatronEngine


class MegatronGPT(CausalLM):
    """Next-token prediction with a Llama-family GPTModel in Transformer Engine's fused layers.

    Batches, logs, optimizer and schedule are those of ``CausalLM``; ``train/loss`` is the mean over a step's whole
    batch, and ``train/grad_norm`` its gradient's norm before clipping.

    Args:
        preset, config, vocab_size, lr, min_lr, weight_decay, betas, eps: as in ``CausalLM``.
        warmup_steps, schedule_steps, activation_checkpointing: as in ``CausalLM``.
        model_type: transformers' name of another architecture of the family: ``llama``, ``mistral``, ``qwen2``,
            ``qwen3``.
        weights: folder of a transformers model to start from; None: Megatron-core's own random weights.
        transformer: further fields of TransformerConfig, such as ``recompute_granularity``; not the fields that the
            plugin sets for the level, or the strategy for the parallel sizes.
        init_seed: seed of the random weights.

    Raises:
        ValueError: a bad value, at construction; an architecture that GPTModel cannot follow, once it is built.
        RuntimeError: without ``MegatronStrategy``.
    """

    @checked
    def __init__(
        self,
        preset: str | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        weights: str | None = None,
        transformer: dict[str, Any] | None = None,
        lr: float = 3e-4,
        min_lr: float = 3e-5,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int | None = None,
        schedule_steps: int | None = None,
        activation_checkpointing: bool = False,
        init_seed: int = 1234,
    ) -> None:
        super().__init__(
            preset, model_type, config, vocab_size, lr, min_lr, weight_decay, betas, eps, warmup_steps,
            schedule_steps, activation_checkpointing=activation_checkpointing, init_seed=init_seed,
        )  # fmt: skip
        # Megatron-core's layers and optimizer have no such choice.
        for choice in ("attn_implementation", "fused", "optimizer"):
            del self.hparams[choice]
        self.save_hyperparameters({"weights": weights, "transformer": dict(transformer or {})})

    # ------------------------------------------------------------------ the model

    def configure_model(self) -> None:
        """Makes no weights: the strategy builds the parts of the model once its process groups exist."""
        if not isinstance(getattr(self._trainer, "strategy", None), MegatronStrategy):
            raise RuntimeError("MegatronGPT is built by MegatronStrategy: give it to the Trainer, or use CausalLM.")

    def build_chunk(
        self, fields: dict[str, Any], pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> nn.Module:
        """See ``PipelinedModule``."""
        architecture = gpt_architecture(self.transformers_config())
        own = dict(self.hparams["transformer"])
        taken = sorted(own.keys() & fields.keys())
        if taken:
            raise ValueError(f"transformer={{'{taken[0]}': ...}} is decided by the level or by MegatronStrategy.")
        check_sizes(architecture, {**own, **fields}, getattr(self._datamodule(), "seq_length", None))
        if self.hparams["activation_checkpointing"]:
            own = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} | own
        part = build_gpt(architecture, {**own, **fields}, pre_process, post_process, vp_stage)
        if self.hparams["weights"] is not None:
            load_weights(part, from_transformers(_read(Path(self.hparams["weights"])), architecture))
        return part

    def take_chunks(self, chunks: list[nn.Module]) -> None:
        """See ``PipelinedModule``."""
        self.model = nn.ModuleList(chunks)

    def forward(self, input_ids: Tensor) -> Tensor:
        raise RuntimeError("A part of a GPTModel has no forward of its own: MegatronStrategy runs its schedules.")

    # ------------------------------------------------------------------ steps

    @property
    def _engine(self) -> MegatronEngine:
        strategy = self.trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        return strategy.engine

    def forward_step(
        self, chunk: nn.Module, batch: dict[str, Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]]:
        """Run one micro-batch through one part of the model, in Megatron-core's convention.

        The returned function reports the sum of the loss and the number of tokens in this process's part of the
        sequences, and the number of tokens in all parts.
        """
        from nemo_lowprec.megatron.context import over_context

        labels = batch["labels"]
        output = chunk(batch["input_ids"], None, None, labels=labels.clamp(min=0))

        def loss_func(losses: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            counts = labels != IGNORE
            total, tokens = (losses.float() * counts).sum(), counts.sum()
            # Megatron-core sums the losses of the context-parallel processes.
            whole = over_context(tokens)
            return total / whole.clamp(min=1), (total.detach(), tokens, whole)

        return output, loss_func

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        engine = self._engine
        reported = engine.forward_backward(self.forward_step, batch)
        loss = engine.mean_loss([total / whole.clamp(min=1) for total, _, whole in reported])
        self._log_step(loss, sum(b["labels"].numel() for b in batch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self._engine.optimizer
        assert optimizer is not None
        if optimizer.grad_norm is not None and self._is_log_step(self.trainer.global_step):
            self.log("train/grad_norm", optimizer.grad_norm)
        super().on_train_batch_end(outputs, batch, batch_idx)

    def _loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        reported = self._engine.forward_backward(self.forward_step, [batch], forward_only=True)
        if not reported:  # not the last stage
            nothing = torch.zeros((), device=self.device, dtype=torch.float32)
            return nothing, nothing.long()
        total, tokens, _ = reported[0]
        return total, tokens


def check_sizes(architecture: GptArchitecture, fields: Mapping[str, Any], sequence: int | None) -> None:
    """Raise ValueError where layers, experts or samples of ``sequence`` tokens do not divide among processes.

    Args:
        fields: of TransformerConfig.
        sequence: None for an unknown length.
    """
    layers, stages = architecture.transformer["num_layers"], fields["pipeline_model_parallel_size"]
    parts = stages * (fields["virtual_pipeline_model_parallel_size"] or 1)
    uneven = {
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    }  # fmt: skip
    if layers % parts and not uneven & fields.keys():
        raise ValueError(f"{layers} layers do not divide into {parts} parts of a pipeline. Use other pipeline sizes.")
    experts, spread = fields.get("num_moe_experts") or 0, fields["expert_model_parallel_size"]
    if experts % spread:
        raise ValueError(
            f"num_moe_experts={experts} do not divide among expert_model_parallel_size={spread} processes. Use another "
            "number of either."
        )
    context, tensor = fields["context_parallel_size"], fields["tensor_model_parallel_size"]
    ways = (2 * context if context > 1 else 1) * (tensor if fields["sequence_parallel"] else 1)
    if sequence is not None and sequence % ways:
        raise ValueError(
            f"Samples of {sequence} tokens do not divide into {ways} parts, as context_parallel_size={context} (two "
            f"for each process) and sequence parallelism over {tensor} processes need. Use another seq_length."
        )


def load_weights(part: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copy the whole GPTModel's parameters, of any float dtype, into this process's part, before it is wrapped."""
    from megatron.core import parallel_state

    from nemo_lowprec.megatron.chunks import start_from

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    named = dict(part.named_parameters())
    layers = part.decoder.layers  # type: ignore[union-attr]
    first = layers[0].layer_number - 1 if len(layers) else 0  # type: ignore[index,operator,arg-type,union-attr]
    for name, values in of_stage(full, named, first).items():
        start_from(named[name], part_of(name, values, rank, size))


def _read(folder: Path) -> dict[str, Tensor]:
    """The weights of a transformers model on the disk, mapped into memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights={str(folder)!r} has no .safetensors files: save a transformers model there.")
    state: dict[str, Tensor] = {}
    for path in files:
        check_regular(path)
    check_sums(folder, [path.name for path in files])  # in a folder of nemo-lowprec export
    for path in files:
        try:
            state |= load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged, or cut short: {error}. Copy it again.") from error
    return state
