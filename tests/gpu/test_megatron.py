"""Megatron-core on one GPU and on two: every level, parallel sizes, checkpoints."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_lowprec.models import export_checkpoint
from tests.megatron_jobs import CASES, make_weights, run_all, val_loss
from tests.processes import on_processes
from tests.support import level_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
needs_two = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
TWO = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2_late": {"overlap_grad_reduce": False, "overlap_param_gather": False},
}
FEW = ["bf16_mixed", "bf16_with_fp8_mixed+fp8_params", "msamp_o2+fp16", "msamp_o3+fp16"]
OWN = [c for c in CASES if "fp8_params" not in c and c != "msamp_o3+fp16"]  # of layers that this package converts
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01,
}  # fmt: skip
SENDS = ["cp2", "dp2", "dp2_late"]  # context-parallel processes average their gradients, too
COLUMNS = {"Computation (GEMM)", "Weight", "Master weight", "Weight gradient", "Optimizer states"}
RESUMED = ["tp2_sp", "pp2", "pp2_vpp2", "dp2"]
FULL_WEIGHTS = ["fp16_amp", "te_fp8"]  # whose residual stream is FP32
ELSEWHERE = [
    ("bf16_mixed", "tp2", "bf16_mixed", "pp2"),
    ("bf16_mixed", "pp2", "msamp_o3+fp16", "dp2"),
    ("msamp_o3+fp16", "dp2", "bf16_with_fp8_mixed", "tp2"),
    ("bf16_with_fp8_mixed+fp8_params", "tp2", "msamp_o2+fp16", "pp2"),
]
# Of losses between 5.6 and 4.7 nats: what other kernels and the order of sums make of the same model and data.
BOUND, BOUND_FP8 = 0.005, 0.06


def bound(*cases):
    """The larger one where a GEMM of one of the cases runs in FP8."""
    return BOUND_FP8 if any(level_of(case).has_fp8 for case in cases) else BOUND


def results(world, folder, jobs):
    """What became of each job; a failure is raised where a test looks at it."""
    found = on_processes(world, folder, run_all, jobs, backend="nccl")

    def of(name, rank=0):
        result = found[rank].get(name, "did not run: one before it failed")
        assert not isinstance(result, str), result
        return result

    return of


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return make_weights(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    jobs = {}
    for case in CASES:
        saved = folder / case
        jobs[f"plain {case}"] = {"case": case, "sizes": {}, "kind": "plain"}
        jobs[f"gpt {case}"] = {"case": case, "sizes": {}, "weights": weights, "save": (str(saved), 2)}
        jobs[f"resumed {case}"] = {"case": case, "sizes": {}, "ckpt": str(saved / "step=2.ckpt")}
    jobs |= {f"again {case}": {"case": case, "sizes": {}, "weights": weights, "again": True} for case in FEW}
    jobs |= {f"any {case}": {"case": case, "sizes": {}, "kind": "any", "again": case in FEW} for case in OWN}
    jobs["any gathers"] = {"case": "bf16_mixed", "sizes": {"overlap_param_gather": True}, "kind": "any"}
    return results(1, folder, jobs)


def assert_resumed(resumed, whole):
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["weights"].keys() == whole["weights"].keys()
    assert all(torch.equal(resumed["weights"][n], w) for n, w in whole["weights"].items())


def assert_close(found, wanted, atol):
    torch.testing.assert_close(found["losses"], wanted["losses"][-len(found["losses"]) :], rtol=0, atol=atol)
    torch.testing.assert_close(found["val"][-1], wanted["val"][-1], rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_every_level_learns_as_on_the_transformers_path(case, one):
    gpt = one(f"gpt {case}")
    assert gpt["losses"][-1] < gpt["losses"][0] - 0.2
    assert_close(gpt, one(f"plain {case}"), bound(case))


@pytest.mark.parametrize("case", OWN)
def test_any_module_learns_as_on_the_transformers_path(case, one):
    assert_close(one(f"any {case}"), one(f"plain {case}"), bound(case))


@pytest.mark.parametrize("case", CASES)
def test_resume_bit_for_bit(case, one):
    assert_resumed(one(f"resumed {case}"), one(f"gpt {case}"))


@pytest.mark.parametrize(
    ("kind", "case"), [*(("again", case) for case in FEW), *(("any", case) for case in OWN if case in FEW)]
)
def test_stages_follow_each_other_on_one_model(kind, case, one):
    run = one(f"{kind} {case}")
    # Layers of our own are converted anew, with new scales.
    atol = 0.01 if kind == "any" and level_of(case).has_fp8 else 0.001
    assert run["later"]["val"] == pytest.approx(run["val"][-1], abs=atol)
    assert run["later"]["loss"] < run["losses"][0] - 0.2


def test_weights_of_any_module_are_there_before_its_forward(one):
    with pytest.raises(AssertionError, match="overlap_param_gather=True: CausalLM is not built by Megatron-core"):
        one("any gathers")


def assert_as_declared(run):
    assert {column for column, *_ in run["audit"]} >= COLUMNS
    assert [line for line in run["audit"] if line[2] != line[3]] == []


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_found_to_do_what_the_chart_declares(case, one):
    assert_as_declared(one(f"gpt {case}"))


@pytest.mark.parametrize("case", OWN)
def test_any_module_is_found_to_do_what_the_chart_declares(case, one):
    assert_as_declared(one(f"any {case}"))


@pytest.fixture(scope="module")
def alone(weights, tmp_path_factory):
    jobs = {case: {"case": case, "sizes": {}, "weights": weights} for case in FEW + FULL_WEIGHTS}
    jobs |= {f"any {case}": {"case": case, "sizes": {}, "kind": "any"} for case in OWN}
    jobs["masked"] = {"case": "bf16_mixed", "sizes": {}, "weights": weights, "masked": True}
    return results(1, tmp_path_factory.mktemp("alone"), jobs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(weights, checkpoints):
    folder = checkpoints
    jobs = {}
    for sizes, arguments in TWO.items():
        for case in FEW:
            job = {"case": case, "sizes": arguments, "world": 2, "data_parallel": 2 if "dp2" in sizes else 1}
            saved = folder / sizes / case
            jobs[f"{case} {sizes}"] = {**job, "weights": weights, "save": (str(saved), 2)}
            if sizes in RESUMED:
                jobs[f"resumed {case} {sizes}"] = {**job, "ckpt": str(saved / "step=2.ckpt")}
    for saved_at, before, loaded_at, after in ELSEWHERE:
        jobs[f"{saved_at} {before} {loaded_at} {after}"] = {
            "case": loaded_at, "sizes": TWO[after], "world": 2, "data_parallel": 2 if "dp2" in after else 1,
            "ckpt": str(folder / before / saved_at / "step=2.ckpt"),
        }  # fmt: skip
    for case in FULL_WEIGHTS:
        jobs[f"{case} pp2"] = {"case": case, "sizes": TWO["pp2"], "world": 2, "weights": weights}
    for case in OWN:
        jobs[f"any {case}"] = {"case": case, "sizes": {}, "world": 2, "data_parallel": 2, "kind": "any"}
    jobs["masked"] = {"case": "bf16_mixed", "sizes": TWO["cp2"], "world": 2, "weights": weights, "masked": True}
    for case in FEW:
        whole = {"case": case, "sizes": {}, "world": 2, "data_parallel": 2, "transformer": EXPERTS}
        spread = {**whole, "sizes": {"expert_model_parallel_size": 2}}
        place, other = folder / "experts" / case, folder / "whole" / case
        jobs[f"{case} experts"] = {**spread, "save": (str(place), 2)}
        jobs[f"resumed {case} experts"] = {**spread, "ckpt": str(place / "step=2.ckpt")}
        jobs[f"whole {case} experts"] = {**whole, "ckpt": str(place / "step=2.ckpt"), "save": (str(other), 2)}
        jobs[f"spread {case} experts"] = {**spread, "ckpt": str(other / "step=4.ckpt")}
    quick = {
        "case": "msamp_o3+fp16", "sizes": {"expert_model_parallel_size": 2, "checkpoint_form": "dp_reshardable"},
        "world": 2, "data_parallel": 2, "transformer": EXPERTS,
    }  # fmt: skip
    jobs["quick experts"] = {**quick, "save": (str(folder / "quick"), 2)}
    jobs["resumed quick experts"] = {**quick, "ckpt": str(folder / "quick" / "step=2.ckpt")}
    return results(2, folder, jobs)


class TestTwo:
    pytestmark = needs_two

    @pytest.mark.parametrize("sizes", TWO)
    @pytest.mark.parametrize("case", FEW)
    def test_sizes_give_the_same_losses(self, case, sizes, alone, two):
        assert_close(two(f"{case} {sizes}"), alone(case), bound(case))
        torch.testing.assert_close(two(f"{case} {sizes}")["norms"], alone(case)["norms"], rtol=0.15, atol=0)
        assert two(f"{case} {sizes}", 1)["losses"] == two(f"{case} {sizes}")["losses"]

    @pytest.mark.parametrize("sizes", TWO)
    @pytest.mark.parametrize("case", FEW)
    def test_a_run_is_found_to_do_what_the_chart_declares(self, case, sizes, two):
        run = two(f"{case} {sizes}")
        assert_as_declared(run)
        assert ("Comm" in {column for column, *_ in run["audit"]}) == (sizes in SENDS)

    @pytest.mark.parametrize("case", FEW)
    @pytest.mark.parametrize("sizes", RESUMED)
    def test_resume_bit_for_bit(self, case, sizes, two):
        for rank in range(2):
            assert_resumed(two(f"resumed {case} {sizes}", rank), two(f"{case} {sizes}", rank))

    @pytest.mark.parametrize("case", FEW)
    def test_experts_that_are_spread_over_processes(self, case, two):
        run = two(f"{case} experts")
        assert run["losses"][-1] < run["losses"][0] - 0.2
        for rank in range(2):
            assert_resumed(two(f"resumed {case} experts", rank), two(f"{case} experts", rank))

    @pytest.mark.parametrize("case", FEW)
    def test_experts_on_all_processes_learn_alike(self, case, two):
        run = two(f"{case} experts")
        for where in ("whole", "spread"):
            found = two(f"{where} {case} experts")
            assert_close(found, run, bound(case))
            wanted = run["norms"][-len(found["norms"]) :]
            torch.testing.assert_close(found["norms"], wanted, rtol=0.15, atol=0)

    def test_experts_resume_where_parts_are_saved_as_they_lie(self, two):
        for rank in range(2):
            assert_resumed(two("resumed quick experts", rank), two("quick experts", rank))

    @pytest.mark.parametrize("case", FULL_WEIGHTS)
    def test_stages_pass_on_fp32(self, case, alone, two):
        assert_close(two(f"{case} pp2"), alone(case), bound(case))

    @pytest.mark.parametrize("case", OWN)
    def test_any_module_learns_the_same_on_two(self, case, alone, two):
        found, other, wanted = two(f"any {case}"), two(f"any {case}", 1), alone(f"any {case}")
        torch.testing.assert_close(found["val"][-1], wanted["val"][-1], rtol=0, atol=bound(case))
        torch.testing.assert_close(found["norms"], wanted["norms"], rtol=0.15, atol=0)
        assert found["norms"] == other["norms"]
        assert all(torch.equal(other["weights"][n], w) for n, w in found["weights"].items())

    def test_context_parallel_processes_with_other_numbers_of_labels(self, alone, two):
        assert_close(two("masked"), alone("masked"), bound("bf16_mixed"))
        torch.testing.assert_close(two("masked")["norms"], alone("masked")["norms"], rtol=0.02, atol=0)

    @pytest.mark.parametrize("sizes", ["tp2_sp", "pp2_vpp2", "dp2"])
    @pytest.mark.parametrize("case", ["bf16_mixed", "msamp_o3+fp16"])
    def test_a_checkpoint_becomes_a_transformers_model(self, case, sizes, two, checkpoints, tmp_path):
        run = two(f"{case} {sizes}")
        export_checkpoint(checkpoints / sizes / case / "step=6.ckpt", tmp_path / "out", dtype="fp32")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert val_loss(model) == pytest.approx(run["val"][-1], abs=bound(case) / 2)

    @pytest.mark.parametrize(("saved_at", "before", "loaded_at", "after"), ELSEWHERE)
    def test_other_sizes_and_levels_go_on(self, saved_at, before, loaded_at, after, two):
        found, wanted = two(f"{saved_at} {before} {loaded_at} {after}"), two(f"{saved_at} {before}")
        assert_close(found, wanted, bound(saved_at, loaded_at))
