"""The ``te`` backend: Transformer Engine's quantization kernels and FP8 GEMMs.

Only TE's stateless parts are used, its quantizers and ``general_gemm``; scales and histories belong to the operands.
TE is imported when a backend is made, never with this module.

Large tensors that are wanted in both orientations are quantized by the fused kernel of kernels/, which is faster on an
H200 (``benchmarks/backends.py``); small ones by TE's, whose launches cost the host less.

Where TE's kernels differ from the reference: they skip NaN when they take an amax. A tensor that holds a NaN is
recorded with, and under current scaling scaled by, the largest of its other elements, where the reference records
NaN and scales by 1. The NaN itself comes out as NaN on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.transformer_engine import import_te
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends import fused_activations
from nemo_lowprec.compute.backends.base import Backend, Orientation, Packing, is_transformed
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.te_packing import InBlocks, PerTensor
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats import AmaxSlot, FloatFormat, compute_amax
from nemo_lowprec.formats.gemm_block_scaling import CUBLAS_ROW_128, CUBLAS_SQUARE_128
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.tensors import Fp8Weight

_INSTALL = "install a transformer-engine[pytorch] that matches this PyTorch and CUDA, or use backend='torch'"
# By scaling: the compute capability that it needs, and TE's own check.
_NEEDS = {
    "delayed": ((8, 9), "is_fp8_available"),
    "current": ((8, 9), "is_fp8_available"),
    "blockwise": ((9, 0), "is_fp8_block_scaling_available"),
    "mxfp8": ((10, 0), "is_mxfp8_available"),
    "nvfp4": ((10, 0), "is_nvfp4_available"),
}
_LARGE = 2**24  # elements


class TEBackend(Backend):
    """All scalings but rowwise. Quantized operands are TE's tensor storages, not ``QuantizedOperand``."""

    name = "te"
    # 16 is what FP8 GEMMs need; 32 what MXFP8 blocks and NVFP4's packed rows need, and with it the fast
    # cast-and-transpose kernel runs. Zero rows change no result.
    row_multiple = 32
    ignores_autocast = True

    def __init__(self) -> None:
        self._te = _load()
        # By the slot's id and use. The slot is kept beside its quantizer, so that no other slot gets the same id.
        self._quantizers: dict[tuple[Any, ...], tuple[AmaxSlot, Any]] = {}

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "backend='te' needs an NVIDIA GPU; use backend='reference' on this machine"
        scaling = "delayed" if recipe is None else recipe.scaling
        if scaling not in _NEEDS:
            return f"Transformer Engine has no {scaling} scaling; use backend='torch' or another level"
        needed, check = _NEEDS[scaling]
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < needed:
            return (
                f"{scaling} scaling needs compute capability {needed[0]}.{needed[1]} or higher, "
                f"this GPU has {major}.{minor}; use another level or backend='reference'"
            )
        broken = _import_error()
        if broken:
            return broken
        available, reason = getattr(_load().te, check)(return_reason=True)
        return None if available else f"Transformer Engine: {reason.rstrip('.')}; use another level"

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        kernels = fused_kernels() if columnwise and values.numel() >= _LARGE else None
        slot = operand.slot
        if kernels is not None and slot is not None and not slot.cold and values.dtype != torch.float32:
            recorded = slot.amax if record else None
            row, col, scale_inv = kernels.quantize(values, slot.scale, operand.fmt, rowwise, True, recorded)
            return self._storage(row, col, scale_inv, operand.fmt, values.dtype)
        # TE's per-tensor and 128x128 kernels always write rowwise data.
        spare = columnwise and not rowwise and (operand.layout is None or operand.kind == "weight")
        quantizer = self._quantizer(values, operand, rowwise or spare, columnwise, record)
        storage = self._te.tex.quantize(values, quantizer)
        if spare:
            storage.update_usage(rowwise_usage=False)
        return storage

    def _storage(
        self, row: Tensor | None, col: Tensor | None, scale_inv: Tensor, fmt: FloatFormat, half: torch.dtype
    ) -> Any:
        """TE's form of what a fused kernel has quantized."""
        return self._te.te.Float8TensorStorage(
            data=None if row is None else row.view(torch.uint8),
            data_transpose=None if col is None else col.view(torch.uint8),
            fp8_scale_inv=scale_inv,
            fp8_dtype=self._te.dtype[fmt.dtype],
            fake_dtype=half,
        )

    def fuses(self, activation: Activation) -> bool:
        return fused_activations.is_faster(activation)

    def activate(
        self, activation: Activation, tensors: tuple[Tensor, ...], operand: Operand, *, columnwise: bool, record: bool,
        half: bool = True,
    ) -> tuple[Tensor | None, Any]:  # fmt: skip
        made = fused_activations.activate(activation, tensors, operand, columnwise, record, half)
        if made is None:
            return super().activate(activation, tensors, operand, columnwise=columnwise, record=record, half=half)
        return made.half, self._storage(made.row, made.col, made.scale_inv, operand.fmt, tensors[0].dtype)

    def activate_backward(
        self, activation: Activation, grad: Tensor, tensors: tuple[Tensor, ...], readers: list[Any], half: bool = True
    ) -> list[tuple[Tensor | None, Any, Tensor | None]]:
        found = fused_activations.activate_backward(activation, grad, tensors, readers, half)
        if found is None:
            return super().activate_backward(activation, grad, tensors, readers, half)
        data = [
            None if r is None else self._storage(m.row, m.col, m.scale_inv, r.operand.fmt, grad.dtype)
            for m, r in zip(found, readers, strict=True)
        ]
        return [(m.half, d, m.sums) for m, d in zip(found, data, strict=True)]

    def _quantizer(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool, record: bool) -> Any:
        slot = operand.slot
        if slot is None and (operand.layout is not None or operand.margin == 0):
            scheme = (operand.scaling, operand.kind, operand.fmt)
            return _stateless_quantizer(*scheme, rowwise, columnwise, values.device)
        # TE's kernels raise the amax buffer to the tensor's amax, as a slot needs it. They always write one: an amax
        # that is not recorded goes to a buffer that nobody reads.
        if slot is not None and not slot.cold:
            key = (id(slot), rowwise, columnwise, record)
            held = self._quantizers.get(key)
            if held is None or held[1].scale is not slot.scale:
                amax = slot.amax if record else _unread(values.device)
                held = slot, self._float8_quantizer(slot.scale, amax, operand, rowwise, columnwise)
                self._quantizers[key] = held
            return held[1]
        scale = operand.scale(compute_amax(values), record)  # TE's own current scaling knows no margin
        return self._float8_quantizer(scale, _unread(values.device), operand, rowwise, columnwise)

    def _float8_quantizer(self, scale: Tensor, amax: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> Any:
        dtype = self._te.dtype[operand.fmt.dtype]
        quantizer = self._te.te.Float8Quantizer(scale, amax, dtype, rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = True
        return quantizer

    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> Any:
        storage = self._te.te.Float8TensorStorage(
            data=weight.data_fp8.contiguous().view(torch.uint8),
            fp8_scale_inv=weight.scale_inv,
            fp8_dtype=self._te.dtype[weight.fmt.dtype],
            fake_dtype=weight.dtype,
        )
        storage.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)  # transposes where the GPU needs it
        return storage

    # TE's GEMMs take operands as cuBLAS does: A is the operand with the output's last dimension. The accumulators are
    # those of TE's recipes: fast in fprop, split in the backward GEMMs without ``fast_accum`` (and always split with
    # blockwise scales).

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if bias is not None and out_dtype == torch.float32:  # the epilogue adds half biases only
            return self.fprop(x, weight, None, out_dtype) + bias.float()
        half = None if bias is None else bias.to(out_dtype)
        return self._te.general_gemm(weight, x, out_dtype=out_dtype, layout="TN", bias=half)[0]

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        in_gemm = total is not None and isinstance(weight, self._te.te.Float8TensorStorage)
        dx = self._te.general_gemm(
            weight, grad_output, out_dtype=out_dtype, layout="NN", grad=True, use_split_accumulator=not self.fast_accum,
            out=total if in_gemm else None, accumulate=in_gemm,
        )[0]  # fmt: skip
        return dx if total is None or in_gemm else dx.add_(total)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return self._te.general_gemm(
            x,
            grad_output,
            out_dtype=out_dtype,
            layout="NT",
            grad=True,
            use_split_accumulator=not self.fast_accum,
            out=out,
        )[0]

    def describe(self, operand: Any) -> str:
        if isinstance(operand, self._te.te.MXFP8TensorStorage):
            return "mxfp8"
        return "nvfp4" if isinstance(operand, self._te.te.NVFP4TensorStorage) else "fp8"

    def stored(self, operand: Any) -> tuple[Orientation, bool]:
        parts = operand.get_metadata()
        if isinstance(operand, self._te.te.Float8TensorStorage):
            columnwise = parts["data"] is None
            data, scale_inv, layout = parts["data_transpose" if columnwise else "data"], parts["fp8_scale_inv"], None
        elif isinstance(operand, self._te.te.Float8BlockwiseQTensorStorage):
            columnwise = parts["rowwise_data"] is None
            side = "columnwise" if columnwise else "rowwise"
            data, scale_inv = parts[f"{side}_data"], parts[f"{side}_scale_inv"]
            layout = CUBLAS_SQUARE_128 if parts["is_2D_scaled"] else CUBLAS_ROW_128
        else:
            raise TypeError(f"The data of {type(operand).__name__} are read with backend='reference' only.")
        return Orientation(data.view(self._te.torch_dtype[parts["fp8_dtype"]]), scale_inv, layout), columnwise

    def save(self, operand: Any) -> tuple[list[Tensor | None], Any]:
        operand.update_usage(rowwise_usage=False)
        return operand.prepare_for_saving()

    def copy_operand(self, operand: Any) -> Any:
        # ``save`` removes tensors from a storage.
        storage = object.__new__(type(operand))
        storage.__dict__.update(operand.__dict__)
        return storage

    def packing(self, operand: Operand) -> Packing | None:
        found = self._te
        if found.one_copy():
            return None  # Blackwell's GEMMs read one copy in both orientations, and MXFP8 and NVFP4 pack otherwise
        dtype = found.dtype[operand.fmt.dtype]
        if operand.layout is None:
            return PerTensor(found.te.Float8TensorStorage, dtype)
        quantizer = _stateless_quantizer(operand.scaling, operand.kind, operand.fmt, True, True, torch.device("cuda"))
        return InBlocks(found.te.Float8BlockwiseQTensorStorage, dtype, quantizer)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
        if weight is None or x.numel() == 0 or x.shape[-1] % 16 or is_transformed():
            return super().rms_norm(x, weight, eps, zero_centered)
        out: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, zero_centered)
        return out.view(x.shape)

    def restore(self, tensors: list[Tensor | None], meta: Any) -> Any:
        # Into a copy: with retain_graph ``meta`` is restored again, and must not keep the tensors alive.
        storage = self.copy_operand(meta)
        storage.restore_from_saved(list(tensors))
        return storage


class _RMSNorm(torch.autograd.Function):
    """TE's RMSNorm kernels: one pass each way where torch's backward takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        found = _load()
        values = x.contiguous()
        out, _, rstdev = found.tex.rmsnorm_fwd(values, weight, eps, None, None, found.dtype[x.dtype], 0, zero_centered)
        ctx.save_for_backward(x, weight, rstdev)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight, rstdev = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed():
            return *_rms_norm_gradients(ctx, x, weight, grad_output), None, None
        x, grad = x.contiguous(), grad_output.to(x.dtype).contiguous()
        dx, dweight = _load().tex.rmsnorm_bwd(grad, x, rstdev, weight, 0, ctx.zero_centered)
        return dx, dweight, None, None


def _rms_norm_gradients(ctx: Any, x: Tensor, weight: Tensor, grad_output: Tensor) -> Iterator[Tensor | None]:
    """The gradients of ``_RMSNorm`` by torch's operations, which have derivatives of any order."""
    needed = ctx.needs_input_grad[:2]
    wanted = [t for t, need in zip((x, weight), needed, strict=True) if need]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out = ReferenceBackend().rms_norm(x, weight, ctx.eps, ctx.zero_centered)
    found = iter(torch.autograd.grad(out, wanted, grad_output, create_graph=create_graph))
    return (next(found) if need else None for need in needed)


@lru_cache(maxsize=1)
def _load() -> SimpleNamespace:
    """TE's modules and functions that the backend uses."""
    te = import_te()
    found = SimpleNamespace(
        te=te,
        tex=import_te("transformer_engine_torch"),
        general_gemm=import_te("transformer_engine.pytorch.cpp_extensions").general_gemm,
        dtype=(dtype := import_te("transformer_engine.pytorch.constants").TE_DType),
        torch_dtype={dtype[own]: own for own in (torch.float8_e4m3fn, torch.float8_e5m2)},
        one_copy=import_te("transformer_engine.pytorch.utils").is_non_tn_fp8_gemm_supported,
    )
    for name in (
        "Float8Quantizer", "Float8BlockQuantizer", "Float8TensorStorage", "Float8BlockwiseQTensorStorage",
        "is_fp8_block_scaling_available",
    ):  # fmt: skip
        getattr(te, name)
    return found


@lru_cache(maxsize=1)
def _import_error() -> str | None:
    try:
        _load()
    except ImportError as error:
        return f"Transformer Engine is not installed ({error}); {_INSTALL}"
    except AttributeError as error:
        return f"this Transformer Engine is too old ({error}); {_INSTALL}"
    except (OSError, RuntimeError) as error:
        # An import after another package has loaded cuDNN may fail in this way, too.
        return f"Transformer Engine cannot be loaded ({error}); import it before any CUDA work, {_INSTALL}"
    return None


@lru_cache(maxsize=16)
def _unread(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, dtype=torch.float32)


@lru_cache(maxsize=256)
def _stateless_quantizer(
    scaling: str, kind: str, fmt: FloatFormat, rowwise: bool, columnwise: bool, device: torch.device
) -> Any:
    """TE's quantizer for a scaling without state, as its default recipes configure it for ``kind``."""
    found = _load()
    te, dtype = found.te, found.dtype[fmt.dtype]
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    if scaling == "current":
        quantizer = te.Float8CurrentScalingQuantizer(dtype, device=device, **usage)
    elif scaling == "blockwise":
        dim = 2 if kind == "weight" else 1
        quantizer = te.Float8BlockQuantizer(dtype, force_pow_2_scales=True, block_scaling_dim=dim, **usage)
    elif scaling == "mxfp8":
        quantizer = te.MXFP8Quantizer(dtype, **usage)
        quantizer.optimize_for_gemm = True  # scales in the order that the GEMM reads
    else:
        rotate = kind != "weight"
        quantizer = te.NVFP4Quantizer(
            with_rht=rotate,
            with_post_rht_amax=rotate,
            with_2d_quantization=not rotate,
            stochastic_rounding=kind == "grad_output",
            **usage,
        )
        quantizer.optimize_for_gemm = rotate
    quantizer.internal = True
    return quantizer
