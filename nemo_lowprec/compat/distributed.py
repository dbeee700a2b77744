"""DistributedDataParallel, FSDP2, DTensor and process groups."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # on the model; each ignored tensor has ``_ddp_ignored``

# The names of torch 2.13, which warns where the earlier names are called.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> datetime.timedelta:
    """How long collectives of ``group`` wait for tensors on ``device``."""
    timeout: datetime.timedelta = (group or dist.group.WORLD)._get_backend(device).options._timeout  # type: ignore[union-attr]
    return timeout


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout: datetime.timedelta) -> None:
    """Make the next collectives of ``groups`` wait for ``timeout``."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# DataParallel and DistributedDataParallel


def is_replica(model: nn.Module) -> bool:
    """Whether ``model`` is the copy of a model that DataParallel made for one GPU."""
    return bool(getattr(model, "_is_replica", False))


def ignored_by_ddp(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that DDP will ignore."""
    return list(getattr(model, _IGNORED, ()))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Make a DDP that wraps ``model`` later ignore the parameters and buffers ``names``, and no others."""
    model.__dict__.pop(_IGNORED, None)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop("_ddp_ignored", None)
    if names := list(names):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def reduce_only(ddp: DistributedDataParallel, param: Tensor) -> None:
    """Make the reducer of ``ddp`` anew, for ``param`` alone."""
    ddp._ddp_init_helper([param], [False], {0: "stand_in"}, ddp.static_graph)


def ddp_in_forward() -> DistributedDataParallel | None:
    """The DDP whose forward pass runs now."""
    return DistributedDataParallel._get_active_ddp_module()


def bytes_of_buckets(ddp: DistributedDataParallel) -> int:
    """Bytes of the buckets of ``ddp``."""
    data = ddp._get_ddp_logging_data()
    return sum(int(size) for size in (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))


# FSDP


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP1 or FSDP2 manages the parameters of ``module`` itself."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


class FsdpUnit:
    """A module that ``fully_shard`` was called for.

    Attributes:
        group: its parameters in FSDP2; None for a unit without parameters of its own.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._state = module, module._get_fsdp_state()
        self.group = self._state._fsdp_param_group
        # FSDP2's hooks before and after the forward of the module.
        self.before: Callable[..., Any] = self._state._pre_forward
        self.after: Callable[..., Any] = self._state._post_forward

    @property
    def policy(self) -> Any:
        """The unit's ``MixedPrecisionPolicy``."""
        return self._state._mp_policy

    def set_policy(self, policy: Any) -> None:
        """Gather and reduce in the dtypes of ``policy`` from now on."""
        for owner in (self.group, *self.params()):
            if owner is not None:
                owner.mp_policy = policy
        self._state._mp_policy = policy

    @property
    def reduces_gradients(self) -> bool:
        """Whether the next backward pass reduces the unit's gradients onto their shards."""
        return self.group is None or self.group.reduce_grads

    def params(self) -> list[Any]:
        """FSDP2's record (``FSDPParam``) of each parameter."""
        return list(self.group.fsdp_params) if self.group is not None else []

    def hook(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call ``before`` and ``after`` around the forward of the module in the place of FSDP2's hooks."""
        state = self._state
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        state._pre_forward_hook_handle = self._module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        state._post_forward_hook_handle = self._module.register_forward_hook(after)


def fsdp_units(model: nn.Module) -> Iterator[tuple[str, FsdpUnit]]:
    """(name, unit) of each FSDP2 unit in ``model``."""
    from torch.distributed.fsdp import FSDPModule

    return ((name, FsdpUnit(module)) for name, module in model.named_modules() if isinstance(module, FSDPModule))


def unreduced_grad(param: Any) -> Tensor | None:
    """The gradient that FSDP2 has not reduced yet, of an ``FSDPParam``."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    whole = getattr(param, "_unsharded_param", None)
    return None if whole is None else whole.grad


def forget_unreduced_grad(param: Any) -> None:
    """Drop the gradient that FSDP2 has not reduced yet, which ``zero_grad`` does not see."""
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


# DTensor


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor. At less host time than ``isinstance``, whose import is slow."""
    return hasattr(tensor, "_local_tensor")


def local_tensor(dtensor: Any) -> Any:
    """The local shard of a DTensor itself: ``to_local()`` takes a view, a copy where the shard is quantized."""
    return dtensor._local_tensor


def set_local_tensor(dtensor: Any, local: Tensor) -> None:
    """Make ``local`` the local shard of a DTensor."""
    dtensor._local_tensor = local


def dtensor_like(local: Tensor, like: Any) -> Any:
    """A DTensor with the local shard ``local`` itself, sharded as the DTensor ``like``; ``from_local`` takes a view."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, replace(like._spec, tensor_meta=meta), requires_grad=False)
