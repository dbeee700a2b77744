"""Megatron-core's distributed optimizer around the user's own Adam or AdamW, with a level's masters and states.

Megatron-core decides which shard of each parameter a process steps, reduces the gradients onto these shards, and lays
out the checkpoints. The user's optimizer, adopted with the level's state formats, unscales, updates states and masters
and writes half weights in one pass. A shard has an FP32 master, or none where the level has none; its gradient may be
stored in FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.engine import state_formats
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.megatron.fp8_weights import write_fp8_weights
from nemo_lowprec.megatron.gradients import MainGradient, part_of_gradient
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import adopt, check_adoptable
from nemo_lowprec.optim.storage import portable
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.marks import mark_part_of_matrix
from nemo_lowprec.weights.saved_form import MASTER, master_of

INITIAL_VALUES = "initial_values"  # attribute of a parameter: the initial values of its master, FP32, on the CPU
_STATES = ("exp_avg", "exp_avg_sq")


def check_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The only optimizer of ``optimizers``.

    Raises:
        ValueError: there are several optimizers or none, or the optimizer is neither torch's Adam nor AdamW.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"MegatronStrategy steps one optimizer, and configure_optimizers() returned {len(optimizers)}. "
            "Give one Adam or AdamW several parameter groups."
        )
    if not isinstance(optimizers[0], torch.optim.Adam):
        raise ValueError(
            f"configure_optimizers() returned {type(optimizers[0]).__name__}, and MegatronStrategy steps with torch's "
            "Adam or AdamW at every level. Use one of these, or strategy='lowprec_sharded' at a level with FP32 states "
            "such as bf16_with_fp8_mixed."
        )
    check_adoptable(optimizers[0])
    return optimizers[0]


def _forget_spent_values(chunks: Iterable[nn.Module]) -> None:
    """Delete ``get_high_precision_init_val`` from FP8 weights whose initial values an earlier optimizer has cleared.

    Transformer Engine leaves the method, which then returns None. Megatron-core calls any such method that it finds,
    and starts the master from the weight only where there is none.
    """
    for chunk in chunks:
        for param in chunk.parameters():
            initial = getattr(param, "get_high_precision_init_val", None)
            if initial is not None and initial() is None:
                del param.get_high_precision_init_val  # type: ignore[attr-defined]


class LowPrecisionDistributedOptimizer(DistributedOptimizer):
    """Steps this process's shards of the parameters with the user's optimizer, in the level's formats.

    Args:
        inner: torch's Adam or AdamW of the model's parameters; its groups hold this process's shards from now on.
        config, settings: the level's fields of Megatron-core's OptimizerConfig, and all its settings.
        chunks: parts of the model, wrapped in Megatron's DistributedDataParallel.
        of_experts: whether ``inner`` has the experts' parameters, which have buffers and process groups of their own.

    Attributes:
        main_of: the shard that this process steps, by the model's parameter: a 1-D slice of the half or FP32 weight,
            or the FP32 or FP16 master of an FP8 weight.
    """

    @torch.no_grad()
    def __init__(
        self,
        inner: Optimizer,
        config: OptimizerConfig,
        settings: MegatronSettings,
        chunks: list[Any],
        of_experts: bool = False,
    ) -> None:
        self._settings = settings
        adopt(inner, state_formats(settings.options))
        # Megatron-core's precision-aware optimizer is Transformer Engine's FusedAdam, which does not step here.
        plain = replace(
            config,
            use_precision_aware_optimizer=False,
            main_params_dtype=torch.float32,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
        )
        _forget_spent_values(chunks)
        scaler = ConstantGradScaler(1.0) if config.fp16 else None  # required; ``Step`` scales the loss
        if of_experts:
            buffers = {i: chunk.expert_parallel_buffers for i, chunk in enumerate(chunks)}
            group = parallel_state.get_expert_data_parallel_group()
            group_gloo = parallel_state.get_expert_data_parallel_group_gloo()
            index = dist.get_rank(parallel_state.get_expert_tensor_model_pipeline_parallel_group())
        else:
            buffers = {i: chunk.buffers for i, chunk in enumerate(chunks)}
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            group_gloo = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
            index = dist.get_rank(parallel_state.get_model_parallel_group())
        super().__init__(inner, plain, scaler, None, chunks, buffers, group, group_gloo, index, 0)
        self._fit_masters()
        halves = zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        others = zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True)
        self.main_of: dict[Tensor, Tensor] = {}
        for models, mains in (*halves, *others):
            self.main_of |= zip(models, mains, strict=True)
        self._versions = {param: param._version for param in self.main_of}
        self._fp8_parts: dict[Tensor, GradientTensor] = {}
        self._counted = [main for param, main in self.main_of.items() if _counts(param)]
        self._counted_elsewhere = [main for param, main in self.main_of.items() if not _counts(param)]

    # Masters

    def _fit_masters(self) -> None:
        """Put shards of the half weights into the optimizer's groups, with FP32 masters where the level has masters.

        An FP8 weight cannot take an update: its FP32 master, or FP16 at a low-bit level, is in the group.
        """
        low_bit = self._settings.level.is_low_bit
        for index, group in enumerate(self.optimizer.param_groups):
            models, mains = self.model_float16_groups[index], self.shard_fp32_from_float16_groups[index]
            weights = self.shard_float16_groups[index]
            for i, (model, main) in enumerate(zip(models, mains, strict=True)):
                start_from = model.__dict__.pop(INITIAL_VALUES, None)
                if start_from is not None:
                    part = self._part(model)
                    main.copy_(start_from.view(-1)[part.start : part.end])
                if is_float8tensor(model):
                    mains[i] = _like(main, main.half()) if low_bit else main
                else:
                    mains[i] = _like(main, weights[i])
                    if not low_bit:
                        setattr(mains[i], MASTER, main)
                model.main_param = mains[i]
                if model.dim() > 1:
                    mark_part_of_matrix(mains[i])
            group["params"] = [*self.shard_fp32_groups[index], *mains]
            # Megatron-core holds the group from which torch has copied ``group``, and with it all FP32 masters.
            self.opt_group_ranges[index] |= {"orig_group": group, "orig_group_idx": group}

    def _part(self, param: Tensor) -> Any:
        """The range of the parameter's elements that this process steps, counted in the flattened parameter."""
        return self._get_model_param_range_map(param)["param"]

    @torch.no_grad()
    def take_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Copy the ``masters()`` of an earlier optimizer, where shards are equally long."""
        for param, main in self.masters().items():
            earlier = masters.get(param)
            if earlier is not None and earlier.shape == main.shape:
                _set(self.main_of[param], earlier)

    def masters(self) -> dict[Tensor, Tensor]:
        """Master shards by parameter; a shard that is a slice of its weight has no master."""
        exact_of = {param: exact(main) for param, main in self.main_of.items()}
        return {param: main for param, main in exact_of.items() if not self.is_weight(main)}

    def _copy_model_params_to_main_params(self, *args: Any, **kwargs: Any) -> None:
        super()._copy_model_params_to_main_params(*args, **kwargs)
        for main in self.main_of.values():
            if (master := master_of(main)) is not None:
                master.copy_(main)

    @torch.no_grad()
    def take_written(self, by_value: bool = False) -> None:
        """Copy weights that the user has written since the last step into their masters.

        Args:
            by_value: whether to compare all values, which finds writes through ``param.data``, too; else the version
                counters.
        """
        for param, main in self.main_of.items():
            written = self._versions[param] != param._version
            self._versions[param] = param._version
            if is_float8tensor(param):
                if written:
                    part = self._part(param)
                    _set(main, param.dequantize().view(-1)[part.start : part.end])
            elif (master := master_of(main)) is not None and (written or by_value):
                master.copy_(torch.where(main != master.to(main.dtype), main.float(), master))

    def is_weight(self, main: Tensor) -> bool:
        """Whether ``main`` is a slice of a weight, and no master of one."""
        storage = main.untyped_storage().data_ptr()
        data = (buffer.param_data for buffer in self.buffers)
        return any(d is not None and d.untyped_storage().data_ptr() == storage for d in data)

    # A step, which ``Stepper`` puts together

    @torch.no_grad()
    def apply(self, divisor: Tensor, found: FoundInf) -> None:
        """Step on the gradients divided by ``divisor``, an FP32 scalar; change nothing where ``found`` is true."""
        with found.handed_to(self.optimizer, divisor):
            self.optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def refresh(self, observers: Observers) -> None:
        """Write FP8 weights from their masters; the shards of other processes are gathered later."""
        if self._settings.fp8_weights:
            fp8, mains, starts = self._get_fp8_params_and_shard_fp32_from_fp8()
            write_fp8_weights(fp8, mains, starts, self.data_parallel_group, observers)
        self._versions = {param: param._version for param in self.main_of}

    @torch.no_grad()
    def squares(self) -> Tensor:
        """The sum of the squares of this process's scaled gradients, FP32 scalar; infinite where one is not finite.

        A gradient that several processes hold is counted by one of them.
        """
        self._copy_model_grads_to_main_grads()
        total = torch.zeros((), device=torch.cuda.current_device(), dtype=torch.float32)
        if self._counted:
            total = _norms(self._counted).square().sum()
        if self._counted_elsewhere:  # a gradient of these may be infinite on this process only
            total = torch.where(_norms(self._counted_elsewhere).isfinite().all(), total, torch.inf)
        return total

    def _copy_model_grads_to_main_grads(self) -> None:
        for model, main in self.main_of.items():
            part, grad = self._part(model), model.main_grad  # type: ignore[attr-defined]
            if isinstance(grad, MainGradient):
                if model not in self._fp8_parts:
                    self._fp8_parts[model] = part_of_gradient(grad, part.start, part.end)
                    if grad.weight != 1:
                        self._fp8_parts[model].mul_(grad.weight)
                main.grad_dtype = torch.float32
                main.grad = self._fp8_parts[model]
            else:
                main.grad_dtype = grad.dtype
                main.grad = grad.view(-1)[part.start : part.end]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of the shards to None; the model chunks zero the gradient buffers."""
        for main in self.get_parameters():
            main.grad = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The settings of the parameter groups, and the number of steps."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        steps = next((int(state["step"]) for state in self.optimizer.state.values()), 0)
        return {"optimizer": {"param_groups": groups, "steps": steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict()``, and masters and moments where Megatron's checkpoint has added ``param_state``."""
        saved = state_dict["optimizer"]
        if len(saved["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, and this one "
                f"{len(self.optimizer.param_groups)}."
            )
        for group, theirs in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in theirs.items() if k in group})
        self._make_states(saved["steps"])
        if "param_state" in state_dict:
            form = state_dict["param_state_sharding_type"]  # ``fully_reshardable`` or ``dp_reshardable``
            getattr(self, f"load_parameter_state_from_{form}")(state_dict["param_state"])

    def _make_states(self, steps: int) -> None:
        """Give every shard a state after ``steps`` steps, with zero moments where the shard had no state."""
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                state = self.optimizer.state[main]
                if not state:
                    self.optimizer._init_state(main, state, self.optimizer.moments(group))
                state["step"].fill_(steps)

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """Megatron-core's state by buckets, with an empty entry for a bucket of which this process has no shard.

        A bucket of few elements has no shard for the last processes, and Megatron-core fails there.
        """
        state: dict[Any, Any] = super().get_parameter_state_dp_reshardable()
        for index in range(len(self.gbuf_ranges)):
            for buckets in state[index].values():
                for parts in buckets:
                    if not parts:
                        parts.append({"gbuf_local_start": 0, "gbuf_local_end": 0, "padding": True})
        return state

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        main = self.main_of[model_param]
        if not self.optimizer.state[main]:
            self._make_states(0)
        state = self.optimizer.state[main]
        return {"param": exact(main).detach().float(), **{k: portable(state[k]).float() for k in _STATES}}

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        main = self.main_of[model_param]
        _set(main, tensors["param"])
        for name in _STATES:
            self.optimizer.state[main][name] = self.optimizer._take(name, tensors[name].view(main.shape), main)


def exact(main: Tensor) -> Tensor:
    """The FP32 master of a shard of a half weight; the shard itself where it has no master."""
    master = master_of(main)
    return main if master is None else master


def _set(main: Tensor, values: Tensor) -> None:
    """Copy ``values`` into a shard, and into the shard's master."""
    for tensor in (main, master_of(main)):
        if tensor is not None:
            tensor.detach().copy_(values.view(main.shape))


def _counts(param: Tensor) -> bool:
    """Whether this process counts the parameter in norms: one of the processes that hold the same values does."""
    of_all, of_experts = (parallel_state.get_tensor_model_parallel_group,
                          parallel_state.get_expert_tensor_parallel_group)  # fmt: skip
    group = of_all() if getattr(param, "allreduce", True) else of_experts()
    return bool(param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tp_group=group))


def _norms(shards: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each shard's gradient, FP32 [shards]: norms of FP16 gradients overflow FP16."""
    grads = [shard.grad for shard in shards if shard.grad is not None]
    return torch.stack(list(torch._foreach_norm(grads, dtype=torch.float32)))


def _like(main: Tensor, values: Tensor) -> Tensor:
    """``values`` with the attributes that Megatron-core has set on ``main``."""
    values.__dict__.update({k: v for k, v in main.__dict__.items() if k not in values.__dict__})
    return values
