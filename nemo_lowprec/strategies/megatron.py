"""``MegatronStrategy``: a level on Megatron-core's engine, for its GPT models and, data-parallel, for any module."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.comm import check_same
from nemo_lowprec.compute import te_layers
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.requirements import check_device, check_megatron
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.megatron.summary import settings_tables
from nemo_lowprec.plugins import processes
from nemo_lowprec.plugins.precision import SKIPPED, LowPrecision
from nemo_lowprec.plugins.schedulers import hold_back_skipped, release_schedulers
from nemo_lowprec.strategies.replace import recover, remove

if TYPE_CHECKING:
    from nemo_lowprec.megatron.optimizer import LowPrecisionDistributedOptimizer
    from nemo_lowprec.megatron.own_layers import OwnLayers

__all__ = ["MegatronStrategy", "PipelinedModule"]

_BUILT, _MASTERS = "_megatron_chunks", "_megatron_masters"  # on a module, for the stages after the first
ForwardStep = Callable[[nn.Module, Any], tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]]


@runtime_checkable
class PipelinedModule(Protocol):
    """What a LightningModule has whose layers Megatron-core builds, and may spread over processes."""

    def build_chunk(
        self, fields: dict[str, Any], pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> nn.Module:
        """One part of the model, on this process's GPU.

        Args:
            fields: of TransformerConfig, from the level and the parallel sizes; the module adds its own.
            pre_process, post_process: whether the part has the embedding, and the head.
            vp_stage: which of this process's parts; None where it has one.
        """

    def forward_step(self, chunk: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """One micro-batch through one part: see ``MegatronStrategy.forward_backward``."""

    def take_chunks(self, chunks: list[nn.Module]) -> None:
        """Hold the parts as submodules, for ``configure_optimizers`` and ``parameters()``."""


class MegatronStrategy(DDPStrategy):
    """Megatron-core's parallelism, gradient buffers, distributed optimizer, schedules and loss scaling.

    A module that is a ``PipelinedModule`` (such as ``MegatronGPT``) is built by Megatron-core in parts, at any of the
    sizes. Any other ``LightningModule`` is trained data-parallel: each process has all of it.

    The micro-batches of a step are the Trainer's ``accumulate_grad_batches`` batches. A pipeline needs them together:
    they are kept until the last one is there, and then run; the ``training_step`` of those before returns zero.
    Gradients are clipped by Megatron-core, to the Trainer's ``gradient_clip_val``.

    Args:
        tensor_model_parallel_size: processes that share each layer's matrices.
        pipeline_model_parallel_size: stages of the pipeline.
        virtual_pipeline_model_parallel_size: parts that each process has of the layers, interleaved.
        context_parallel_size: processes that share each sequence.
        expert_model_parallel_size: processes that share the experts of a layer.
        sequence_parallel: whether tensor-parallel processes share the sequence outside of the matrices, too.
        overlap_grad_reduce: whether gradients are reduced while backward goes on.
        overlap_param_gather: whether weights are gathered while the next forward goes on.
        bucket_size: parameters of a bucket; None for Megatron-core's choice.
        checkpoint_form: ``fully_reshardable`` (opens at any parallel sizes) or ``dp_reshardable`` (faster; opens at
            the same tensor and pipeline sizes).
        options: of Lightning's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        ValueError: sizes that do not go together, or an unknown ``checkpoint_form``.
        TypeError: an option of torch's DDP.
        RuntimeError: without Megatron-core, Transformer Engine or a GPU.
    """

    strategy_name = "lowprec_megatron"

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        bucket_size: int | None = None,
        checkpoint_form: str = "fully_reshardable",
        **options: Any,
    ) -> None:
        self.layout = ParallelLayout(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size,
            context_parallel_size,
            expert_model_parallel_size,
            sequence_parallel,
        )
        if checkpoint_form not in ("fully_reshardable", "dp_reshardable"):
            raise ValueError(f"checkpoint_form={checkpoint_form!r} must be 'fully_reshardable' or 'dp_reshardable'.")
        if bucket_size is not None and (isinstance(bucket_size, bool) or bucket_size < 1):
            raise ValueError(f"bucket_size={bucket_size!r} must be a positive number of parameters.")
        check_megatron()
        super().__init__(**options)
        if self._ddp_kwargs:
            raise TypeError(f"MegatronStrategy has no {', '.join(self._ddp_kwargs)}: that is an option of torch's DDP.")
        self._overlaps = {
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": overlap_param_gather,
            "bucket_size": bucket_size,
        }
        self.checkpoint_form = checkpoint_form
        self.settings: MegatronSettings | None = None
        self.megatron_optimizer: LowPrecisionDistributedOptimizer | None = None
        self.chunks: list[Any] = []
        self.config: Any = None
        self.own_layers: OwnLayers | None = None
        self._waits = False
        self._may_be_empty = True
        self._pending: list[Any] = []

    # Setting up

    @override
    def setup_environment(self) -> None:
        self.layout.check_world(self.num_nodes * self.num_processes)
        super().setup_environment()
        self.layout.initialize()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    @property
    def is_pipelined(self) -> bool:
        """Whether Megatron-core builds the model, and runs its schedules."""
        return isinstance(self.lightning_module, PipelinedModule)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        plugin, module = self.precision_plugin, self.lightning_module
        if not isinstance(plugin, LowPrecision):
            raise ValueError("MegatronStrategy needs a level of nemo_lowprec among the Trainer's plugins.")
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        self.settings = settings = plugin.megatron(own_layers=not self.is_pipelined)
        check_device(settings.level)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._check(trainer, module)
        check_same({"the level": repr(plugin), **processes.versions()})
        parts = self._chunks_of(module) if self.is_pipelined else self._convert(module, plugin)
        if not fits:
            self.chunks = parts
            self._configure()
            return
        self._wrap(parts)
        self.setup_optimizers(trainer)
        self._make_optimizer(trainer)
        self._configure()
        plugin.follow(module)
        hold_back_skipped(module, self.megatron_optimizer, self.lr_scheduler_configs)  # type: ignore[arg-type]
        if self.is_global_zero:
            for table in settings_tables(settings, plugin, self.layout, self._overlaps):
                Console().print(table)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """What cannot be trained so."""
        if not module.automatic_optimization:
            raise ValueError("MegatronStrategy runs the steps itself: set automatic_optimization = True.")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(
                f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}: Megatron-core clips by norm. Use 'norm'."
            )
        layout, settings = self.layout, self.settings
        assert settings is not None
        if not self.is_pipelined and layout != ParallelLayout():
            raise ValueError(
                f"{type(module).__name__} is not built by Megatron-core, which can train it data-parallel only. Leave "
                "the parallel sizes out, or use a PipelinedModule such as MegatronGPT."
            )
        steps = trainer.accumulate_grad_batches
        if layout.virtual_pipeline is not None and steps % layout.pipeline:
            raise ValueError(
                f"accumulate_grad_batches={steps} must be a multiple of pipeline_model_parallel_size="
                f"{layout.pipeline} for the interleaved schedule."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__name__ in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"):
                raise ValueError(
                    f"{type(callback).__name__} averages parameters, of which each process steps a part here. Leave "
                    "the callback out."
                )

    def _transformer_fields(self) -> dict[str, Any]:
        from megatron.core.transformer.enums import AttnBackend

        assert self.settings is not None
        fields = {**self.layout.fields(), **self.settings.model}
        if "attention_backend" in fields:
            fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
        return fields

    def _chunks_of(self, module: Any) -> list[nn.Module]:
        """The parts, built once: fit, validate and another fit may follow each other."""
        built: tuple[dict[str, Any], list[nn.Module]] | None = module.__dict__.get(_BUILT)
        fields = self._transformer_fields()
        if built is None:
            built = module.__dict__[_BUILT] = fields, self._build(module)
        elif built[0] != fields:
            raise ValueError(
                "This model was built for another level or for other parallel sizes. Save a checkpoint, and load it "
                "into a new one."
            )
        self.config = built[1][0].config
        return built[1]

    def _build(self, module: Any) -> list[nn.Module]:
        from megatron.core import parallel_state, tensor_parallel

        from nemo_lowprec.megatron.chunks import cast_parameters
        from nemo_lowprec.megatron.delayed import mend_delayed_scaling

        settings = self.settings
        assert settings is not None
        mend_delayed_scaling()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        last = self.layout.pipeline - 1
        virtual = self.layout.virtual_pipeline
        seed = module.hparams.get("init_seed") or 1234
        # As in Megatron-LM: stages differ, data-parallel processes do not.
        tensor_parallel.model_parallel_cuda_manual_seed(int(seed) + 100 * stage)
        parts = []
        for index in range(virtual or 1):
            first = stage == 0 and index == 0
            final = stage == last and index == (virtual or 1) - 1
            part = module.build_chunk(
                self._transformer_fields(), first, final, index if virtual is not None else None
            )  # fmt: skip
            cast_parameters(part, settings)
            te_layers.empty_extra_state(part)  # a pickle, which nothing here reads: see ``megatron_checkpoint``
            parts.append(part)
        module.take_chunks(parts)
        return parts

    def _convert(self, module: pl.LightningModule, plugin: LowPrecision) -> list[nn.Module]:
        from megatron.core.transformer import TransformerConfig

        from nemo_lowprec.megatron.own_layers import OwnLayers

        assert self.settings is not None
        self.model_to_device()
        self.own_layers = OwnLayers(module, plugin.parsed, self.settings, self.root_device)
        # Sizes that Megatron's DDP does not look at.
        self.config = TransformerConfig(
            num_layers=1, hidden_size=1, num_attention_heads=1, **self._transformer_fields()
        )  # fmt: skip
        return [module]

    def _wrap(self, parts: Sequence[nn.Module]) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.utils import get_model_config

        from nemo_lowprec.megatron.chunks import wrap

        settings = self.settings
        assert settings is not None
        if settings.fp8_gradients and self.layout.pipeline > 1 and _is_tied(parts):
            raise ValueError(
                f"{settings.level.name} stores gradients in FP8, and an embedding that is tied to the head of another "
                "pipeline stage is summed by Megatron-core in its own formats. Untie it, or use pipeline size 1."
            )
        ddp_config = DistributedDataParallelConfig(**self._overlaps, **settings.ddp)
        configs = [get_model_config(part) if self.is_pipelined else self.config for part in parts]
        self.chunks = [
            wrap(part, config, ddp_config, settings, i == 0)
            for i, (part, config) in enumerate(zip(parts, configs, strict=True))
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()

    def _make_optimizer(self, trainer: pl.Trainer) -> None:
        from megatron.core.optimizer import OptimizerConfig

        from nemo_lowprec.megatron.optimizer import check_optimizer, distribute

        assert self.settings is not None
        inner = check_optimizer(self.optimizers)
        defaults = inner.defaults
        config = OptimizerConfig(
            **self.settings.optimizer,
            lr=float(defaults["lr"]),
            weight_decay=defaults["weight_decay"],
            adam_beta1=defaults["betas"][0],
            adam_beta2=defaults["betas"][1],
            adam_eps=defaults["eps"],
            clip_grad=float(trainer.gradient_clip_val or 0.0),
            overlap_param_gather=self._overlaps["overlap_param_gather"],
        )
        self.megatron_optimizer = distribute(inner, config, self.settings, self.chunks)
        self.megatron_optimizer.take_masters(self.lightning_module.__dict__.pop(_MASTERS, {}))  # type: ignore[union-attr]

    def _configure(self) -> None:
        """Tell the schedules what they call."""
        from megatron.core.distributed import finalize_model_grads

        if self.megatron_optimizer is None:
            return
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.megatron_optimizer.scale_loss
        if self._overlaps["overlap_grad_reduce"]:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    # Steps

    def forward_backward(self, forward_step: ForwardStep, batches: Sequence[Any], forward_only: bool = False) -> Any:
        """Run micro-batches through the pipeline.

        Args:
            forward_step: ``(chunk, batch) -> (output, loss_func)``, where ``loss_func(output)`` is the loss and what
                is to be reported of it.
            batches: the same on all processes of a data-parallel rank.
            forward_only: without gradients.

        Returns:
            what ``loss_func`` reported of each; nothing where this process has not the last stage.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from nemo_lowprec.megatron.context import part_of_sequence

        def step(iterator: Any, chunk: nn.Module) -> Any:
            return forward_step(chunk, part_of_sequence(next(iterator)))

        rows, length = batches[0]["input_ids"].shape
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and isinstance(self.precision_plugin, LowPrecision)
        self.precision_plugin.before_step()
        if not self.is_pipelined:
            with self.own_layers.training():  # type: ignore[union-attr]
                return self.lightning_module.training_step(*args, **kwargs)
        batch, *rest = args
        self._pending.append(batch)
        if self._waits:
            return torch.zeros((), device=self.root_device)
        batches, self._pending = self._pending, []
        self._zero_grad()
        self._rehearse(batches)
        return self.lightning_module.training_step(batches, *rest, **kwargs)

    def _rehearse(self, batches: Sequence[Any]) -> None:
        """At the start of a run with delayed scaling: a pass that only fills the amax histories.

        Transformer Engine's scales begin at 1, which rounds weights to three bits and gradients to zero.
        """
        settings = self.settings
        assert settings is not None and self.megatron_optimizer is not None
        empty, self._may_be_empty = self._may_be_empty, False
        if not (self._is_delayed and empty and all(te_layers.has_empty_histories(chunk) for chunk in self.chunks)):
            return
        # Gradients of a token's loss, and not of a mean, lie in FP8's range at any scale near 1.
        raised = 1.0 if settings.level.has_loss_scale else float(batches[0]["labels"].numel() * len(batches))
        scale_loss, self.config.grad_scale_func = self.config.grad_scale_func, lambda loss: scale_loss(loss) * raised
        self.forward_backward(self.lightning_module.forward_step, batches)  # type: ignore[union-attr,arg-type]
        self.config.grad_scale_func = scale_loss
        for chunk in self.chunks:
            te_layers.scale_by_histories(chunk, raised)
        self._zero_grad()

    def _zero_grad(self) -> None:
        assert self.megatron_optimizer is not None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron_optimizer.zero_grad()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # Megatron caches what a forward pass makes, and training could not save inference tensors for backward.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if self.own_layers is not None:
                stack.enter_context(self.own_layers.forward())
            else:
                stack.enter_context(self._without_new_amaxes())
            return getattr(self.lightning_module, hook)(*args, **kwargs)

    @contextmanager
    def _without_new_amaxes(self) -> Generator[None, None, None]:
        """Evaluation with the scales of training; in half precision where training has not found any yet."""
        scales_later = self._is_delayed and all(te_layers.has_empty_histories(chunk) for chunk in self.chunks)
        configs = [chunk.config for chunk in self.chunks]
        fp8 = self.config.fp8
        with ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(te_layers.histories_kept(chunk))
            for config in configs:
                config.fp8 = None if scales_later else fp8
            try:
                yield
            finally:
                for config in configs:
                    config.fp8 = fp8

    @property
    def _is_delayed(self) -> bool:
        assert self.settings is not None
        return self.settings.model["fp8"] is not None and self.settings.model["fp8_recipe"] == "delayed"

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._waits = True
        try:
            with ExitStack() as stack:
                for chunk in self.chunks if self.own_layers is not None else ():
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            self._waits = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.own_layers is None:
            return closure_loss  # the schedule has done it
        assert self.megatron_optimizer is not None
        if self.own_layers.is_first():
            self._zero_grad()
        with torch.autocast("cuda", enabled=False):
            self.megatron_optimizer.scale_loss(closure_loss).sum().backward(*args, **kwargs)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        trainer, distributed = self.lightning_module.trainer, self.megatron_optimizer  # type: ignore[union-attr]
        assert distributed is not None
        result = closure()
        if result is None:
            raise ValueError("training_step returned None to skip a batch, which MegatronStrategy cannot do.")
        if self.own_layers is not None:
            self._finish_gradients()
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        stepped, _, _ = distributed.step()
        if self.own_layers is not None:
            self.own_layers.after_step(stepped)
        if not stepped and distributed.grad_scaler is None:
            rank_zero_warn(SKIPPED.format("strategy.megatron_optimizer"))
        return result

    def _finish_gradients(self) -> None:
        try:
            for chunk in self.chunks:
                chunk.finish_grad_sync()
        except AssertionError as error:
            raise RuntimeError(
                "A parameter has no gradient in this step, and overlap_grad_reduce=True waits for all of a bucket. "
                "Freeze it (requires_grad=False), or use MegatronStrategy(overlap_grad_reduce=False)."
            ) from error

    # State

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # ``save_checkpoint`` takes the weights from the chunks

    @override
    def optimizer_state(self, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        from nemo_lowprec.strategies.megatron_checkpoint import save

        self.sync_weights()
        save(checkpoint, Path(self.broadcast(filepath)), self)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from nemo_lowprec.strategies.megatron_checkpoint import load

        path = Path(self.broadcast(checkpoint_path))
        if self.is_global_zero:
            recover(path)
        self.barrier()
        return load(path, self)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass  # ``load_checkpoint`` has put all in its place

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            remove(Path(filepath))

    def sync_weights(self) -> None:
        """Wait for weights that are being gathered, and gather those that are not."""
        if self.megatron_optimizer is not None and self._overlaps["overlap_param_gather"]:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    @override
    def teardown(self) -> None:
        module, optimizer = self.lightning_module, self.megatron_optimizer
        if module is not None:
            release_schedulers(module)
            if optimizer is not None:
                # Where a process has failed, the others cannot be waited for.
                together = module.trainer.state.status != TrainerStatus.INTERRUPTED
                module.__dict__[_MASTERS] = optimizer.release(gather=together)
        if self.own_layers is not None:
            self.own_layers.remove()
        pipelined = module is not None and self.is_pipelined
        self.megatron_optimizer, self.own_layers, self.chunks = None, None, []
        if pipelined:
            self._lightning_module = None  # Lightning would move it to the CPU, where there are no FP8 weights
        super().teardown()
        self._lightning_module = module

    def mean_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """The mean of what the last stages' processes have, on all processes, without waiting for the device."""
        mean = torch.zeros((), device=self.root_device)
        if losses:
            mean += torch.stack(list(losses)).float().mean()
        dist.all_reduce(mean)
        return mean * (self.layout.pipeline / self.world_size)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=cls.__doc__.split("\n")[0])  # type: ignore[union-attr]


def _is_tied(parts: Sequence[nn.Module]) -> bool:
    return any(getattr(part, "share_embeddings_and_output_weights", False) for part in parts)
