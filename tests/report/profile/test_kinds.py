"""Kinds of kernels by their names."""

import ast
from pathlib import Path

import pytest

import nemo_lowprec
from nemo_lowprec.report.profile.kinds import KINDS, kind_of

KERNELS = Path(nemo_lowprec.__file__).parent / "kernels"
# Of this package's kernels those that do something else than elementwise work, by file.
EXPECTED = {
    "triton_blocks": "quantization", "triton_cast": "quantization", "triton_rows": "quantization",
    "triton_tiles": "quantization", "triton_transpose": "quantization", "triton_weights": "quantization",
    "triton_grouped": "gemm", "triton_grouped_blocks": "gemm", "triton_wire": "communication",
}  # fmt: skip
APART = {
    ("triton_blocks", "_squares_kernel"): "elementwise", ("triton_blocks", "_sum_kernel"): "elementwise",
    ("triton_grouped", "_tables_kernel"): "elementwise", ("triton_grouped_blocks", "_quantize_kernel"): "quantization",
}  # fmt: skip


def kernels():
    for path in sorted(KERNELS.glob("triton_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield path.stem, node.name


@pytest.mark.parametrize(("file", "name"), list(kernels()))
def test_kernels_of_this_package(file, name):
    assert kind_of(name) == APART.get((file, name), EXPECTED.get(file, "elementwise"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "gemm"),
        ("aten::_scaled_mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::mm", "gemm"),
        ("aten::_grouped_mm", "gemm"),
        ("aten::sum", "elementwise"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void transformer_engine::cast_transpose_fused_kernel<true>", "quantization"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "elementwise",
        ),
        ("Memcpy DtoD (Device -> Device)", "elementwise"),
    ],
)
def test_kernels_of_others(name, kind):
    assert kind_of(name) == kind and kind in KINDS
