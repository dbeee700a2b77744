"""Kernels are told apart by their names, and the GPU time of each kind is summed."""

import pytest

from benchmarks.kernel_kinds import KINDS, kind_of, milliseconds

# Names of kernels of cuBLAS, cuDNN, torch and this package, shortened.
KERNELS = {
    "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT": "gemm",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x1": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*": "attention",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4": "attention",
    "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4": "optimizer",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "step_kernel": "optimizer",
    "_backward_kernel": "other",
    "Memcpy DtoD (Device -> Device)": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_kind_that_its_name_tells(name: str) -> None:
    assert kind_of(name) == KERNELS[name]


def test_times_are_summed_by_kind_and_every_kind_has_a_time() -> None:
    found = milliseconds([("step_kernel", 1500.0), ("_cast_kernel", 250.0), ("_join_kernel", 250.0)])
    assert found == {"attention": 0.0, "gemm": 0.0, "optimizer": 1.5, "other": 0.5} and tuple(found) == KINDS
