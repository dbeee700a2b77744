"""Steps of Megatron-core's distributed optimizer at the levels' formats: two processes on the CPU, over gloo."""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.cpu_for_cuda import CpuForCuda
from nemo_lowprec.compute import AmaxState
from nemo_lowprec.engine import Step
from nemo_lowprec.grads import LossScale
from nemo_lowprec.observers import Observers
from nemo_lowprec.tensors import QuantizedTensor
from tests.megatron_jobs import level
from tests.processes import on_processes

WORLD, STEPS, CLIP = 2, 5, 0.05
PLAIN = ["bf16_mixed", "fp16_mixed", "te_fp8"]
CASES = [*PLAIN, "msamp_o1+fp16", "msamp_o2+fp16"]
FORMS = ["fully_reshardable", "dp_reshardable"]
OVERFLOWS = 2  # the step whose gradients are not finite on one process
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALED = [case for case in CASES if "fp16" in case]  # whose loss is scaled
HALF = {"bf16_mixed": torch.bfloat16, "te_fp8": torch.bfloat16}  # of computation; FP16 elsewhere


def settings_of(case):
    return level(case, **({"hysteresis": 1} if case in SCALED else {})).megatron(own_layers=True)


class Net(nn.Module):
    """Matrices and vectors; the weights of another process begin in the middle of one."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.half = HALF.get(case, torch.float16)

    def forward(self, x):
        with torch.autocast("cpu", self.half):
            return self.norm(self.second(torch.relu(self.first(x))).to(self.norm.weight.dtype)).float()


class Saturated(AmaxState):
    """An operand of an FP8 GEMM that was not finite on this process, or was."""

    def __init__(self, infinite):
        super().__init__()
        self.infinite = infinite

    def nonfinite(self):
        return torch.tensor(self.infinite)


def loss(model, rank, step):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * rank + step))
    if step == OVERFLOWS and rank == 1:
        x[0, 0] = math.inf
    target = x.roll(1, -1).nan_to_num(posinf=0.0)
    return (model(x.to(next(model.parameters()).dtype)) - target).pow(2).mean()


def build(case):
    """A wrapped net, and what steps it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from nemo_lowprec.megatron.chunks import cast_parameters, wrap
    from nemo_lowprec.megatron.columns import of_built_chunks
    from nemo_lowprec.megatron.optimizer_step import Stepper

    settings, net = settings_of(case), Net(case)
    cast_parameters(net, settings)
    sizes = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    chunk = wrap(net, sizes, DistributedDataParallelConfig(**settings.ddp), settings)
    # Precision-aware states would ask for Transformer Engine; the optimizer switches Megatron's off in any case.
    fields = {k: v for k, v in settings.optimizer.items() if "aware" not in k and not k.endswith("_dtype")}
    config = OptimizerConfig(
        **fields, params_dtype=settings.optimizer["params_dtype"], lr=ADAM["lr"], clip_grad=CLIP
    )  # fmt: skip
    scaling = settings.options.loss_scale
    guard = Step(of_built_chunks(settings, [chunk]), LossScale(scaling) if scaling is not None else None, Observers())
    return chunk, Stepper(torch.optim.AdamW(net.parameters(), **ADAM), config, settings, [chunk], guard)


def accumulate(chunk, stepper, rank, step):
    chunk.zero_grad_buffer()
    stepper.zero_grad()
    stepper.guard.scale(loss(chunk, rank, step)).backward()
    chunk.finish_grad_sync()


def train(chunk, stepper, rank, steps):
    found = {"stepped": [], "norms": [], "scales": []}
    for step in steps:
        accumulate(chunk, stepper, rank, step)
        found["scales"].append(stepper.guard.loss_scale and stepper.guard.loss_scale.used)
        found["stepped"].append(stepper.step())
        found["norms"].append(float(stepper.grad_norm))
    params = list(chunk.module.parameters())
    found["weights"] = [param.detach().clone() for param in params]
    found["masters"] = {
        i: stepper.masters([param])[0].detach().clone() for i, param in enumerate(params) if stepper.masters([param])
    }
    found["are_weights"] = {stepper.is_weight(master) for master in stepper.masters(params)}
    states = stepper.states(params)
    found["formats"] = {
        str(v.dtype) if not isinstance(v, QuantizedTensor) else v.fmt.name for s in states for v in s.values()
    }
    return found


def sharded(chunk, stepper, form, is_loading):
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    metadata = {"distrib_optim_sharding_type": form, "distrib_optim_fully_reshardable_mem_efficient": False}
    model = {"model": make_sharded_tensors_for_checkpoint(chunk.module.state_dict(keep_vars=True), "")}
    return {**model, "optimizer": stepper.sharded_state(dict(model), is_loading, metadata)}


def saved(chunk, stepper, rank, folder, form):
    from megatron.core import dist_checkpointing

    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded(chunk, stepper, form, False), str(folder))


def loaded(case, folder, form):
    from megatron.core import dist_checkpointing

    chunk, stepper = build(case)
    state = dist_checkpointing.load(sharded(chunk, stepper, form, True), str(folder))
    chunk.module.load_state_dict(state["model"])
    stepper.load(state["optimizer"])
    stepper.refresh()
    return chunk, stepper


def parts_in_fp32():
    """Of matrices, flat, as many as there are in this process's memory."""
    gc.collect()
    return sum(type(x) in (torch.Tensor, nn.Parameter) and x.dtype == torch.float32 and x.shape == (2048,)
               for x in gc.get_objects())  # fmt: skip


def spoiled(chunk, stepper, rank):
    """By process and parameter, where its gradient is not finite there once it is reduced: (whether the process steps
    the parameter, whether all step, whether weights stay)."""
    found = []
    for victim in range(WORLD):
        for param in chunk.module.parameters():
            before = [param.detach().clone() for param in chunk.module.parameters()]
            accumulate(chunk, stepper, rank, 0)
            if rank == victim:
                param.main_grad.add_(torch.full_like(param.main_grad.detach().float(), math.inf))
            is_here = rank == victim and bool(stepper.masters([param]))
            found.append((is_here, stepper.step(), all(map(torch.equal, chunk.module.parameters(), before))))
    return found


def job(rank, folder):
    from nemo_lowprec.megatron.parallel import ParallelLayout

    found, more = {}, range(STEPS, STEPS + 2)
    with CpuForCuda():
        ParallelLayout().initialize()
        for case in CASES:
            before = parts_in_fp32()
            chunk, stepper = build(case)
            found[f"{case} in FP32"] = parts_in_fp32() - before
            found[case] = train(chunk, stepper, rank, range(STEPS))
            for form in FORMS:
                saved(chunk, stepper, rank, folder / case / form, form)
            found[f"{case} on"] = train(chunk, stepper, rank, more)
            for form in FORMS:
                found[f"{case} {form}"] = train(*loaded(case, folder / case / form, form), rank, more)
            before = [param.detach().clone() for param in chunk.module.parameters()]
            accumulate(chunk, stepper, rank, 0)
            stepper.guard.columns.computation.amaxes = [Saturated(rank == 1)]
            saturated = stepper.step(), all(map(torch.equal, chunk.module.parameters(), before))
            accumulate(chunk, stepper, rank, 0)
            stepper.guard.columns.computation.amaxes = [Saturated(False)]
            found[f"{case} saturated"] = (*saturated, stepper.step())
            found[f"{case} spoiled"] = spoiled(chunk, stepper, rank)
            with torch.no_grad():
                for param in chunk.module.parameters():
                    param.fill_(0.25)
            for group in stepper.inner.param_groups:
                group["lr"] = 0.0
            accumulate(chunk, stepper, rank, 0)
            stepper.step()
            masters = [master.detach().clone() for master in stepper.masters(chunk.module.parameters())]
            found[f"{case} written"] = [*masters, *(param.detach().clone() for param in chunk.module.parameters())]
            chunk, stepper = build(case)
            for param in chunk.module.parameters():
                param.data.fill_(0.3)
            stepper.reload_masters()
            found[f"{case} reloaded"] = [master.clone() for master in stepper.masters(chunk.module.parameters())]
            net = chunk.module
            buffers = [StorageWeakRef(buffer.param_data.untyped_storage()) for buffer in chunk.buffers]
            before = [param.detach().clone() for param in net.parameters()]
            stepper.release()
            del chunk, stepper
            gc.collect()
            found[f"{case} held"] = sum(not buffer.expired() for buffer in buffers)
            found[f"{case} kept"] = all(map(torch.equal, net.parameters(), before))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(WORLD, tmp_path_factory.mktemp("ranks"), job, tmp_path_factory.mktemp("saved"))


def reference(case):
    """The same on one process, by torch: AdamW on FP32 masters of half weights, gradients averaged in FP32."""
    settings, net = settings_of(case), Net(case)
    masters = [nn.Parameter(p.detach().float().clone()) for p in net.parameters()]
    net.to(settings.matrices)
    optimizer, scale = torch.optim.AdamW(masters, **ADAM), 2.0**12 if settings.level.has_loss_scale else 1.0
    norms = []
    for step in range(STEPS):
        with torch.no_grad():
            for param, master in zip(net.parameters(), masters, strict=True):
                param.copy_(master)
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in masters]
        for rank in range(WORLD):
            net.zero_grad()
            (scale * loss(net, rank, step)).backward()
            for total, param in zip(sums, net.parameters(), strict=True):
                total += param.grad.float() / WORLD
        norm = torch.stack([g.norm() for g in sums]).norm() / scale
        norms.append(float(norm))
        if not norm.isfinite():
            scale /= 2
            continue
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad / (scale * max(1.0, (float(norm) + 1e-6) / CLIP))
        optimizer.step()
    return masters, norms


def whole(found, case):
    """Masters over both processes, flat."""
    parts = [ranks[case]["masters"] for ranks in found]
    return [torch.cat([p[i] for p in parts if i in p]) for i in range(len(found[0][case]["weights"]))]


@pytest.mark.parametrize("case", PLAIN)
def test_steps_are_those_of_torch_on_fp32_masters(case, ranks):
    masters, norms = reference(case)
    assert ranks[0][case]["norms"] == pytest.approx(norms, rel=3e-3, nan_ok=True)
    for found, wanted in zip(whole(ranks, case), masters, strict=True):
        torch.testing.assert_close(found, wanted.detach().flatten(), rtol=0, atol=2e-4)
        assert (found - wanted.detach().flatten()).abs().mean() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_weights_are_their_masters_rounded(case, ranks):
    for name in (case, f"{case} on"):
        for found, weight in zip(whole(ranks, name), ranks[0][name]["weights"], strict=True):
            assert torch.equal(found.to(weight.dtype), weight.flatten())
        for mine, theirs in zip(ranks[0][name]["weights"], ranks[1][name]["weights"], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES)
def test_masters_and_states_have_the_levels_formats(case, ranks):
    assert ranks[0][case]["are_weights"] == {"msamp" in case or case == "te_fp8"}
    assert ranks[0][case]["formats"] == {"torch.float32"} | ({"e4m3", "fp16"} if "o2" in case else set())


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_overflows_on_one_process_is_skipped_on_all(case, ranks):
    for found in ranks:
        assert found[case]["stepped"] == [step != OVERFLOWS for step in range(STEPS)]
        if case in SCALED:
            before, after = found[case]["scales"][OVERFLOWS : OVERFLOWS + 2]
            assert after == before / 2


@pytest.mark.parametrize("case", CASES)
def test_what_saturated_on_one_process_skips_the_step_on_all(case, ranks):
    for found in ranks:
        assert found[f"{case} saturated"] == (False, True, True)  # stepped, the weights as before; stepped


@pytest.mark.parametrize("case", CASES)
def test_a_reduced_gradient_that_is_not_finite_where_it_is_stepped_skips_the_step_on_all(case, ranks):
    steps = [found[f"{case} spoiled"] for found in ranks]
    for (first, *ends), (second, *others) in zip(*steps, strict=True):
        assert ends == others == [not (first or second), first or second]
    assert any(is_here for found in steps for is_here, *_ in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_resumes_bit_for_bit(case, form, ranks):
    for found in ranks:
        resumed, went_on = found[f"{case} {form}"], found[f"{case} on"]
        assert resumed["norms"] == went_on["norms"] and resumed["scales"] == went_on["scales"]
        for a, b in zip(resumed["weights"], went_on["weights"], strict=True):
            assert torch.equal(a, b)
        assert resumed["masters"].keys() == went_on["masters"].keys()
        assert all(torch.equal(resumed["masters"][i], m) for i, m in went_on["masters"].items())


@pytest.mark.parametrize("case", CASES)
def test_masters_start_from_weights_that_others_wrote(case, ranks):
    for found in ranks:
        assert all((master.float() - 0.3).abs().max() < 1e-3 for master in found[f"{case} reloaded"])


@pytest.mark.parametrize("case", CASES)
def test_weights_that_others_wrote_between_two_steps_stay(case, ranks):
    for found in ranks:
        assert all((values.float() - 0.25).abs().max() < 1e-3 for values in found[f"{case} written"])


@pytest.mark.parametrize("case", CASES)
def test_a_net_that_is_let_go_of_keeps_its_weights_and_no_buffers(case, ranks):
    for found in ranks:
        assert found[f"{case} kept"] and not found[f"{case} held"]


@pytest.mark.parametrize("case", CASES)
def test_fp32_masters_take_memory_where_a_level_has_them_alone(case, ranks):
    parts = sum(found[f"{case} in FP32"] for found in ranks)
    assert parts == 0 if case.startswith("msamp") else parts >= 2
