"""Megatron-core's distributed optimizer around the user's own Adam or AdamW, with a level's masters and states.

What is Megatron's stays so: which part of which parameter a process steps, its gradients' way there, the gathering of
the weights, its checkpoints. What is ours: the optimizer that steps (torch's fused one, or this package's with low-bit
states), masters of another format than FP32 or none at all, FP8 gradients; and that unscaling, clipping and the search
for gradients that are not finite are one pass, whose result the step's kernels read on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.comm.agree import bookkeeping
from nemo_lowprec.formats import GradientTensor
from nemo_lowprec.formats.flat import mark_part_of_matrix
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.megatron.gradients import part_of_gradient
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.optim import LowBitStates, StateFormats, adopt, check_adoptable
from nemo_lowprec.optim.storage import portable

__all__ = ["INITIAL_VALUES", "LowPrecisionDistributedOptimizer", "check_optimizer", "distribute"]

INITIAL_VALUES = "initial_values"  # on a parameter: FP32 values that its master starts from, on the CPU
_STATES = ("exp_avg", "exp_avg_sq")


def check_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The one optimizer, which must be torch's Adam or AdamW.

    Raises:
        ValueError: several, none, or another kind.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"MegatronStrategy steps one optimizer, and configure_optimizers() returned {len(optimizers)}. "
            "Give one Adam or AdamW several parameter groups."
        )
    check_adoptable(optimizers[0])
    return optimizers[0]


class LowPrecisionDistributedOptimizer(DistributedOptimizer):
    """See the module.

    Args:
        inner: torch's Adam or AdamW of the model's parameters; holds this process's parts of them from now on.
        config: of Megatron-core, with the level's fields.
        settings: of the level.
        model_chunks: wrapped in Megatron's DistributedDataParallel.
        buffers: of the chunks, by their index.
        group: data-parallel (and context-parallel) processes.
        group_gloo: the same on gloo, for checkpoints.
        group_index: this process's place among the model-parallel ones.
        stats_group: all processes that hold parts of the model.

    Attributes:
        grad_norm: of the last step's gradients, before clipping: FP32 scalar on the device, or None.
        skipped: optimizers whose last step was skipped for gradients that are not finite.
    """

    _settings: MegatronSettings

    @torch.no_grad()
    def __init__(
        self,
        inner: Optimizer,
        config: OptimizerConfig,
        settings: MegatronSettings,
        model_chunks: list[Any],
        buffers: dict[int, list[Any]],
        group: dist.ProcessGroup,
        group_gloo: dist.ProcessGroup | None,
        group_index: int,
        stats_group: dist.ProcessGroup,
    ) -> None:
        self._settings = settings
        if settings.level.is_low_bit:
            first, second = settings.level.optimizer_states
            adopt(
                inner,
                StateFormats(
                    first,  # type: ignore[arg-type]
                    second,  # type: ignore[arg-type]
                    stochastic_rounding=settings.stochastic_rounding,
                    seed=settings.rounding_seed,
                ),
            )
        for index, param_group in enumerate(inner.param_groups):
            # Megatron tells the groups of a checkpoint apart by these.
            param_group.setdefault("wd_mult", float(index))
            param_group.setdefault("lr_mult", 1.0)
            param_group.setdefault("is_expert_parallel", False)
            param_group.setdefault("is_decoupled_lr", False)
        # Its own precision-aware paths, which are Transformer Engine's FusedAdam's, stay off.
        plain = replace(
            config,
            use_precision_aware_optimizer=False,
            main_params_dtype=torch.float32,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
        )
        super().__init__(
            inner, plain, _scaler(config), None, model_chunks, buffers, group, group_gloo, group_index, 0
        )  # fmt: skip
        self.grad_stats_parallel_group = stats_group
        self.skipped: set[Optimizer] = set()
        self.grad_norm: Tensor | None = None
        self._fit_masters()
        self._main_of = dict(self._pairs())
        self._fp8_parts: dict[Tensor, GradientTensor] = {}
        counts = {main: _counts(main) for main in self._main_of.values()}
        self._counted = [main for main, here in counts.items() if here]
        self._counted_elsewhere = [main for main, here in counts.items() if not here]

    # Masters

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter of the model, this process's part of it that steps)."""
        groups = zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        for models, mains in (*groups, *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True)):
            yield from zip(models, mains, strict=True)

    def _fit_masters(self) -> None:
        """Give masters the level's format, or let weights take their updates themselves."""
        low_bit = self._settings.level.is_low_bit
        for index, group in enumerate(self.optimizer.param_groups):
            models, mains = self.model_float16_groups[index], self.shard_fp32_from_float16_groups[index]
            weights = self.shard_float16_groups[index]
            for i, (model, main) in enumerate(zip(models, mains, strict=True)):
                start_from = model.__dict__.pop(INITIAL_VALUES, None)
                if start_from is not None:
                    part = self._part(model)
                    main.copy_(start_from.view(-1)[part.start : part.end])
                if low_bit:
                    stored_fp8 = self._is_quantized(model)
                    mains[i] = _like(main, main.half()) if stored_fp8 else _like(main, weights[i])
                    model.main_param = mains[i]
                if model.dim() > 1:
                    mark_part_of_matrix(mains[i])
            group["params"] = [*self.shard_fp32_groups[index], *mains]

    def _is_quantized(self, param: Tensor) -> bool:
        from megatron.core.fp8_utils import is_float8tensor

        return bool(is_float8tensor(param))

    def _part(self, param: Tensor) -> Any:
        """The range of the parameter's elements that this process steps."""
        return self._get_model_param_range_map(param)["param"]

    def masters(self, params: Iterable[Tensor]) -> list[Tensor]:
        """What steps of these parameters on this process: masters, or parts of the weights themselves."""
        return [self._main_of[param] for param in params if param in self._main_of]

    @torch.no_grad()
    def take_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Go on from the masters of an earlier optimizer of the same parameters, cut alike."""
        for param, main in self._main_of.items():
            earlier = masters.get(param)
            if earlier is not None and earlier.shape == main.shape and not self.is_weight(main):
                main.copy_(earlier)

    def release(self, gather: bool = True) -> dict[Tensor, Tensor]:
        """Let go of the buffers: parameters get memory of their own.

        Args:
            gather: whether weights are brought up to date before, which takes all processes.

        Returns:
            the masters, by their parameters.
        """
        masters = {param: main for param, main in self._main_of.items() if not self.is_weight(main)}
        for chunk in self.model_chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=gather)
            for param in chunk.module.parameters():
                if hasattr(param, "main_grad"):
                    del param.main_grad
                if not self._is_quantized(param):
                    param.data = param.data.clone()
        return masters

    def is_weight(self, main: Tensor) -> bool:
        """Whether ``main`` is a part of a weight, which takes its updates itself."""
        storage = main.untyped_storage().data_ptr()
        buffers = (b.param_data for chunk in self.model_chunks for b in chunk.buffers)
        return any(data is not None and data.untyped_storage().data_ptr() == storage for data in buffers)

    # A step

    @torch.no_grad()
    def step(self) -> tuple[bool, Tensor | None, None]:
        """Unscale, clip, step and refresh the weights; on this device, without waiting for it before the end.

        Skipped on all processes where a gradient is not finite on any.

        Returns:
            whether it stepped, the norm of the gradients, and None (Megatron's number of zeros).
        """
        self._copy_model_grads_to_main_grads()
        scale = self.get_loss_scale().float().reshape(())
        norm = self._norm() / scale
        overflow = (~norm.isfinite()).float()
        found = FoundInf(overflow)
        self.grad_norm = norm
        divisor = scale
        if self.config.clip_grad > 0:
            divisor = scale * ((norm + 1e-6) / self.config.clip_grad).clamp(min=1.0)
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.grad_scale, self.optimizer.found_inf = divisor, overflow
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf
        elif not found:
            torch._foreach_div_(_grads(self.get_parameters()), divisor)
            self.optimizer.step()
        self.zero_grad()
        self.step_refresh()
        skipped = bool(found)
        if self.grad_scaler is not None:
            self.grad_scaler.update(skipped)
        (self.skipped.add if skipped else self.skipped.discard)(self.optimizer)
        return not skipped, norm, None

    @torch.no_grad()
    def step_refresh(self) -> None:
        """Bring the weights that the model computes with up to date."""
        self._copy_main_params_to_model_params()
        if not self.ddp_config.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync()

    def _norm(self) -> Tensor:
        """The Euclidean norm of all processes' gradients as they are, scaled."""
        squares = torch.zeros((), device=torch.cuda.current_device())
        if self._counted:
            squares = torch.stack(torch._foreach_norm(_grads(self._counted))).float().square().sum()
        if self._counted_elsewhere:  # which may be infinite here alone
            norms = torch.stack(torch._foreach_norm(_grads(self._counted_elsewhere)))
            squares = torch.where(norms.isfinite().all(), squares, torch.inf)
        with bookkeeping():
            dist.all_reduce(squares, group=self.get_grad_stats_parallel_group())
        return squares.sqrt()

    def _copy_model_grads_to_main_grads(self) -> None:
        for model, main in self._main_of.items():
            part, grad = self._part(model), model.main_grad  # type: ignore[attr-defined]
            if isinstance(grad, GradientTensor):
                if model not in self._fp8_parts:
                    self._fp8_parts[model] = part_of_gradient(grad, part.start, part.end)
                    main.grad_dtype = torch.float32
                main.grad = self._fp8_parts[model]
            else:
                main.grad = grad.view(-1)[part.start : part.end].float()

    def _copy_main_params_to_model_params(self) -> None:
        if not self._settings.level.is_low_bit:
            super()._copy_main_params_to_model_params()
        elif self._settings.fp8_weights:
            from megatron.core.fp8_utils import quantize_param_shard

            fp8, mains, starts = self._get_fp8_params_and_shard_fp32_from_fp8()
            quantize_param_shard(fp8, mains, starts, self.data_parallel_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the parts' gradients; those of the buffers are the model chunks' to zero."""
        for main in self.get_parameters():
            main.grad = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What does not belong to a parameter: the groups' settings, the number of steps, the loss scale."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups, "steps": self._steps()}}
        if self.grad_scaler is not None:
            state["grad_scaler"] = {k: _on_cpu(v) for k, v in self.grad_scaler.state_dict().items()}
        return state

    def _steps(self) -> int:
        for state in self.optimizer.state.values():
            return int(state["step"])
        return 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over; that of parameters where ``state_dict`` holds it as Megatron's checkpoints do."""
        saved = state_dict["optimizer"]
        if len(saved["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, and this one "
                f"{len(self.optimizer.param_groups)}."
            )
        for group, theirs in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in theirs.items() if k in group})
        self._make_states(saved["steps"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(
                {k: v.cuda() if isinstance(v, Tensor) else v for k, v in state_dict["grad_scaler"].items()}
            )
        if "param_state" in state_dict:
            kind = state_dict["param_state_sharding_type"]
            load = {
                "fully_reshardable": self.load_parameter_state_from_fully_reshardable,
                "dp_reshardable": self.load_parameter_state_from_dp_reshardable,
            }[kind]
            load(state_dict["param_state"])

    def _make_states(self, steps: int) -> None:
        """Give every part states, zero where it had none, after so many steps."""
        inner = self.optimizer
        for group in inner.param_groups:
            for main in group["params"]:
                state = inner.state[main]
                if not state and isinstance(inner, LowBitStates):
                    inner._init_state(main, state)
                elif not state:
                    for name in _STATES:
                        state[name] = torch.zeros_like(main, dtype=torch.float32)
                    fused = group.get("fused") or group.get("capturable")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=main.device if fused else "cpu")
                state["step"].fill_(steps)

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        main = self._main_of[model_param]
        if not self.optimizer.state[main]:
            self._make_states(0)
        state = self.optimizer.state[main]
        return {"param": main.detach().float(), **{k: portable(state[k]).float() for k in _STATES}}

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        main = self._main_of[model_param]
        state = self.optimizer.state[main]
        main.detach().copy_(tensors["param"])
        for name in _STATES:
            if isinstance(self.optimizer, LowBitStates):
                state[name] = self.optimizer._take(name, tensors[name].view(main.shape), main)
            else:
                state[name].copy_(tensors[name].view(main.shape))


def _scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    if not config.fp16:
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )


def _counts(part: Tensor) -> bool:
    """Whether this process is the one that counts this part in norms."""
    return bool(param_is_not_shared(part)) and bool(param_is_not_tensor_parallel_duplicate(part))


def _grads(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.grad for part in parts if part.grad is not None]


def _like(main: Tensor, values: Tensor) -> Tensor:
    """``values`` with the marks that Megatron has put on ``main``."""
    values.__dict__.update({k: v for k, v in main.__dict__.items() if k not in values.__dict__})
    return values


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def distribute(
    inner: Optimizer, config: OptimizerConfig, settings: MegatronSettings, chunks: list[Any]
) -> LowPrecisionDistributedOptimizer:
    """The optimizer of this process's chunks, each wrapped in Megatron's DistributedDataParallel.

    Raises:
        ValueError: parameters of experts, which Megatron-core spreads over other processes than the rest.
    """
    from megatron.core import parallel_state

    if any(chunk.expert_parallel_buffers for chunk in chunks):
        raise ValueError(
            "This model has experts that are spread over processes, which MegatronStrategy's optimizer does not step. "
            "Use expert_model_parallel_size=1."
        )
    with_context = {"with_context_parallel": True}
    return LowPrecisionDistributedOptimizer(
        inner, config, settings, chunks, {i: chunk.buffers for i, chunk in enumerate(chunks)},
        parallel_state.get_data_parallel_group(**with_context),
        parallel_state.get_data_parallel_group_gloo(**with_context),
        dist.get_rank(parallel_state.get_model_parallel_group()),
        dist.group.WORLD,  # type: ignore[arg-type]
    )  # fmt: skip
