"""Megatron-core's distributed optimizer around the user's own Adam or AdamW, with a level's masters and states.

What is Megatron's stays so: which part of which parameter a process steps, its gradients' way there, its checkpoints.
What is ours: the optimizer that steps, which unscales, updates states and masters and writes half weights in one pass,
with states of the level's formats; masters of another format than FP32 or none at all; FP8 gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from nemo_lowprec.grads import FoundInf
from nemo_lowprec.megatron.fp8_weights import write_fp8_weights
from nemo_lowprec.megatron.gradients import MainGradient, part_of_gradient
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.optim import StateFormats, adopt, check_adoptable
from nemo_lowprec.optim.storage import portable
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.flat_shard import mark_part_of_matrix
from nemo_lowprec.weights.saved_form import MASTER, master_of

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
    if not isinstance(optimizers[0], torch.optim.Adam):
        raise ValueError(
            f"configure_optimizers() returned {type(optimizers[0]).__name__}, and MegatronStrategy steps with torch's "
            "Adam or AdamW at every level. Use one of these, or strategy='lowprec_sharded' at a level with FP32 states "
            "such as bf16_with_fp8_mixed."
        )
    check_adoptable(optimizers[0])
    return optimizers[0]


def _forget_spent_values(chunks: Iterable[nn.Module]) -> None:
    """Have masters of FP8 weights start from the weights where an earlier optimizer has used up their initial values.

    Transformer Engine leaves methods behind that return None, and Megatron-core asks for no more than the method.
    """
    for chunk in chunks:
        for param in chunk.parameters():
            initial = getattr(param, "get_high_precision_init_val", None)
            if initial is not None and initial() is None:
                del param.get_high_precision_init_val  # type: ignore[attr-defined]


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
    """

    _settings: MegatronSettings
    observers: Observers = NOBODY

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
    ) -> None:
        self._settings = settings
        first, second = settings.level.optimizer_states
        adopt(
            inner,
            StateFormats(
                first,  # type: ignore[arg-type]
                second,  # type: ignore[arg-type]
                stochastic_rounding=settings.options.low_bit.stochastic_rounding,
                seed=settings.options.low_bit.rounding_seed,
            ),
        )
        # Its own precision-aware paths, which are Transformer Engine's FusedAdam's, stay off.
        plain = replace(
            config,
            use_precision_aware_optimizer=False,
            main_params_dtype=torch.float32,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
        )
        _forget_spent_values(model_chunks)
        scaler = ConstantGradScaler(1.0) if config.fp16 else None  # Megatron-core asks for one; ``Step`` scales
        super().__init__(
            inner, plain, scaler, None, model_chunks, buffers, group, group_gloo, group_index, 0
        )  # fmt: skip
        self._fit_masters()
        self._main_of = dict(self._pairs())
        self._versions = {param: param._version for param in self._main_of}
        self._fp8_parts: dict[Tensor, GradientTensor] = {}
        self._counted = [main for param, main in self._main_of.items() if _counts(param)]
        self._counted_elsewhere = [main for param, main in self._main_of.items() if not _counts(param)]

    # Masters

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter of the model, this process's part of it that steps)."""
        groups = zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True)
        for models, mains in (*groups, *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True)):
            yield from zip(models, mains, strict=True)

    def _fit_masters(self) -> None:
        """Have parts of half weights step, which write themselves; with the level's masters, or as their own."""
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
            # Megatron-core keeps the group that torch has copied this one from, and all FP32 masters with it.
            self.opt_group_ranges[index] |= {"orig_group": group, "orig_group_idx": group}

    def _part(self, param: Tensor) -> Any:
        """The range of the parameter's elements that this process steps."""
        return self._get_model_param_range_map(param)["param"]

    def masters(self, params: Iterable[Tensor]) -> list[Tensor]:
        """What holds the exact values of these parameters on this process: masters, or parts of the weights."""
        return [_exact(self._main_of[param]) for param in params if param in self._main_of]

    def states(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The optimizer states of the parts of these parameters."""
        return [self.optimizer.state[self._main_of[param]] for param in params if param in self._main_of]

    @torch.no_grad()
    def take_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Go on from the masters of an earlier optimizer of the same parameters, cut alike."""
        for param, main in self._main_of.items():
            earlier = masters.get(param)
            if earlier is not None and earlier.shape == main.shape and not self.is_weight(_exact(main)):
                _set(main, earlier)

    def kept_masters(self) -> dict[Tensor, Tensor]:
        """Masters that are no weights, by their parameters."""
        exact = ((param, _exact(main)) for param, main in self._main_of.items())
        return {param: main for param, main in exact if not self.is_weight(main)}

    def _copy_model_params_to_main_params(self, *args: Any, **kwargs: Any) -> None:
        super()._copy_model_params_to_main_params(*args, **kwargs)
        for main in self._main_of.values():
            master = master_of(main)
            if master is not None:
                master.copy_(main)

    @torch.no_grad()
    def take_written(self, by_value: bool = False) -> None:
        """Take weights that somebody else than a step has written over into their masters.

        Args:
            by_value: whether all values are compared, which shows writes through ``.data``, too.
        """
        for param, main in self._main_of.items():
            written = self._versions[param] != param._version
            self._versions[param] = param._version
            if is_float8tensor(param):
                if written:
                    part = self._part(param)
                    _set(main, param.dequantize().view(-1)[part.start : part.end])
            elif (master := master_of(main)) is not None and (written or by_value):
                master.copy_(torch.where(main != master.to(main.dtype), main.float(), master))

    def is_weight(self, main: Tensor) -> bool:
        """Whether ``main`` is a part of a weight, which takes its updates itself."""
        storage = main.untyped_storage().data_ptr()
        data = (buffer.param_data for buffer in self.buffers)
        return any(d is not None and d.untyped_storage().data_ptr() == storage for d in data)

    # A step: ``Stepper`` puts it together

    @torch.no_grad()
    def apply(self, divisor: Tensor, found: FoundInf) -> None:
        """Step on the gradients divided by ``divisor``, an FP32 scalar; or not at all where ``found`` says so."""
        inner: Any = self.optimizer
        inner.grad_scale, inner.found_inf = divisor, found.on_device
        try:
            inner.step()
        finally:
            del inner.grad_scale, inner.found_inf
        self.zero_grad()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the weights that the model computes with up to date, but for what other processes have stepped."""
        self._copy_main_params_to_model_params()
        self._versions = {param: param._version for param in self._main_of}

    @torch.no_grad()
    def squares(self) -> Tensor:
        """The sum of the squares of this process's gradients, as they are; infinite where one is not finite."""
        self._copy_model_grads_to_main_grads()
        total = torch.zeros((), device=torch.cuda.current_device())
        if self._counted:
            total = torch.stack(_norms(_grads(self._counted))).square().sum()
        if self._counted_elsewhere:  # which may be infinite here alone
            norms = torch.stack(_norms(_grads(self._counted_elsewhere)))
            total = torch.where(norms.isfinite().all(), total, torch.inf)
        return total

    def _copy_model_grads_to_main_grads(self) -> None:
        for model, main in self._main_of.items():
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

    def _copy_main_params_to_model_params(self) -> None:
        if self._settings.fp8_weights:
            fp8, mains, starts = self._get_fp8_params_and_shard_fp32_from_fp8()
            write_fp8_weights(fp8, mains, starts, self.data_parallel_group, self.observers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the parts' gradients; those of the buffers are the model chunks' to zero."""
        for main in self.get_parameters():
            main.grad = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What does not belong to a parameter: the groups' settings, the number of steps."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"optimizer": {"param_groups": groups, "steps": self._steps()}}

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
        if "param_state" in state_dict:
            kind = state_dict["param_state_sharding_type"]
            load = {
                "fully_reshardable": self.load_parameter_state_from_fully_reshardable,
                "dp_reshardable": self.load_parameter_state_from_dp_reshardable,
            }[kind]
            load(state_dict["param_state"])

    def _make_states(self, steps: int) -> None:
        """Give every part states, zero where it had none, after so many steps."""
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                state = self.optimizer.state[main]
                if not state:
                    self.optimizer._init_state(main, state)
                state["step"].fill_(steps)

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """As Megatron-core, which fails where a process has no part of a bucket: a small one ends before it."""
        state: dict[Any, Any] = super().get_parameter_state_dp_reshardable()
        for index in range(len(self.gbuf_ranges)):
            for buckets in state[index].values():
                for parts in buckets:
                    if not parts:  # one of no elements
                        parts.append({"gbuf_local_start": 0, "gbuf_local_end": 0, "padding": True})
        return state

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        main = self._main_of[model_param]
        if not self.optimizer.state[main]:
            self._make_states(0)
        state = self.optimizer.state[main]
        return {"param": _exact(main).detach().float(), **{k: portable(state[k]).float() for k in _STATES}}

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        main = self._main_of[model_param]
        _set(main, tensors["param"])
        for name in _STATES:
            self.optimizer.state[main][name] = self.optimizer._take(name, tensors[name].view(main.shape), main)


def _exact(main: Tensor) -> Tensor:
    """The master of a part of a half weight, or the part itself."""
    master = master_of(main)
    return main if master is None else master


def _set(main: Tensor, values: Tensor) -> None:
    """Give a part, and its master where it has one, these values."""
    for tensor in (main, master_of(main)):
        if tensor is not None:
            tensor.detach().copy_(values.view(main.shape))


def _counts(param: Tensor) -> bool:
    """Whether this process is the one among those with the same values that counts a parameter in norms."""
    is_expert = not getattr(param, "allreduce", True)
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if is_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return bool(param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tp_group=group))


def _grads(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.grad for part in parts if part.grad is not None]


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """FP32, as half ones overflow."""
    return list(torch._foreach_norm(grads, dtype=torch.float32))


def _like(main: Tensor, values: Tensor) -> Tensor:
    """``values`` with the marks that Megatron has put on ``main``."""
    values.__dict__.update({k: v for k, v in main.__dict__.items() if k not in values.__dict__})
    return values
