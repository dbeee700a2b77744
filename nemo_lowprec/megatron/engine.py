"""The engine on Megatron-core: one level at work on one model, for any training loop.

``MegatronEngine`` builds or converts the parts of the model, wraps them in Megatron's DistributedDataParallel, puts the
user's optimizer into Megatron's distributed optimizer, and runs the schedule, the reduction of gradients and the step.
``MegatronStrategy`` calls the engine from Lightning's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.compute import te_layers
from nemo_lowprec.engine import Step
from nemo_lowprec.grads import LossScale
from nemo_lowprec.megatron import columns
from nemo_lowprec.megatron.chunks import cast_parameters, unwrapped, wrap
from nemo_lowprec.megatron.context import part_of_sequence
from nemo_lowprec.megatron.optimizer_step import Stepper
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import Observers

# Attributes of a module that the engines of a later fit or evaluation read.
_BUILT, _MASTERS, _UNIT = "_megatron_chunks", "_megatron_masters", "_megatron_gradient_unit"
ForwardStep = Callable[[nn.Module, Any], tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]]


@runtime_checkable
class PipelinedModule(Protocol):
    """A module whose layers Megatron-core builds and may spread over processes."""

    def build_chunk(
        self, fields: dict[str, Any], pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> nn.Module:
        """One part of the model, on this process's GPU.

        Args:
            fields: fields of TransformerConfig that the level and the parallel sizes decide; the module adds others.
            pre_process, post_process: whether the part has the embedding, and the head.
            vp_stage: index of the part among this process's parts; None where the process has one part.
        """

    def forward_step(self, chunk: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """One micro-batch through one part: see ``MegatronEngine.forward_backward``."""

    def take_chunks(self, chunks: list[nn.Module]) -> None:
        """Hold the parts as submodules, for ``configure_optimizers`` and ``parameters()``."""


class MegatronEngine:
    """The engine of one model at one level.

    Args:
        settings: the level's settings.
        layout: the parallel sizes, whose process groups are initialized.
        overlaps: ``overlap_grad_reduce``, ``overlap_param_gather`` and ``bucket_size``.

    Attributes:
        chunks: this process's parts of the model; wrapped in Megatron's DistributedDataParallel for training.
        is_pipelined: whether Megatron-core has built the model, and runs its schedules.
        columns: the level's columns; Megatron-core implements all but Computation.
        guard: the ``Step`` that scales the loss and skips steps.
        observers: get the events of converted layers and of steps.
        optimizer: steps with the user's optimizer; None in an evaluation.
        config: TransformerConfig of the first part, which the schedules read.
    """

    def __init__(self, settings: MegatronSettings, layout: ParallelLayout, overlaps: Mapping[str, Any]) -> None:
        self.settings, self.layout, self.overlaps = settings, layout, dict(overlaps)
        self.observers = Observers()
        self.chunks: list[Any] = []
        self.is_pipelined = True
        self.columns = columns.of_built_chunks(settings, self.chunks)
        scaling = settings.options.loss_scale
        self.guard = Step(self.columns, LossScale(scaling) if scaling is not None else None, self.observers)
        self.guard.device, self.guard.unit = torch.device("cuda"), None
        self.optimizer: Stepper | None = None
        self.config: Any = None
        self._module: Any = None
        self._may_be_empty = self._begins = True

    # The model

    def build(self, module: Any, seed: int) -> None:
        """Build the parts of a ``PipelinedModule``, or take the parts that an earlier engine has built of ``module``.

        Raises:
            ValueError: the parts were built for another level or for other parallel sizes.
        """
        built: tuple[dict[str, Any], list[nn.Module]] | None = module.__dict__.get(_BUILT)
        fields = self._transformer_fields()
        if built is None:
            built = module.__dict__[_BUILT] = fields, self._new_parts(module, fields, seed)
        elif built[0] != fields:
            raise ValueError(
                "This model was built for another level or for other parallel sizes. Save a checkpoint, and load it "
                "into a new one."
            )
        self._module, self.chunks = module, built[1]
        self.columns = self.guard.columns = columns.of_built_chunks(self.settings, self.chunks)
        self.guard.unit = module.__dict__.get(_UNIT)
        self.config = get_model_config(self.chunks[0])

    def _transformer_fields(self) -> dict[str, Any]:
        fields = {**self.layout.fields(), **self.settings.model}
        if "attention_backend" in fields:
            fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
        return fields

    def _new_parts(self, module: Any, fields: dict[str, Any], seed: int) -> list[nn.Module]:
        stage, last = parallel_state.get_pipeline_model_parallel_rank(), self.layout.pipeline - 1
        # As in Megatron-LM: stages have different random states, data-parallel processes have the same.
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * stage)
        virtual = self.layout.virtual_pipeline
        count = virtual or 1
        parts = []
        for index in range(count):
            first, final = stage == 0 and index == 0, stage == last and index == count - 1
            part = module.build_chunk(dict(fields), first, final, index if virtual is not None else None)
            cast_parameters(part, self.settings)
            te_layers.empty_extra_state(part)  # Transformer Engine's pickle of the histories, which is not saved
            parts.append(part)
        module.take_chunks(parts)
        return parts

    def convert(self, module: nn.Module, device: torch.device) -> None:
        """Convert the layers of a module that is no ``PipelinedModule`` and is on ``device``."""
        self.columns = self.guard.columns = columns.convert(module, self.settings, device, self.observers)
        self.is_pipelined = False
        # Megatron's DistributedDataParallel does not read the three sizes.
        self.config = TransformerConfig(
            num_layers=1, hidden_size=1, num_attention_heads=1, **self._transformer_fields()
        )  # fmt: skip
        self._module, self.chunks = module, [module]

    def wrap(self) -> None:
        """Make gradient buffers for the parts, and broadcast the weights of the first data-parallel process.

        Raises:
            ValueError: the embedding is tied to a head on another pipeline stage, at a level with FP8 gradients.
        """
        settings, parts = self.settings, self.chunks
        tied = any(getattr(part, "share_embeddings_and_output_weights", False) for part in parts)
        if settings.fp8_gradients and self.layout.pipeline > 1 and tied:
            raise ValueError(
                f"{settings.level.name} stores gradients in FP8, and an embedding that is tied to the head of another "
                "pipeline stage is summed by Megatron-core in its own formats. Untie it, or use pipeline size 1."
            )
        ddp_config = DistributedDataParallelConfig(**self.overlaps, **settings.ddp)
        self.chunks = []
        for part in parts:
            config = get_model_config(part) if self.is_pipelined else self.config
            self.chunks.append(wrap(part, config, ddp_config, settings, not self.chunks, self.observers))
        for chunk in self.chunks:
            chunk.broadcast_params()

    # The optimizer

    def attach(self, inner: Optimizer, clip_grad: float) -> None:
        """Put ``inner`` into Megatron's distributed optimizer, and give the schedules its loss scale.

        Args:
            inner: torch's Adam or AdamW of the parameters.
            clip_grad: largest L2 norm of the gradients; 0 for no clipping.
        """
        defaults = inner.defaults
        config = OptimizerConfig(
            **self.settings.optimizer,
            lr=float(defaults["lr"]),
            weight_decay=defaults["weight_decay"],
            adam_beta1=defaults["betas"][0],
            adam_beta2=defaults["betas"][1],
            adam_eps=defaults["eps"],
            clip_grad=clip_grad,
            overlap_param_gather=self.overlaps["overlap_param_gather"],
        )
        self.optimizer = Stepper(inner, config, self.settings, self.chunks, self.guard)
        masters = self._module.__dict__.pop(_MASTERS, {})
        for part in self.optimizer.parts:
            part.take_masters(masters)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self._scaled
        if self.overlaps["overlap_grad_reduce"]:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def release(self, gather: bool = True) -> None:
        """Free the buffers and the optimizer; the model keeps the weights, and the masters for another fit.

        Args:
            gather: whether weights are gathered before, a collective.
        """
        if self.optimizer is not None:
            self._module.__dict__[_MASTERS] = self.optimizer.release(gather)
            if self.is_pipelined:  # Transformer Engine's layers keep their amax histories
                self._module.__dict__[_UNIT] = self.guard.unit
            # The three functions hold the buffers, and the config stays with the model.
            self.config.no_sync_func = self.config.grad_scale_func = self.config.finalize_model_grads_func = None
        if not self.is_pipelined:
            self.columns.computation.remove()
        self.optimizer, self.chunks = None, []

    # A step

    def forward_backward(self, forward_step: ForwardStep, batches: Sequence[Any], forward_only: bool = False) -> Any:
        """Run micro-batches through the parts of the model.

        Args:
            forward_step: ``(chunk, batch) -> (output, loss_func)``, where ``loss_func(output)`` returns the loss and
                a report of any kind.
            batches: dicts of [batch, sequence] tensors, the same on all processes of a data-parallel rank.
            forward_only: whether no gradients are computed.

        Returns:
            the report of ``loss_func`` for each micro-batch; an empty list where this process has not the last stage.
        """

        def step(iterator: Any, chunk: nn.Module) -> Any:
            output, loss_func = forward_step(chunk, part_of_sequence(next(iterator)))
            is_last = getattr(unwrapped(chunk), "post_process", True)
            if not is_last and output.dtype != self.config.pipeline_dtype:
                output = output.to(self.config.pipeline_dtype)  # dtype of the next stage's receive buffer
            return output, loss_func

        rows, length = batches[0]["input_ids"].shape
        if self.layout.pipeline > 1 and any(batch["input_ids"].shape != (rows, length) for batch in batches):
            raise ValueError(
                f"The micro-batches of a step are not all [{rows}, {length}], as a pipeline's must be. Use drop_last "
                "and samples of one length."
            )
        wanted, batches = len(batches), list(batches)
        if forward_only and self.layout.virtual_pipeline is not None:
            batches *= self.layout.pipeline  # the interleaved schedule takes a multiple of the stages
        self.layout.check_micro_batches(len(batches), "This step")
        with ExitStack() as stack:
            if forward_only:
                # Megatron-core caches tensors in forward; training cannot save inference tensors for backward.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            reported = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return reported[:wanted]

    def begin(self, batches: Sequence[Any]) -> None:
        """Zero the gradients, before the micro-batches of a step.

        The first step of a run with delayed scaling also runs a pass that only fills the amax histories: Transformer
        Engine's scales begin at 1, which rounds weights to three bits and gradients to zero.
        """
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.guard.begin(len(batches))
        empty, self._may_be_empty = self._may_be_empty, False
        if not (empty and self._nobody_has_scales()):
            return
        # The gradients of the mean loss are too small for E5M2 at scales near 1; those of a token's loss are not.
        raised = 1.0 if self.settings.level.has_loss_scale else float(batches[0]["labels"].numel() * len(batches))
        scale_loss, self.config.grad_scale_func = self.config.grad_scale_func, lambda loss: scale_loss(loss) * raised
        self.forward_backward(self._module.forward_step, batches)
        self.config.grad_scale_func = scale_loss
        for chunk in self.chunks:
            te_layers.scale_by_histories(chunk, raised)
            te_layers.forget_nonfinite_amaxes(chunk)
        self.optimizer.zero_grad()

    def _scaled(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss times the loss scale that ``begin`` has chosen."""
        return loss if self.guard.loss_scale is None else loss * self.guard.loss_scale.used

    def _has_no_scales(self) -> bool:
        model = self.settings.model
        delayed = model["fp8"] is not None and model["fp8_recipe"] == "delayed"
        return delayed and all(te_layers.has_empty_histories(chunk) for chunk in self.chunks)

    def _nobody_has_scales(self) -> bool:
        """Whether ``_has_no_scales`` on all processes: a process without FP8 layers has none."""
        flag = torch.tensor(float(self._has_no_scales()), device=torch.cuda.current_device(), dtype=torch.float32)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forward passes of an evaluation: amax histories stay as they are, and without scales GEMMs are in half."""
        with ExitStack() as stack:
            if not self.is_pipelined:
                stack.enter_context(self.columns.computation.forward())
            else:
                for chunk in self.chunks:
                    stack.enter_context(te_layers.histories_kept(chunk))
                for config in map(get_model_config, self.chunks) if self._has_no_scales() else ():
                    stack.callback(setattr, config, "fp8", config.fp8)
                    config.fp8 = None
            yield

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """A backward pass of a converted model, whose gradients stay on this process until a later pass."""
        with ExitStack() as stack:
            for chunk in self.chunks if not self.is_pipelined else ():
                stack.enter_context(chunk.no_sync())
            yield

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a converted model; a schedule runs those of a ``PipelinedModule``."""
        if self._begins:
            assert self.optimizer is not None
            self._begins = False
            self.optimizer.zero_grad()
        with self.columns.computation.backward():
            self.guard.scale(loss).sum().backward(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """Reduce the gradients of a converted model; a schedule reduces those of a ``PipelinedModule``.

        Raises:
            RuntimeError: a parameter has no gradient, with ``overlap_grad_reduce``.
        """
        if self.is_pipelined:
            return
        try:
            for chunk in self.chunks:
                chunk.finish_grad_sync()
        except AssertionError as error:
            raise RuntimeError(
                "A parameter has no gradient in this step, and overlap_grad_reduce=True waits for all of a bucket. "
                "Freeze it (requires_grad=False), or use MegatronStrategy(overlap_grad_reduce=False)."
            ) from error

    def step(self) -> bool:
        """Step on the reduced gradients. Returns whether they were finite; if not, no weight has changed."""
        assert self.optimizer is not None
        self._begins = True
        return self.optimizer.step()

    def sync_weights(self) -> None:
        """Gather all weights, and wait for gathers that are on their way."""
        if self.optimizer is not None and self.overlaps["overlap_param_gather"]:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
                # Megatron-core 0.16 leaves the transposes of FP8 weights as they were.
                fp8 = [param for param in chunk.module.parameters() if is_float8tensor(param)]
                if fp8:
                    post_all_gather_processing(fp8)

    def mean_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """The mean of a step's losses over all processes, FP32 scalar on the device; a collective.

        Args:
            losses: scalar losses of this process's micro-batches (of its part of each sequence); empty on a process
                without the last pipeline stage.
        """
        mean = torch.zeros((), device=torch.cuda.current_device(), dtype=torch.float32)
        if losses:
            mean += torch.stack(list(losses)).float().mean()
        dist.all_reduce(mean)
        return mean * (self.layout.pipeline * self.layout.context / dist.get_world_size())
