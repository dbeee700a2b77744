"""Megatron-core's parallel sizes on two GPUs: losses beside one GPU's, checkpoints at other sizes and levels."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_lowprec.models import export_checkpoint
from tests.megatron_cases import (
    FEW,
    SENDS,
    TWO,
    TWO_GPUS,
    assert_as_declared,
    assert_close,
    assert_norms_close,
    assert_resumed,
    bound,
    results,
)
from tests.megatron_jobs import val_loss

pytestmark = TWO_GPUS
RESUMED = ["tp2_sp", "pp2", "pp2_vpp2", "dp2"]
ELSEWHERE = [
    ("bf16_mixed", "tp2", "bf16_mixed", "pp2"),
    ("bf16_mixed", "pp2", "msamp_o3+fp16", "dp2"),
    ("msamp_o3+fp16", "dp2", "bf16_with_fp8_mixed", "tp2"),
    ("bf16_with_fp8_mixed+fp8_params", "tp2", "msamp_o2+fp16", "pp2"),
]


@pytest.fixture(scope="module")
def alone(megatron_weights, tmp_path_factory):
    groups = [{case: {"case": case, "sizes": {}, "weights": megatron_weights}} for case in FEW]
    return results(1, tmp_path_factory.mktemp("alone"), *groups)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(megatron_weights, checkpoints):
    folder = checkpoints
    groups = {case: {} for case in FEW}
    for sizes, arguments in TWO.items():
        for case in FEW:
            job = {"case": case, "sizes": arguments, "world": 2, "data_parallel": 2 if "dp2" in sizes else 1}
            saved = folder / sizes / case
            groups[case][f"{case} {sizes}"] = {**job, "weights": megatron_weights, "save": (str(saved), 2)}
            if sizes in RESUMED:
                groups[case][f"resumed {case} {sizes}"] = {**job, "ckpt": str(saved / "step=2.ckpt")}
    for saved_at, before, loaded_at, after in ELSEWHERE:
        groups[saved_at][f"{saved_at} {before} {loaded_at} {after}"] = {
            "case": loaded_at, "sizes": TWO[after], "world": 2, "data_parallel": 2 if "dp2" in after else 1,
            "ckpt": str(folder / before / saved_at / "step=2.ckpt"),
        }  # fmt: skip
    return results(2, folder, *groups.values())


@pytest.mark.parametrize("sizes", TWO)
@pytest.mark.parametrize("case", FEW)
def test_sizes_give_the_same_losses(case, sizes, alone, two):
    assert_close(two(f"{case} {sizes}"), alone(case), bound(case))
    assert_norms_close(two(f"{case} {sizes}"), alone(case))
    assert two(f"{case} {sizes}", 1)["losses"] == two(f"{case} {sizes}")["losses"]


@pytest.mark.parametrize("sizes", TWO)
@pytest.mark.parametrize("case", FEW)
def test_a_run_is_found_to_do_what_the_chart_declares(case, sizes, two):
    run = two(f"{case} {sizes}")
    assert_as_declared(run)
    assert ("Comm" in {column for column, *_ in run["audit"]}) == (sizes in SENDS)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("sizes", RESUMED)
def test_resume_bit_for_bit(case, sizes, two):
    for rank in range(2):
        assert_resumed(two(f"resumed {case} {sizes}", rank), two(f"{case} {sizes}", rank))


@pytest.mark.parametrize("sizes", ["tp2_sp", "pp2_vpp2", "dp2"])
@pytest.mark.parametrize("case", ["bf16_mixed", "msamp_o3+fp16"])
def test_a_checkpoint_becomes_a_transformers_model(case, sizes, two, checkpoints, tmp_path):
    run = two(f"{case} {sizes}")
    export_checkpoint(checkpoints / sizes / case / "step=6.ckpt", tmp_path / "out", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert val_loss(model) == pytest.approx(run["val"][-1], abs=bound(case) / 2)


@pytest.mark.parametrize(("saved_at", "before", "loaded_at", "after"), ELSEWHERE)
def test_other_sizes_and_levels_go_on(saved_at, before, loaded_at, after, two):
    found, wanted = two(f"{saved_at} {before} {loaded_at} {after}"), two(f"{saved_at} {before}")
    assert_close(found, wanted, bound(saved_at, loaded_at))
