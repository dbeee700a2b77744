"""``MegatronStrategy``: a level on Megatron-core's engine, for its GPT models and, data-parallel, for any module."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.arguments import checked
from nemo_lowprec.checkpoint.writing import remove
from nemo_lowprec.comm import check_same
from nemo_lowprec.compat.lightning import call_before_optimizer_step
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.requirements import check_device, check_megatron
from nemo_lowprec.megatron.summary import layers_table, settings_table
from nemo_lowprec.plugins import processes
from nemo_lowprec.plugins.agreement import check_optimizers, facts_of_data
from nemo_lowprec.plugins.precision import LowPrecision
from nemo_lowprec.plugins.resume import check_saves
from nemo_lowprec.plugins.summary import level_table, print_choice, print_tables, summarize_true_size
from nemo_lowprec.strategies.agreed import AgreesOnResume

if TYPE_CHECKING:
    from nemo_lowprec.megatron import MegatronSettings
    from nemo_lowprec.megatron.engine import MegatronEngine


class MegatronStrategy(AgreesOnResume, DDPStrategy):
    """Megatron-core's parallelism, gradient buffers, distributed optimizer, schedules and loss scaling.

    Megatron-core builds a ``PipelinedModule`` (such as ``MegatronGPT``) in parts, at any parallel sizes. Any other
    ``LightningModule`` is trained data-parallel: each process has the whole model.

    The micro-batches of a step are the Trainer's ``accumulate_grad_batches`` batches. A pipeline runs them together:
    the strategy keeps the batches until the last one, and returns zero as the loss of the earlier batches.
    Megatron-core clips the gradients to the Trainer's ``gradient_clip_val``.

    Args:
        tensor_model_parallel_size: processes that share each layer's matrices.
        pipeline_model_parallel_size: stages of the pipeline.
        virtual_pipeline_model_parallel_size: parts of the layers on each process, interleaved.
        context_parallel_size: processes that share each sequence.
        expert_model_parallel_size: processes that share the experts of a layer.
        sequence_parallel: whether tensor-parallel processes share the sequence outside of the matrices, too.
        overlap_grad_reduce: whether gradients are reduced while backward goes on.
        overlap_param_gather: whether weights are gathered while the next forward goes on; None: only for a
            ``PipelinedModule``, as other modules may read a parameter without calling the layer that waits for it.
        bucket_size: parameters of a bucket; None for Megatron-core's choice.
        checkpoint_form: ``fully_reshardable`` (opens at any parallel sizes) or ``dp_reshardable`` (faster; opens at
            the same tensor and pipeline sizes).
        options: options of Lightning's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        ValueError: the sizes do not go together, or ``checkpoint_form`` is unknown.
        TypeError: an option of torch's DDP.
        RuntimeError: Megatron-core, Transformer Engine or a GPU is missing.
    """

    strategy_name = "lowprec_megatron"

    @partial(checked, also=DDPStrategy.__init__)
    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool | None = None,
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
        self._engine: MegatronEngine | None = None
        self._waits = False
        self._pending: list[Any] = []

    @property
    def engine(self) -> MegatronEngine:
        """The engine of the running Trainer."""
        if self._engine is None:
            raise RuntimeError("MegatronStrategy has no model: a Trainer sets it up.")
        return self._engine

    # Setting up

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._resolve(model)  # raises before data are prepared and the model is built

    @override
    def setup_environment(self) -> None:
        self.layout.check_world(self.num_nodes * self.num_processes)
        super().setup_environment()
        check_device(self.precision_plugin.level)  # type: ignore[attr-defined]
        self.layout.initialize(self._timeout)

    def agreement(self) -> dict[str, Any]:
        """Settings that must be the same on all processes."""
        return {**self.layout.sizes(), **self._overlaps, "sequence_parallel": self.layout.sequence_parallel,
                "checkpoint_form": self.checkpoint_form}  # fmt: skip

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        from nemo_lowprec.megatron.chunks import unwrapped
        from nemo_lowprec.megatron.engine import MegatronEngine, PipelinedModule
        from nemo_lowprec.megatron.optimizer import check_optimizer

        module: Any = self.lightning_module
        plugin, settings = self._resolve(module)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        pipelined, fits = isinstance(module, PipelinedModule), trainer.state.fn == TrainerFn.FITTING
        plugin.stop_together(trainer, evaluates_in_step=True, between_steps=True)
        check_same({**facts_of_data(trainer), **processes.versions()})
        overlaps = dict(self._overlaps)
        if overlaps["overlap_param_gather"] is None:
            overlaps["overlap_param_gather"] = pipelined
        self._engine = engine = MegatronEngine(settings, self.layout, overlaps)
        if pipelined:
            engine.build(module, int(module.hparams.get("init_seed") or 1234))
        else:
            self.model_to_device()
            engine.convert(module, self.root_device)
        if not fits:
            return
        engine.wrap()
        self.setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.lr_scheduler_configs, by_defaults=True)
        engine.attach(check_optimizer(self.optimizers), float(trainer.gradient_clip_val or 0.0))
        assert engine.optimizer is not None
        plugin.follow(module, engine.guard, self.lr_scheduler_configs, "strategy.engine.guard")
        if not settings.fp8_weights:  # Transformer Engine's FP8 weights report the bytes of another dtype
            summarize_true_size(trainer, plugin.undo)
        if self.is_global_zero:
            chunks = [unwrapped(chunk) for chunk in engine.chunks]
            layers, problem = layers_table(chunks, settings, None if pipelined else engine.columns.computation)
            row = level_table(settings.level, settings.fp8_weights, chunks)
            print_tables(plugin, [row, settings_table(settings, self.layout, overlaps), layers], problem)
            engine.columns.computation.when_decided = partial(print_choice, engine.columns.computation)

    def _resolve(self, module: pl.LightningModule) -> tuple[LowPrecision, MegatronSettings]:
        """The level and its settings for ``module``.

        Raises:
            ValueError: the Trainer has no level, or Megatron-core cannot train the level or the module.
        """
        from nemo_lowprec.megatron.engine import PipelinedModule

        plugin, pipelined = self.precision_plugin, isinstance(module, PipelinedModule)
        if not isinstance(plugin, LowPrecision):
            raise ValueError("MegatronStrategy needs a level of nemo_lowprec among the Trainer's plugins.")
        settings = plugin.megatron(own_layers=not pipelined)
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._check(module.trainer, module, pipelined)  # ``setup`` checks again, with the module's callbacks
        return plugin, settings

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule, pipelined: bool) -> None:
        """Raise ValueError for options of the Trainer and of the strategy that Megatron-core cannot follow."""
        if not module.automatic_optimization:
            raise ValueError("MegatronStrategy runs the steps itself: set automatic_optimization = True.")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(
                f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}: Megatron-core clips by norm. Use 'norm'."
            )
        layout = self.layout
        if not pipelined and layout != ParallelLayout():
            raise ValueError(
                f"{type(module).__name__} is not built by Megatron-core, which can train it data-parallel only. Leave "
                "the parallel sizes out, or use a PipelinedModule such as MegatronGPT."
            )
        if not pipelined and self._overlaps["overlap_param_gather"]:
            raise ValueError(
                f"overlap_param_gather=True: {type(module).__name__} is not built by Megatron-core, and may read a "
                "parameter where no layer is called that could wait for it. Leave it out."
            )
        layout.check_micro_batches(trainer.accumulate_grad_batches, "A step (accumulate_grad_batches)")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if type(callback).__name__ in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"):
                raise ValueError(
                    f"{type(callback).__name__} averages parameters, of which each process steps a part here. Leave "
                    "the callback out."
                )

    # Steps

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        check_saves(trainer)
        batches, in_step = trainer.num_training_batches, trainer.accumulate_grad_batches
        if batches < float("inf") and (trainer.max_steps == -1 or trainer.max_steps > batches // in_step):
            last = "The last step of an epoch (a loader with drop_last, or limit_train_batches, can leave it out)"
            self.layout.check_micro_batches(int(batches) % in_step, last)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and isinstance(self.precision_plugin, LowPrecision)
        self.precision_plugin.before_step()
        engine = self.engine
        if not engine.is_pipelined:
            with engine.columns.computation.forward():
                return self.lightning_module.training_step(*args, **kwargs)
        batch, *rest = args
        self._pending.append(batch)
        if self._waits:
            return torch.zeros((), device=self.root_device, dtype=torch.float32)
        batches, self._pending = self._pending, []
        engine.begin(batches)
        return self.lightning_module.training_step(batches, *rest, **kwargs)

    def _evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.precision_plugin, LowPrecision)
        self.precision_plugin.before_evaluation_step()
        with self.engine.evaluation():
            return getattr(self.lightning_module, hook)(*args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")  # type: ignore[assignment]
    test_step = partialmethod(_evaluate, "test_step")  # type: ignore[assignment]
    predict_step = partialmethod(_evaluate, "predict_step")  # type: ignore[assignment]

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._waits = True
        try:
            with self.engine.accumulation():
                yield
        finally:
            self._waits = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if not self.engine.is_pipelined:  # a schedule has run the backward passes of a PipelinedModule
            self.engine.backward(closure_loss, *args, **kwargs)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        trainer, engine = self.lightning_module.trainer, self.engine  # type: ignore[union-attr]
        result = closure()
        if result is None:
            raise ValueError("training_step returned None to skip a batch, which MegatronStrategy cannot do.")
        engine.reduce_gradients()
        call_before_optimizer_step(trainer, optimizer)
        assert engine.optimizer is not None
        engine.step()
        log = self.precision_plugin.log  # type: ignore[attr-defined]
        log.after_step(self.lightning_module, optimizer, engine.optimizer.grad_norm)
        return result

    # State

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # ``save_checkpoint`` takes the weights from the chunks

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        from nemo_lowprec.megatron.checkpoint import save

        self.engine.sync_weights()
        save(checkpoint, Path(self.broadcast(filepath)), self.engine, self.checkpoint_form)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from nemo_lowprec.megatron.checkpoint import load

        return load(self.agreed_path(checkpoint_path), self.engine, self.checkpoint_form)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass  # ``load_checkpoint`` has loaded the weights and the optimizer states

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            remove(Path(filepath))

    @override
    def teardown(self) -> None:
        module, engine = self.lightning_module, self._engine
        built = engine is not None and engine.is_pipelined
        if module is not None and engine is not None:
            # After an error a process may not come to the collective.
            engine.release(gather=module.trainer.state.status != TrainerStatus.INTERRUPTED)
        self._engine, self._pending = None, []
        if built:
            self._lightning_module = None  # Lightning would move the module to the CPU, and FP8 weights cannot move
        super().teardown()
        self._lightning_module = module
