"""DistributedDataParallel, FSDP2, DTensor and process groups, on two processes."""

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import SECONDS, on_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nemo_lowprec.compat import distributed as compat
from nemo_lowprec.compat.lightning import broadcast_states


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _ddp(rank):
    model = model_of()
    compat.ignore_in_ddp(model, ["0.weight"])
    assert compat.ignored_by_ddp(model) == ["0.weight"]
    ddp, seen = DistributedDataParallel(copy.deepcopy(model)), []
    ddp.module[1].register_forward_hook(lambda *args: seen.append(compat.ddp_in_forward()))
    ddp(torch.full((1, 4), float(rank + 1))).sum().backward()
    assert compat.ddp_in_forward() is None and seen == [ddp]
    assert compat.bytes_of_buckets(ddp) == 4 * (4 + 4 * 2 + 2)
    grads = {name: p.grad.clone() for name, p in ddp.module.named_parameters()}
    for name, grad in grads.items():
        other = grad.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, grad) == (rank == 0 or name != "0.weight")
    compat.ignore_in_ddp(model, [])
    assert compat.ignored_by_ddp(model) == []
    assert compat.bytes_of_buckets(DistributedDataParallel(model)) == 4 * (16 + 4 + 8 + 2)
    return True


def test_ddp_ignores_parameters_by_name(tmp_path):
    assert on_processes(2, tmp_path, _ddp) == [True, True]


def _reducer(rank):
    ddp = DistributedDataParallel(model_of())
    bias = ddp.module[1].bias
    compat.reduce_only(ddp, bias)
    assert compat.bytes_of_buckets(ddp) == 4 * 2
    (ddp(torch.full((1, 4), float(rank))) * (rank + 1)).sum().backward()
    assert bias.grad.tolist() == [1.5, 1.5]  # averaged
    assert ddp.module[1].weight.grad.abs().sum() > 0 or rank == 0
    return True


def test_a_reducer_is_made_anew_for_one_parameter(tmp_path):
    assert on_processes(2, tmp_path, _reducer) == [True, True]


def _groups(rank):
    store = compat.default_store()
    store.set(f"from {rank}", b"here")
    assert store.get(f"from {1 - rank}") == b"here"
    model = model_of(seed=rank)
    broadcast_states(model)
    assert torch.equal(model[0].weight, model_of(seed=0)[0].weight)
    return True


def test_the_store_of_the_default_group(tmp_path):
    assert on_processes(2, tmp_path, _groups) == [True, True]


def _collectives(rank):
    mine, gathered, shard = torch.full((2,), float(rank + 1)), torch.zeros(4), torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.all_gather_single(gathered, mine)
        compat.reduce_scatter_single(shard, mine * torch.tensor([1.0, 10.0]))
    return gathered.tolist(), shard.item()


def test_collectives_of_one_tensor_do_not_warn(tmp_path):
    gathered = [1.0, 1.0, 2.0, 2.0]
    assert on_processes(2, tmp_path, _collectives) == [(gathered, 3.0), (gathered, 30.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_timeout_of_a_group_on_gpus(tmp_path):
    assert on_processes(1, tmp_path, _timeout, backend="nccl") == [True]


def test_the_timeout_of_a_group_on_the_cpu(tmp_path):
    assert on_processes(1, tmp_path, _timeout) == [True]


def _timeout(rank):
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    assert compat.timeout_of(None, device).total_seconds() == SECONDS
    compat.set_timeout([dist.group.WORLD], timedelta(seconds=77))
    assert compat.timeout_of(None, device).total_seconds() == 77
    return True


def _units(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = model_of()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert compat.is_managed_by_fsdp(model[0]) and not compat.is_managed_by_fsdp(model_of()[0])
    units = dict(compat.fsdp_units(model))
    assert list(units) == ["", "0"]
    outer, inner = units[""], units["0"]
    assert isinstance(outer, compat.FsdpUnit) and len(outer.group.fsdp_params) == 2
    assert len(outer.params()) == len(inner.params()) == 2  # the outer unit has the second layer

    assert inner.reduces_gradients
    model.set_requires_gradient_sync(False)
    assert not inner.reduces_gradients
    model.set_requires_gradient_sync(True)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert inner.policy.param_dtype is None
    inner.set_policy(half)
    assert inner.policy is half
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    def before(module, args, kwargs):
        seen.append("before")
        return outer.before(module, args, kwargs)

    def after(module, args, out):
        seen.append("after")
        return outer.after(module, args, out)

    outer.hook(before, after)
    outer.set_policy(half)
    model(torch.ones(1, 4)).sum().backward()
    assert seen == ["before", torch.bfloat16, "after"]

    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    record = inner.params()[0]
    assert compat.unreduced_grad(record) is not None
    model.zero_grad()
    compat.forget_unreduced_grad(record)
    assert compat.unreduced_grad(record) is None
    return True


def test_units_of_fsdp2(tmp_path):
    assert on_processes(2, tmp_path, _units) == [True, True]


def _dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    dtensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    local = compat.local_tensor(dtensor)
    assert compat.is_dtensor(dtensor) and not compat.is_dtensor(local)
    assert torch.equal(local, torch.arange(4.0).reshape(2, 2) + 4 * rank)
    half = compat.dtensor_like(local.bfloat16(), dtensor)
    assert half.dtype == torch.bfloat16 and torch.equal(half.full_tensor().float(), dtensor.full_tensor())
    assert half.placements == dtensor.placements
    mine = local + 1
    compat.set_local_tensor(dtensor, mine)
    assert compat.local_tensor(dtensor) is mine and dtensor.full_tensor().tolist()[0] == [1, 2]
    return True


def test_local_shards_of_dtensors(tmp_path):
    assert on_processes(2, tmp_path, _dtensors) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replicas_of_data_parallel():
    model = nn.Linear(2, 2).cuda()
    (replica,) = nn.parallel.replicate(model, [0])
    assert compat.is_replica(replica) and not compat.is_replica(model)
