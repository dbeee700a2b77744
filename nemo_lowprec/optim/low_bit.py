"""The base of optimizers with low-bit states: their step, and the storage of their states.

Source: FP8-LM, arXiv:2310.18313, section 2.2 (formats).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.optim.fused import FusedStep
from nemo_lowprec.optim.reference import Rule, StepInputs, Update, read, step_by_reference
from nemo_lowprec.optim.storage import MOMENTS, StateFormats, portable, store, zeros
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_shard

ORIGINAL = "_lowprec_class"  # on an adopted optimizer: the class that it had
ORIGINAL_FORMATS = "_lowprec_formats"  # and the formats, if it is of this package
_MASTER = "master_weight"


class LowBitStates(Optimizer):
    """Base of all of them, which comes before torch's class among the bases. A subclass has a ``rule``.

    State of a parameter: ``step`` (FP32 scalar), the moments of the rule and, where asked for, ``master_weight``, all
    of the parameter's shape; states in blocks are ``BlockScaledTensor``s, which read as FP32.
    """

    formats: StateFormats
    _gradient_release = False

    def rule(self, group: dict[str, Any]) -> Rule:
        """The rule of the reference by which parameters of ``group`` step."""
        raise NotImplementedError

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that a parameter of ``group`` has beside ``step``, in the order of ``Update``."""
        raise NotImplementedError

    def stored_as(self, name: str) -> str:
        """The name by which ``storage`` chooses the form of the state ``name``."""
        return name

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For GradScaler, which then hands its scale and found_inf over, without a host sync."""
        if self._gradient_release:
            raise ValueError("gradient_release=True has stepped on the scaled gradients: GradScaler comes too late.")
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supported: bool) -> None:
        """torch's constructor assigns this with ``fused=True``; the value is always True here."""

    def _setup(self, formats: StateFormats, gradient_release: bool = False) -> None:
        self.formats = formats
        self._gradient_release = gradient_release
        self._fused = FusedStep()
        # Neither table keeps a parameter alive. (group, position) by a parameter's id, checked before use:
        self._places: dict[int, tuple[int, int]] = {}
        # By a master in ``state``: the version of its weight after the last step.
        self._written: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()
        for group in self.param_groups:
            self.check_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's constructor adds the first groups before their settings are complete: ``_setup`` checks them again.
        _check_settings(param_group)
        super().add_param_group(param_group)
        self.check_group(self.param_groups[-1])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError where a group's settings or parameters have no low-bit form."""
        _check_settings(group)
        for param in group["params"]:
            if param.is_complex():
                raise ValueError(
                    f"A parameter of shape {tuple(param.shape)} is complex; low-bit {type(self).__name__} takes real "
                    "floating-point ones. Give complex parameters an optimizer of their own."
                )

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
        update = self._update(param, group, sum(len(g["params"]) for g in before) + place[1])
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
        formats = self.formats
        return StepInputs(group, grad_scale, found_inf, formats.seed, formats.stochastic_rounding, self.rule(group))

    def _apply(self, updates: list[Update], inputs: StepInputs) -> None:
        """One pass over all parameters of ``updates``."""
        if updates[0].param.is_cuda and block_kernels() is not None:
            self._fused.step(updates, inputs)
        else:
            step_by_reference(updates, inputs)

    def _step_all(self, updates: list[Update], inputs: StepInputs) -> None:
        """The step of parameters of one group."""
        self._apply(updates, inputs)

    def _step(self, updates: list[Update], inputs: StepInputs) -> None:
        self._step_all(updates, inputs)
        for update in updates if self.formats.master_weight is not None else ():
            if self._keeps_master(update.param):
                assert update.master is not None
                self._written[update.master] = _version(update.param)

    def _updates(self) -> Iterator[tuple[dict[str, Any], list[Update]]]:
        """The parameters that step, by group."""
        index = 0
        for group in self.param_groups:
            updates = [self._update(param, group, index + i) for i, param in enumerate(group["params"])]
            index += len(updates)
            stepping = [update for update in updates if update is not None]
            if stepping:
                yield group, stepping

    def _update(self, param: Tensor, group: dict[str, Any], index: int) -> Update | None:
        """The inputs of a parameter's step; None without a gradient. Missing states are made."""
        grad = param.grad
        if grad is None:
            return None
        if not isinstance(grad, QuantizedTensor) and grad.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes dense gradients: build the embedding with sparse=False.")
        state, names = self.state[param], self.moments(group)
        self._init_state(param, state, names)
        if self._keeps_master(param):
            self._renew_master(param, state)
        master = _master(param, state)
        first, second = (state[names[i]] if i < len(names) else None for i in range(2))
        whole = param if is_sharded(param) else None
        if whole is not None:
            index += _stream_of_rank(param)
            param, grad, first, second = map(local_shard, (param, grad, first, second))
        # All processes orthogonalize a matrix together, also a process that has no rows of the matrix.
        if not param.numel() and (whole is None or self.rule(group) != "momentum"):
            return None
        return Update(param, grad, state["step"], first, second, master, index, whole=whole)

    def _init_state(self, param: Tensor, state: dict[str, Any], names: tuple[str, ...]) -> None:
        """Make the states of ``names`` that ``state`` does not have, of zeros, and start to count."""
        if "step" in state and all(map(state.__contains__, names)):
            return
        state["step"] = _scalar(0.0, param)
        for name in names:
            made = zeros(local_shard(param), self.stored_as(name), self.formats.of(name, param))
            state[name] = as_dtensor_like(made, param)

    def _renew_master(self, param: Tensor, state: dict[str, Any]) -> None:
        """Make the master from the weight where there is none, or where others than this optimizer wrote the weight."""
        version = _version(local_shard(param))
        if _MASTER not in state or self._written.get(state[_MASTER], version) != version:
            state[_MASTER] = store(read(param.detach()), _MASTER, self.formats.of(_MASTER, param))

    def _keeps_master(self, param: Tensor) -> bool:
        if self.formats.master_weight is None:
            return False
        return param.dtype in (torch.float16, torch.bfloat16) and not hasattr(param, _MASTER)

    # State

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with plain tensors of exactly the states' values, which torch's optimizers load, too."""
        saved = super().state_dict()
        state = {
            key: {k: portable(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            for key, values in saved["state"].items()
        }
        return {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of the same kind of optimizer, in any formats, into the formats of this one.

        Raises:
            ValueError: the states were saved by an optimizer of another kind, or with ``amsgrad``.
        """
        # torch casts tensors to the parameter's dtype; it leaves wrapped tensors alone, and __setstate__ unwraps them.
        state = {
            key: {k: _Kept(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            for key, values in state_dict["state"].items()
        }
        self._check_saved(state_dict)
        amsgrad = [g for g in state_dict["param_groups"] if g.get("amsgrad")]
        if amsgrad:
            raise ValueError("These states were saved by an optimizer with amsgrad=True, which has no low-bit form.")
        super().load_state_dict({**state_dict, "state": state})

    def _check_saved(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError where another optimizer saved the states of a parameter."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            names = set(self.moments(group))
            for key in saved["params"]:
                values = state_dict["state"].get(key, {})
                found = {name for name, value in values.items() if value is not None} - {"step", _MASTER}
                if found and not names <= found:
                    raise ValueError(
                        f"{type(self).__name__} needs the states {', '.join(sorted(names))}, and the checkpoint holds "
                        f"{', '.join(sorted(found))}: they were saved by another optimizer. Load the weights alone, or "
                        "train on with the optimizer of the checkpoint."
                    )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for param, values in state.get("state", {}).items():
            if not any(isinstance(v, _Kept) for v in values.values()):
                continue
            if not self._keeps_master(param):
                values.pop(_MASTER, None)  # an FP32 parameter needs none; a level's master is in the model's checkpoint
            for name, kept in list(values.items()):
                if isinstance(kept, _Kept):
                    values[name] = self._take(name, kept.value, param)
            count_unless_counted(param, values)
        super().__setstate__(state)
        self._written = WeakIdKeyDictionary()  # the masters are new

    def _take(self, name: str, value: Tensor, param: Tensor) -> Tensor:
        if name == "step":
            return _scalar(float(value), param)
        if name in MOMENTS:
            mine = local_shard(value).to(param.device)
            return as_dtensor_like(store(mine, self.stored_as(name), self.formats.of(name, param)), param)
        if name == _MASTER:
            return store(value.to(param.device), _MASTER, self.formats.of(_MASTER, param))
        return value.to(param.device)

    def __getstate__(self) -> dict[str, Any]:
        adopted = {name: self.__dict__[name] for name in (ORIGINAL, ORIGINAL_FORMATS) if name in self.__dict__}
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


def count_unless_counted(param: Tensor, state: dict[str, Any]) -> None:
    """Make the ``step`` of a state that torch's SGD or Muon has made: it is no state of a first step any more."""
    for name in [name for name, value in state.items() if value is None]:  # SGD's without momentum
        del state[name]
    if state:
        state.setdefault("step", _scalar(1.0, param))


def _check_settings(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ValueError("amsgrad=True keeps a third state, which has no low-bit form here. Use amsgrad=False.")
    if group.get("differentiable"):
        raise ValueError("differentiable=True needs states that autograd can follow. Use torch's optimizer.")
