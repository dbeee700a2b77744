"""Adam and AdamW with low-bit states: subclasses of torch's with another step and other storage of states.

Sources: FP8-LM, arXiv:2310.18313, section 2.2 (formats); torch.optim.Adam (the update and the arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.optim.fused import FusedStep
from nemo_lowprec.optim.reference import StepInputs, Update, read, step_by_reference
from nemo_lowprec.optim.storage import StateFormat, StateFormats, portable, store, zeros
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_shard

ORIGINAL = "_lowprec_class"  # on an adopted optimizer: the class that it had
_STATES = ("exp_avg", "exp_avg_sq")
_MASTER = "master_weight"


class LowBitStates(Optimizer):
    """Base of Adam and AdamW, which comes before torch's class among the bases.

    State of a parameter: ``step`` (FP32 scalar), ``exp_avg``, ``exp_avg_sq`` and, where asked for,
    ``master_weight``, all of the parameter's shape; states in blocks are ``BlockScaledTensor``s, which read as FP32.
    """

    formats: StateFormats
    _gradient_release = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For GradScaler, which then hands its scale and found_inf over, without a host sync."""
        if self._gradient_release:
            raise ValueError("gradient_release=True has stepped on the scaled gradients: GradScaler comes too late.")
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supported: bool) -> None:
        """torch's constructor assigns this with ``fused=True``; the value is always True here."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        exp_avg_dtype: StateFormat = "fp8",
        exp_avg_sq_dtype: StateFormat = "fp16",
        master_weight_dtype: Literal["fp16", "fp32"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        formats = StateFormats(exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, stochastic_rounding, seed)
        super().__init__(params, lr, **options)  # type: ignore[arg-type]
        self._setup(formats)

    def _setup(self, formats: StateFormats, gradient_release: bool = False) -> None:
        self.formats = formats
        self._gradient_release = gradient_release
        self._fused = FusedStep()
        # Neither table keeps a parameter alive. (group, position) by a parameter's id, checked before use:
        self._places: dict[int, tuple[int, int]] = {}
        # By a master in ``state``: the version of its weight after the last step.
        self._written: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()
        for group in self.param_groups:
            _check_group(group)
            _check_params(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's constructor adds the first groups before their settings are complete: ``_setup`` checks them again.
        _check_group(param_group)
        super().add_param_group(param_group)
        _check_params(self.param_groups[-1])

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. On CUDA a few launches for all parameters of a group, without waiting for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, updates in list(self._updates()):  # all parameters are checked before the first one steps
            self._step(updates, self._inputs(group, grad_scale, found_inf))
        return loss

    @torch.no_grad()
    def step_param(self, param: Tensor) -> bool:
        """The step of one parameter, for gradient release. Returns whether this optimizer has the parameter."""
        place = self._place(param)
        if place is None:
            return False
        group, before = self.param_groups[place[0]], self.param_groups[: place[0]]
        update = self._update(param, sum(len(g["params"]) for g in before) + place[1])
        if update is not None:
            self._step([update], self._inputs(group))
        return True

    def _place(self, param: Tensor) -> tuple[int, int] | None:
        """(group, position in the group) of a parameter; None for one of another optimizer."""
        found = self._places.get(id(param))
        if found is None or self._param_at(*found) is not param:
            groups = enumerate(self.param_groups)
            self._places = {id(p): (g, i) for g, group in groups for i, p in enumerate(group["params"])}
        return self._places.get(id(param))

    def _param_at(self, group: int, position: int) -> Tensor | None:
        members = self.param_groups[group]["params"] if group < len(self.param_groups) else []
        return members[position] if position < len(members) else None

    def _inputs(
        self, group: dict[str, Any], grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> StepInputs:
        return StepInputs(group, grad_scale, found_inf, self.formats.seed, self.formats.stochastic_rounding)

    def _step(self, updates: list[Update], inputs: StepInputs) -> None:
        if updates[0].param.is_cuda and block_kernels() is not None:
            self._fused.step(updates, inputs)
        else:
            step_by_reference(updates, inputs)
        for update in updates if self.formats.master_weight is not None else ():
            if self._keeps_master(update.param):
                assert update.master is not None
                self._written[update.master] = _version(update.param)

    def _updates(self) -> Iterator[tuple[dict[str, Any], list[Update]]]:
        """The parameters that step, by group."""
        index = 0
        for group in self.param_groups:
            updates = [self._update(param, index + i) for i, param in enumerate(group["params"])]
            index += len(updates)
            stepping = [update for update in updates if update is not None]
            if stepping:
                yield group, stepping

    def _update(self, param: Tensor, index: int) -> Update | None:
        """The inputs of a parameter's step; None without a gradient. Missing states are made."""
        grad = param.grad
        if grad is None:
            return None
        if not isinstance(grad, QuantizedTensor) and grad.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes dense gradients: build the embedding with sparse=False.")
        state = self.state[param]
        if not state:
            self._init_state(param, state)
        if self._keeps_master(param):
            self._renew_master(param, state)
        master, exp_avg, exp_avg_sq = _master(param, state), state["exp_avg"], state["exp_avg_sq"]
        if is_sharded(param):
            index += _stream_of_rank(param)
            param, grad, exp_avg, exp_avg_sq = map(local_shard, (param, grad, exp_avg, exp_avg_sq))
        if not param.numel():
            return None
        return Update(param, grad, state["step"], exp_avg, exp_avg_sq, master, index)

    def _init_state(self, param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = _scalar(0.0, param)
        for name in _STATES:
            state[name] = as_dtensor_like(zeros(local_shard(param), self.formats.of(name, param)), param)

    def _renew_master(self, param: Tensor, state: dict[str, Any]) -> None:
        """Make the master from the weight where there is none, or where others than this optimizer wrote the weight."""
        version = _version(local_shard(param))
        if _MASTER not in state or self._written.get(state[_MASTER], version) != version:
            state[_MASTER] = store(read(param.detach()), self.formats.of(_MASTER, param))

    def _keeps_master(self, param: Tensor) -> bool:
        if self.formats.master_weight is None:
            return False
        return param.dtype in (torch.float16, torch.bfloat16) and not hasattr(param, _MASTER)

    # State

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with plain tensors of exactly the states' values; any Adam loads it."""
        saved = super().state_dict()
        state = {
            key: {k: portable(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            for key, values in saved["state"].items()
        }
        return {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of any Adam, in any formats, into the formats of this optimizer."""
        # torch casts tensors to the parameter's dtype; it leaves wrapped tensors alone, and __setstate__ unwraps them.
        state = {
            key: {k: _Kept(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            for key, values in state_dict["state"].items()
        }
        amsgrad = [g for g in state_dict["param_groups"] if g.get("amsgrad")]
        if amsgrad:
            raise ValueError("These states were saved by an optimizer with amsgrad=True, which has no low-bit form.")
        super().load_state_dict({**state_dict, "state": state})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for param, values in state.get("state", {}).items():
            if not any(isinstance(v, _Kept) for v in values.values()):
                continue
            if not self._keeps_master(param):
                values.pop(_MASTER, None)  # an FP32 parameter needs none; a level's master is in the model's checkpoint
            for name, kept in list(values.items()):
                if isinstance(kept, _Kept):
                    values[name] = self._take(name, kept.value, param)
        super().__setstate__(state)
        self._written = WeakIdKeyDictionary()  # the masters are new

    def _take(self, name: str, value: Tensor, param: Tensor) -> Tensor:
        if name == "step":
            return _scalar(float(value), param)
        if name in _STATES:
            mine = local_shard(value).to(param.device)
            return as_dtensor_like(store(mine, self.formats.of(name, param), positive=name == "exp_avg_sq"), param)
        if name == _MASTER:
            return store(value.to(param.device), self.formats.of(_MASTER, param))
        return value.to(param.device)

    def __getstate__(self) -> dict[str, Any]:
        adopted = {ORIGINAL: self.__dict__[ORIGINAL]} if ORIGINAL in self.__dict__ else {}
        return {**super().__getstate__(), "formats": self.formats, "_fused": FusedStep(), "_places": {}, **adopted}


class _Kept:
    """Wraps a tensor so that torch's load_state_dict does not cast it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _stream_of_rank(param: Any) -> int:
    """An offset to the index of a shard's random stream, so that shards of different processes differ."""
    rank: int = param.device_mesh.get_local_rank(param.device_mesh.ndim - 1)
    return 2**20 * rank


def _scalar(value: float, param: Tensor) -> Tensor:
    # As in torch's Adam: on the device only where a kernel counts the steps.
    fused = param.is_cuda and block_kernels() is not None
    return torch.full((), value, dtype=torch.float32, device=param.device if fused else "cpu")


def _master(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    # Levels with masters keep them as attributes of the parameters; checkpoints of the model hold these.
    master: Tensor | None = getattr(param, _MASTER, None)
    return state.get(_MASTER) if master is None else master


def _version(param: Tensor) -> tuple[int, int]:
    """A value that changes when somebody writes ``param`` or gives it other data."""
    return param._version, param.data_ptr()


def _check_group(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ValueError("amsgrad=True keeps a third state, which has no low-bit form here. Use amsgrad=False.")
    if group.get("differentiable"):
        raise ValueError("differentiable=True needs states that autograd can follow. Use torch's optimizer.")


def _check_params(group: dict[str, Any]) -> None:
    for param in group["params"]:
        if param.is_complex():
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} is complex; low-bit Adam takes real floating-point ones. "
                "Give complex parameters an optimizer of their own."
            )


class Adam(LowBitStates, torch.optim.Adam):  # type: ignore[override]
    """``torch.optim.Adam`` with states in the formats asked for.

    Args:
        params: parameters or groups, as torch takes them.
        exp_avg_dtype, exp_avg_sq_dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp8``; the last two are stored in blocks of
            128 elements of a row with power-of-two scales. Parameters of fewer than two dimensions keep FP32 states.
        master_weight_dtype: master weights of parameters below FP32: ``fp32``, ``fp16`` (in blocks) or None.
        stochastic_rounding: round the updated weight (or FP16 master) stochastically.
        seed: of stochastic rounding. A moment whose 1 - beta is less than half a step of its format is always rounded
            stochastically, since it would never decay otherwise (BF16 at 0.999, FP8 at 0.95).
        options: torch's arguments. ``amsgrad`` and ``differentiable`` are refused; ``foreach``, ``fused`` and
            ``capturable`` choose among torch's implementations and change nothing here: on CUDA the step is one
            fused pass that a CUDA graph can capture.

    Gradients may be FP32, BF16, FP16 or ``GradientTensor``.

    Raises:
        ValueError: a format that does not exist, amsgrad, differentiable, or a complex parameter.
        RuntimeError: at ``step``, a sparse gradient.
    """


class AdamW(LowBitStates, torch.optim.AdamW):  # type: ignore[override]
    """``torch.optim.AdamW`` with states in the formats asked for; arguments are those of ``Adam`` here."""
