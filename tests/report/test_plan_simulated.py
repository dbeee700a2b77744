"""Plans against a simulated world: torch's fake process group, and fake tensors, which have shapes and no memory.

What runs is the project's own, in a process of its own: ``Engine`` converts, ``shard_model`` cuts with FSDP2, the
engine settles and attaches, forward, backward and the optimizer's step make what they make. Left out is what needs
values, or writes them where nothing new is allocated: the checks of weights, the recognition of norms, packing and
summing of messages, the arithmetic of Adam.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo_lowprec.engine import mixed_precision_policy
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import plan_training
from nemo_lowprec.report.traffic import Traffic
from nemo_lowprec.strategies.shard import shard_model, sharding_over
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_shard
from nemo_lowprec.weights import ShardedWeights
from tests.processes import FORKING
from tests.report.holdings import Flat, Most, fsdp_params, is_bookkeeping, is_master, size
from tests.support import plugin

pytestmark = pytest.mark.slow

WORLD = 64
CPU = torch.device("cpu")
ALL_LAYERS = 80
# Level, layers and options. What is in flight depends on the width of a model, and not on its depth.
WIDE = {
    "msamp_o3": ("msamp_o3", 2, {}),
    "msamp_o2, ZeRO-2, 8 copies": ("msamp_o2", 2, {"reshard_after_forward": False, "shard_size": 8}),
    "bf16_mixed": ("bf16_mixed", 2, {}),
}


def leave_values_out():
    """For the rest of this process."""
    from nemo_lowprec.comm import buckets, wire
    from nemo_lowprec.compute.patterns import norms
    from nemo_lowprec.optim import low_bit
    from nemo_lowprec.weights import ShardedWeights

    ShardedWeights.check = lambda *_: None
    norms._rms_norm_settings = lambda module: {
        "zero_centered": False, "eps": module.variance_epsilon, "normalized_shape": tuple(module.weight.shape),
        "elementwise_affine": True,
    }  # fmt: skip
    wire.Packer.pack = lambda self, rows, messages: None
    wire.Packer.unpack = lambda self, messages, rows: None
    buckets.mean_of_messages = lambda received, layout, out, own=None, observers=None: None
    low_bit.step_by_reference = lambda updates, inputs: None
    nn.Module.to = lambda self, *args, **options: self  # fake parameters cannot be swapped, and are there already


def llama_70b(layers):
    model = CausalLM("llama3_70b", config={"num_hidden_layers": layers}, init_seed=None, activation_checkpointing=True)
    model.configure_model()
    return model


def settled(case, model, mesh, reshard=True):
    """(engine, optimizer) of a sharded model, as the strategy and the plugin set them up."""
    precision = plugin(case)
    engine = precision.engine
    engine.sharding = sharding_over(mesh, reshard)
    engine.convert(model, CPU)
    shard_model(model, mesh, CPU, mixed_precision_policy(precision.level), reshard)
    engine.settle()
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    return engine, optimizer


def held(model, engine, optimizer):
    """Bytes of what is kept, and of the gradients."""
    found = {"Weight": [], "Master weight": []}
    for param in [*model.parameters(), *fsdp_params(model)]:
        data = getattr(param, "_sharded_param_data", param)
        found["Master weight" if is_master(param, engine) else "Weight"].append(data)
    found["Weight gradient"] = [p.grad for p in model.parameters()]
    found["Optimizer states"] = [[s["exp_avg"], s["exp_avg_sq"]] for s in optimizer.state.values()]
    if engine.amaxes.histories is not None:
        found["Amax history"] = [
            engine.amaxes.histories.history,
            engine.amaxes.histories.amax,
            engine.amaxes.histories.scale,
        ]
    return {name: size(tensors) for name, tensors in found.items()}


def all_layers(case):
    """What llama3_70b keeps, up to the optimizer's first step; gradients are of their own class, and put there."""
    ShardedWeights.renew_scales = lambda self: None  # one number a matrix, which nothing is gathered with here
    model = llama_70b(ALL_LAYERS)
    engine, optimizer = settled(case, model, mesh_of(WORLD))
    assert all(is_sharded(p) for p in model.parameters())
    model._get_fsdp_state()._lazy_init()  # as its first forward does: until then FSDP2 holds the FP32 shards, too
    for param in model.parameters():
        local = local_shard(param)
        grad = GradientTensor.empty(local) if engine.columns.weights.is_matrix(param) else torch.empty_like(local)
        param.grad = as_dtensor_like(grad, param)
    optimizer.step()
    return {"found": held(model, engine, optimizer), "parameters": sum(p.numel() for p in model.parameters())}


def two_steps(case, layers, options):
    """What the second of two whole steps holds and sends."""
    model = llama_70b(layers)
    mesh = mesh_of(options.get("shard_size", WORLD))
    engine, optimizer = settled(case, model, mesh, options.get("reshard_after_forward", True))
    for _ in range(2):
        optimizer.zero_grad()
        traffic = Traffic(lambda tensor: is_bookkeeping(tensor, engine), engine.observers)
        with Flat() as flat, Most(model, engine, flat) as most, traffic:
            with engine.forward_context():
                loss = model(torch.zeros(1, 8, dtype=torch.int64)).float().sum()
            with engine.backward_context():
                loss.backward()
        optimizer.step()
    sent = {}
    for one in traffic.sent:
        sent[one.kind] = sent.get(one.kind, 0) + one.bytes
    return {"found": held(model, engine, optimizer) | dict(most.found), "sent": sent}


def mesh_of(shards):
    with unset_fake_temporarily():
        if shards == WORLD:
            return init_device_mesh("cpu", (WORLD,))
        return init_device_mesh("cpu", (WORLD // shards, shards), mesh_dim_names=("replicate", "shard"))


def simulate(part, folder):
    """One process of 64 that are not there; two parts at the same time."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    leave_values_out()
    with FakeTensorMode():
        if part == 0:
            found = {"all": all_layers("msamp_o3")}
        else:
            found = {name: two_steps(*arguments) for name, arguments in WIDE.items()}
    torch.save(found, folder / f"{part}.pt")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    mp.start_processes(simulate, (folder,), nprocs=2, start_method=FORKING.get_start_method())
    return {k: v for part in range(2) for k, v in torch.load(folder / f"{part}.pt", weights_only=True).items()}


def planned(case, layers, **options):
    with torch.device("meta"):
        model = llama_70b(layers)
    return plan_training(model, plugin(case), 8, 8, accelerator="cpu", **options)


def assert_columns(got, found):
    wanted = {c.name: c.bytes for c in got.columns if c.name in found}
    assert wanted == pytest.approx(found, rel=0.05)
    assert sum(wanted.values()) == pytest.approx(sum(found.values()), rel=0.05)


def test_llama_70b_on_64_processes_keeps_what_is_planned(simulated):
    got = planned("msamp_o3", ALL_LAYERS)
    assert got.parameters == simulated["all"]["parameters"] == 70_553_706_496
    assert_columns(got, simulated["all"]["found"])


@pytest.mark.parametrize("name", WIDE)
def test_steps_at_the_width_of_70b_take_what_is_planned(simulated, name):
    case, layers, options = WIDE[name]
    got, real = planned(case, layers, **options), simulated[name]
    assert {c.name for c in got.columns if c.bytes} <= real["found"].keys()
    assert_columns(got, real["found"])
    sent = {}
    for one in got.traffic:
        sent[one.kind] = sent.get(one.kind, 0) + one.bytes
    assert sent == pytest.approx(real["sent"], rel=0.05)
