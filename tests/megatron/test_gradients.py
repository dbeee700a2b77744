"""FP8 gradient buffers in Megatron-core's DistributedDataParallel: on the CPU, over gloo."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.cpu_for_cuda import CpuForCuda
from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.megatron.gradients import MainGradient, hold_in_fp8, part_of_gradient
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.tensors import GradientTensor
from tests.processes import on_processes

WORLD = 2
SHAPES = [(128, 64), (64, 256)]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1e-4


def main_gradient(values):
    """One that holds ``values``, and is zeroed as Megatron zeroes it: not yet."""
    stored = GradientTensor.from_float(values)
    gradient = MainGradient(stored.data_blocks, stored.exponent, stored.factor, stored.nonfinite)
    gradient.is_empty = True
    return gradient


def rounded(values):
    """What is stored of them, to nearest."""
    return dequantize_rows(*quantize_rows(values, E4M3))


def test_the_first_gradient_is_stored_to_nearest_in_the_place_of_the_last_steps():
    gradient, values = main_gradient(random(512, seed=0)), random(512, seed=1)
    gradient.add_(values)
    assert torch.equal(gradient.dequantize(), rounded(values))


def test_later_gradients_are_added_with_one_rounding_of_the_sum():
    gradient, micro_batches = main_gradient(random(512, seed=0)), [random(512, seed=i) for i in (1, 2, 3)]
    plain = GradientTensor.from_float(micro_batches[0])
    gradient.add_(micro_batches[0])
    for values in micro_batches[1:]:
        gradient.add_(values)
        plain.accumulate_(values)
    assert torch.equal(gradient.dequantize(), plain.dequantize())
    total = sum(micro_batches)
    assert (gradient.dequantize() - total).norm() < 0.08 * total.norm()


def test_a_gradient_of_the_parameters_shape_is_added_to_a_flat_one():
    gradient, values = main_gradient(torch.zeros(512)), random(4, 128, seed=1)
    gradient.add_(values)
    assert torch.equal(gradient.dequantize(), rounded(values.view(-1)))


def test_a_part_lies_in_the_storage_of_the_whole():
    whole = GradientTensor.from_float(random(1024, seed=0))
    part = part_of_gradient(whole, 256, 640)
    assert torch.equal(part.dequantize(), whole.dequantize()[256:640])
    before = whole.dequantize()
    part.quantize_(random(384, seed=1))
    expected = torch.cat([before[:256], rounded(random(384, seed=1)), before[640:]])
    assert torch.equal(whole.dequantize(), expected)


def test_a_weighted_part_leaves_the_whole_as_it_is():
    whole = GradientTensor.from_float(random(1024, seed=0))
    before, part = whole.dequantize(), part_of_gradient(whole, 256, 640)
    part.mul_(0.75)
    assert torch.equal(part.dequantize(), 0.75 * before[256:640])
    assert torch.equal(whole.dequantize(), before)
    part_of_gradient(whole, 256, 640).quantize_(random(384, seed=1))  # what the next step finds there
    assert torch.equal(part.dequantize(), 0.75 * rounded(random(384, seed=1)))


@pytest.mark.parametrize("multiply", [torch.Tensor.mul_, lambda g, by: torch._foreach_mul_([g], by)])
def test_what_multiplies_a_parameters_gradient_is_stepped_with(multiply):
    """By a callback, or by Megatron-core: the optimizer reads parts of the buffer."""
    whole = GradientTensor.from_float(random(1024, seed=0))
    own = part_of_gradient(whole, 256, 640)
    before, member = own.dequantize(), MainGradient(own.data_blocks, own.exponent, whole.factor, whole.nonfinite)
    multiply(member, 0.5)
    assert torch.equal(part_of_gradient(whole, 256, 640).dequantize(), 0.5 * before)
    multiply(member, torch.nan)
    assert GradientTensor.any_nonfinite([part_of_gradient(whole, 512, 640)])


def test_a_matrix_that_fills_no_whole_blocks_is_refused_by_name():
    module = nn.Sequential(nn.Linear(100, 3, bias=False))
    buffer = SimpleNamespace(grad_dtype=torch.float16, params=list(module.parameters()))
    ddp = SimpleNamespace(module=module, buffers=[buffer], expert_parallel_buffers=[])
    with pytest.raises(ValueError, match=r"0.weight has 300 elements .*blocks of 128. Use sizes .* or bf16_with_fp8"):
        hold_in_fp8(ddp)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in SHAPES)).half()


def loss(model, rank, batch):
    generator = torch.Generator().manual_seed(10 * rank + batch)
    return model(torch.randn(8, SHAPES[0][0], generator=generator).half()).float().pow(2).mean()


def wrapped(overlap):
    """Megatron's own DistributedDataParallel with FP8 buffers; where it overlaps, a bucket a matrix."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        average_in_collective=True,
        pad_buckets_for_high_nccl_busbw=True,
        overlap_grad_reduce=overlap,
        bucket_size=1,
    )
    sizes = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    ddp = DistributedDataParallel(sizes, config, net())
    hold_in_fp8(ddp)
    return ddp


def own_part(ddp, rank):
    """By parameter: the values that this process is to step, zeros in the place of the others."""
    (buffer,) = ddp.buffers
    whole, own = buffer.grad_data.dequantize(), torch.zeros(buffer.numel)
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // WORLD
        start = bucket.offset + rank * size
        own[start : start + size] = whole[start : start + size]
    return [own[slice(*buffer.param_index_map[p][:2])] for p in ddp.module.parameters()]


def job(rank):
    with CpuForCuda():
        return found_by(rank)


def found_by(rank):
    import torch.distributed as dist

    from nemo_lowprec.megatron.gradients import _exchange

    ParallelLayout().initialize()
    found = {}

    # One bucket of three gradients, the last of which had none since it was zeroed.
    values = [random(256, seed=rank), random(384, seed=10 + rank), random(128, seed=20)]
    if rank == 1:
        values[1][5] = torch.inf
    whole = GradientTensor.from_float(torch.cat(values))
    whole.members = []
    for start, end in ((0, 256), (256, 640), (640, 768)):
        part = part_of_gradient(whole, start, end)
        whole.members.append(MainGradient(part.data_blocks, part.exponent, part.factor, part.nonfinite))
    whole.members[2].is_empty = True
    out = part_of_gradient(whole, 384 * rank, 384 * (rank + 1))
    found["values"], found["sent"] = torch.cat(values), whole.dequantize()
    _exchange(whole, out, dist.group.WORLD).wait()
    found["mean"] = out.dequantize()

    for overlap in (False, True):
        ddp = wrapped(overlap)
        for step in range(2):  # the second one finds what the first has left
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                loss(ddp, rank, 2 * step).backward()
            loss(ddp, rank, 2 * step + 1).backward()
            ddp.finish_grad_sync()
        found[f"overlap={overlap}"] = own_part(ddp, rank)

    ddp = wrapped(overlap=False)
    loss(ddp, rank, 0).backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    ddp.module[0](torch.ones(8, SHAPES[0][0]).half()).float().sum().backward()  # the second layer has no part in it
    ddp.finish_grad_sync()
    found["unused"] = own_part(ddp, rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(WORLD, tmp_path_factory.mktemp("ranks"), job)


def test_an_exchange_is_the_rounded_mean_of_what_was_stored(ranks):
    mean = torch.cat([found["mean"] for found in ranks])
    sent = [found["sent"].clone() for found in ranks]
    for values in sent:
        values[640:] = 0.0  # nothing was added there
    torch.testing.assert_close(mean, rounded(sum(sent) / WORLD), rtol=0, atol=0, equal_nan=True)
    assert mean.isnan().nonzero().tolist() == [[256 + 5]]  # infinite on one process


def test_an_exchange_is_the_fp32_mean_to_the_formats_precision(ranks):
    mean = torch.cat([found["mean"] for found in ranks])[:640]
    values = torch.stack([found["values"][:640] for found in ranks])
    finite = values.isfinite().all(0)
    error = (mean - values.mean(0))[finite].abs()
    # Two roundings to three bits of mantissa; below E4M3's normal range half of its smallest step.
    step = values[:, finite].abs().amax() / 224 * 2**-10
    assert (error <= (2 * 2**-4 + 2**-8) * values.abs().mean(0)[finite] + 2 * step).all()
    assert error.amax() > 0


def expected(batches):
    """The mean of both processes' gradients, each summed over its micro-batches as it is stored."""
    sums = []
    for rank in range(WORLD):
        stored = None
        for batch in batches:
            model = net()
            loss(model, rank, batch).backward()
            gradients = [p.grad.flatten() for p in model.parameters()]
            if stored is None:
                stored = [GradientTensor.from_float(g) for g in gradients]
            else:
                for total, gradient in zip(stored, gradients, strict=True):
                    total.accumulate_(gradient)
        sums.append([g.dequantize() for g in stored])
    return [rounded(sum(of_ranks) / WORLD) for of_ranks in zip(*sums, strict=True)]


def joined(ranks, key):
    return [sum(parts) for parts in zip(*(found[key] for found in ranks), strict=True)]


@pytest.mark.parametrize("overlap", [False, True])
def test_megatrons_backward_leaves_the_mean_over_micro_batches_and_processes(overlap, ranks):
    for found, wanted in zip(joined(ranks, f"overlap={overlap}"), expected([2, 3]), strict=True):
        assert torch.equal(found, wanted) and wanted.any()


def test_a_parameter_without_a_gradient_has_none_of_the_step_before(ranks):
    first, second = joined(ranks, "unused")
    assert first.any() and not second.any()
