"""Every level on two GPUs, over NCCL."""

import os

import pytest
import torch
import torch.distributed as dist

from nemo_lowprec.comm import GradientReducer
from nemo_lowprec.comm.exchange import PeerMemory
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.tensors import GradientTensor
from tests.processes import on_processes
from tests.strategies import (
    test_ddp_loops,
    test_materialize,
    test_sharded,
    test_sharded_checkpoints,
    test_sharded_models,
)
from tests.support import (
    CASES,
    FP16_HALF,
    HiddenInTE,
    Net,
    Samples,
    assert_same,
    is_low_bit,
    level_of,
    plugin_on,
    train,
    values_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

STRATEGIES = ["ddp", "lowprec_ddp"]
ALL = [c for c in [*CASES, *FP16_HALF] if level_of(c).scaling not in ("mxfp8", "nvfp4")]  # those need Blackwell
RESUMED = ["bf16_mixed", "msamp_o2", "msamp_o3"]
SHAPES = [(1024, 4096), (37, 129), (300,), (64, 256), (8, 3, 5, 5)]


def on_cpu(tree):
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, dict):
        return {k: on_cpu(v) for k, v in tree.items()}
    return [on_cpu(v) for v in tree] if isinstance(tree, (list, tuple)) else tree


def on_gpu(case):
    backend = "torch" if level_of(case).scaling == "rowwise" else "te"  # Transformer Engine has no rowwise scaling
    return {"accelerator": "gpu", "backend": backend}


def run(case, rank, strategy):
    processes = {}
    if rank is not None:
        processes = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    data = ResumableLoader(Samples(128), 16, 3, rank or 0, 1 if rank is None else 2, global_batch_size=32)
    model = Net()
    observer = train(
        model, plugin_on(on_gpu(case)["backend"], case), data=data, accelerator="gpu", gradient_clip_val=1.0,
        accumulate_grad_batches=2 if rank is None else 1, **processes,
    )  # fmt: skip
    grads = [{n: values_of(g) for n, g in step.items()} for step in observer.grads]
    return on_cpu({"grads": grads, "losses": model.losses, "weights": observer.state["weights"]})


def reduced(rank):
    """Several backward passes of a network of many buckets, without and with the one before in flight."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(s, device="cuda")) for s in SHAPES]
    wire = lambda p: torch.float8_e4m3fn if p.dim() > 1 else torch.float32  # noqa: E731
    for param in params:
        if param.dim() > 1:
            param.grad_dtype = None
            param.register_post_accumulate_grad_hook(_store)
    reducer = GradientReducer(params, None, wire, bucket_bytes=2**16)
    found = []
    for step in range(3):
        factors = averaged_pass(reducer, params, 10 * step + rank)
        found.append({"own": factors, "mean": [values_of(p.grad) for p in params]})
    return on_cpu(found)


def on_both_backends(rank):
    """As ``reduced``, where the group has gloo for the CPU, too."""
    peers = PeerMemory.try_for(2**16, None, torch.device("cuda", rank))
    return {"passes": reduced(rank), "peers": peers is not None}


def kept_apart(rank):
    """As ``on_both_backends``, where NCCL is told not to use the GPUs' access to each other's memory."""
    os.environ["NCCL_P2P_DISABLE"] = "1"
    return on_both_backends(rank)


def averaged_pass(reducer, params, seed):
    """A backward pass that ``reducer`` averages; returns this process's gradients before, FP32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    factors = [torch.randn(p.shape, device="cuda", dtype=torch.float32, generator=generator) for p in params]
    for param in params:
        param.grad = None
    loss = sum((p * f).sum() for p, f in zip(params, factors, strict=True))
    reducer.begin()
    loss.backward()
    reducer.finish()
    return factors


def _store(param):
    param.grad = GradientTensor.from_float(param.grad)


def every_case(rank, place):
    found = {"reduced": reduced(rank)}
    for case in ALL:
        for strategy in STRATEGIES:
            found[f"{case} {strategy} nan"] = on_cpu(test_ddp_loops.run_overflow(rank, case, strategy, **on_gpu(case)))
        found[f"{case} sharded nan"] = on_cpu(test_sharded_models.overflow(case, rank, **on_gpu(case)))
        for strategy in STRATEGIES:
            found[f"{case} {strategy}"] = run(case, rank, strategy)
            dist.barrier()
        found[f"{case} sharded"] = run_sharded(case, rank)
        found[f"{case} blocks"] = run_sharded(case, rank, test_sharded.Blocks)
        found[f"{case} hybrid"] = run_sharded(case, rank, strategy={"shard_size": 1})
        found[f"{case} audits"] = {
            name: test_sharded.audit(case, rank, strategy, **on_gpu(case))
            for name, strategy in test_sharded.AUDITED.items()
        }
    for strategy in STRATEGIES:
        model = HiddenInTE(on_rank=1)
        precision = plugin_on("te", "bf16_with_fp8_mixed")
        processes = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
        data = ResumableLoader(Samples(128), 16, 3, rank, 2)
        train(model, precision, data=data, accelerator="gpu", max_steps=5, **processes)
        found[f"hidden {strategy}"] = model.skipped_at
    for case in test_materialize.CASES:
        nets = (test_materialize.Later, test_materialize.OnFirst)
        found[f"{case} made"] = [run_sharded(case, rank, net) for net in nets]
    for case in RESUMED:
        forms = test_sharded_checkpoints.FORMS
        found[f"{case} resumed"] = on_cpu(test_sharded_checkpoints.resumed(case, rank, place, forms, **on_gpu(case)))
    return found


def run_sharded(case, rank, net=Net, strategy=None):
    found = test_sharded.run(case, rank, net, strategy=strategy, **on_gpu(case))
    return on_cpu({"grads": found["grads"], "weights": found["weights"], "kinds": found["kinds"]})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case, place, backend="nccl")


def test_means_that_were_sent_during_backward_are_those_of_the_definition(ranks):
    assert_means([rank["reduced"] for rank in ranks])
    assert len(ranks) == 2


def assert_means(passes):
    for first, second in zip(*passes, strict=True):
        assert_same(first["mean"], second["mean"])
        for a, b, got in zip(first["own"], second["own"], first["mean"], strict=True):
            if a.dim() > 1:
                a, b = (GradientTensor.from_float(t).dequantize() for t in (a, b))
                assert torch.equal(got, GradientTensor.from_float((a + b) * 0.5).dequantize())
            else:
                assert torch.equal(got, a / 2 + b / 2)


def test_gpus_copy_between_their_memories_also_in_a_group_with_gloo(tmp_path):
    ranks = on_processes(2, tmp_path, on_both_backends, backend="cpu:gloo,cuda:nccl")
    assert_means([rank["passes"] for rank in ranks])
    assert [rank["peers"] for rank in ranks] == [True, True]


def test_gpus_that_nccl_keeps_apart_do_not_copy_between_their_memories(tmp_path):
    ranks = on_processes(2, tmp_path, kept_apart, backend="nccl")
    assert_means([rank["passes"] for rank in ranks])
    assert [rank["peers"] for rank in ranks] == [False, False]


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_end_the_same(ranks, case, strategy):
    first, second = (rank[f"{case} {strategy}"] for rank in ranks)
    for key in ("grads", "weights"):
        assert_same(first[key], second[key], key)
    assert first["losses"] != second["losses"]


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_process_within_their_rounding(ranks, case, strategy):
    got, want = ranks[0][f"{case} {strategy}"]["grads"][0], run(case, None, strategy)["grads"][0]
    bound = 0.1 if is_low_bit(case) else 0.01
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert (got[key] - value).norm() <= bound * value.norm(), key


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("name", list(test_sharded.AUDITED))
def test_a_sharded_run_is_found_to_do_what_the_chart_declares(ranks, case, name):
    test_sharded.assert_audited([rank[f"{case} audits"][name] for rank in ranks], case, name)


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("name", ["sharded", "blocks", "hybrid"])
def test_sharded_training_is_that_of_one_process(ranks, case, name):
    got, other = (rank[f"{case} {name}"] for rank in ranks)
    net = test_sharded.Blocks if name == "blocks" else Net
    assert_same(got, other)
    want = run_sharded(case, None, net)
    bound = 0.15 if is_low_bit(case) else 0.01
    for key, value in want["grads"][0].items():
        assert (got["grads"][0][key] - value).norm() <= bound * value.norm(), key
    for key, value in want["weights"].items():
        assert (got["weights"][key] - value).norm() <= 2 * bound * value.norm() + 1e-6, key


@pytest.mark.parametrize("case", test_materialize.CASES)
def test_what_one_process_makes_trains_as_what_all_make(ranks, case):
    for rank in ranks:
        by_all, by_first = rank[f"{case} made"]
        assert_same(by_first, by_all)


@pytest.mark.parametrize("case", ALL)
def test_a_nan_on_one_process_skips_the_step_on_all(ranks, case):
    for strategy in STRATEGIES:
        first, second = (rank[f"{case} {strategy} nan"] for rank in ranks)
        assert_same(first, second)
        test_ddp_loops.assert_overflow_skipped(first)
    for rank in ranks:
        first, second, third = rank[f"{case} sharded nan"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third) and third.isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_infinity_that_te_layers_of_one_process_hide_skips_the_step_on_all(ranks, strategy):
    assert [rank[f"hidden {strategy}"] for rank in ranks] == [[2], [2]]


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("form", test_sharded_checkpoints.FORMS)
def test_a_sharded_run_goes_on_from_its_checkpoint_bit_for_bit(ranks, case, form):
    for rank in ranks:
        whole, got = rank[f"{case} resumed"]["whole"], rank[f"{case} resumed"][form]
        assert got["losses"] == whole["losses"][2:]
        assert_same(got["weights"], whole["weights"])
        assert_same(got["state"], whole["state"])
