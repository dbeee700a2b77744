"""How optimizer states are stored: FP32 and BF16 as they are, FP16 and FP8 in blocks with power-of-two scales.

Adam would diverge in two ways if all moments were rounded to nearest. Where 1 - beta is less than half of the step
between two numbers of a format, a moment never decays: such moments are rounded stochastically. And where the second
moment becomes zero while the first does not, the update is exp_avg / eps: a zero is stored as the smallest positive
number of the format, except in blocks of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import quantize_rows
from nemo_lowprec.formats.floats import E2M5, E5M3, FloatFormat
from nemo_lowprec.formats.stochastic import round_stochastic
from nemo_lowprec.tensors import BlockScaledTensor
from nemo_lowprec.tensors.block_scaled_tensor import quantize_blocks_of_rows
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_shard
from nemo_lowprec.tensors.marks import is_matrix

StateFormat = Literal["fp32", "bf16", "fp16", "fp8"]
_FORMATS = get_args(StateFormat)
MUON = "muon's momentum_buffer"  # which is stored in another form than SGD's
_IN_8_BITS = {"exp_avg_sq": E5M3, MUON: E2M5}
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # names of states; the last is SGD's and Muon's first moment
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StateFormats:
    """Storage of an optimizer's states.

    Parameters of fewer than two dimensions (norms, biases) keep FP32 masters, and FP32 states unless ``vectors``: they
    are a thousandth of a model, and a norm's weight of 1.0 would not feel updates below 0.0005 in FP16.

    Attributes:
        exp_avg, exp_avg_sq: ``fp32``, ``bf16``, ``fp16`` or ``fp8`` (the last two in blocks of 128 elements). The
            first also holds for ``momentum_buffer``. The second moment's ``fp8`` is E5M3, that of
            Muon's momentum E2M5, every other one E4M3.
        master_weight: ``fp32``, ``fp16`` (in blocks) or None, for parameters below FP32.
        stochastic_rounding: whether the master (or the parameter without one) is rounded so, if it is 16-bit.
        seed: of stochastic rounding, also of the moments' (see ``stands_still``).
        vectors: whether states of parameters of fewer than two dimensions have these formats, too.
    """

    exp_avg: StateFormat = "fp32"
    exp_avg_sq: StateFormat = "fp32"
    master_weight: Literal["fp16", "fp32"] | None = None
    stochastic_rounding: bool = False
    seed: int = 0
    vectors: bool = False

    def __post_init__(self) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            if getattr(self, name) not in _FORMATS:
                raise ValueError(f"{name}_dtype={getattr(self, name)!r} must be one of: {', '.join(_FORMATS)}.")
        if self.master_weight not in (None, "fp16", "fp32"):
            raise ValueError(f"master_weight_dtype={self.master_weight!r} must be one of: None, 'fp16', 'fp32'.")
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(f"stochastic_rounding={self.stochastic_rounding!r} must be True or False.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r} must be an integer from 0 to 2**32 - 1.")

    def of(self, name: str, param: Tensor) -> StateFormat:
        """Format of the state ``name`` of ``param``."""
        if not is_matrix(param) and not (self.vectors and name in MOMENTS):
            return "fp32"
        found: StateFormat = getattr(self, "exp_avg" if name == "momentum_buffer" else name)
        return found


def stands_still(beta: float, dtype: torch.dtype) -> bool:
    """Whether a moment of this beta and dtype would never decay if it were rounded to nearest."""
    own = {torch.uint8: 2.0**-3, torch.int8: 2.0**-5}
    eps = own.get(dtype) or torch.finfo(dtype).eps
    return dtype != torch.float32 and 1 - beta < eps / 2


def _blocks_of(name: str, fmt: StateFormat) -> FloatFormat | None:
    """The format of the blocks of a state or master; None where it is stored plainly."""
    return {"fp16": FP16, "fp8": _IN_8_BITS.get(name, E4M3)}.get(fmt)


def store(values: Tensor, name: str, fmt: StateFormat) -> Tensor:
    """A new tensor that holds ``values``, of the state or master ``name``, in ``fmt``."""
    blocks = _blocks_of(name, fmt)
    if blocks is not None:
        return BlockScaledTensor(*quantize_blocks_of_rows(values.detach(), blocks, name == "exp_avg_sq"), blocks)
    return values.detach().to(_PLAIN[fmt], copy=True, memory_format=torch.contiguous_format)


def zeros(param: Tensor, name: str, fmt: StateFormat) -> Tensor:
    """A new tensor of zeros, the state ``name`` in ``fmt``, of the shape and on the device of ``param``."""
    blocks = _blocks_of(name, fmt)
    if blocks is not None:
        return BlockScaledTensor.zeros(param.shape, blocks, param.device)
    return torch.zeros(param.shape, dtype=_PLAIN[fmt], device=param.device)


def write(state: Tensor, values: Tensor, salt: int | None = None, positive: bool = False) -> None:
    """Store FP32 ``values`` in an existing state, master or weight.

    Args:
        salt: round stochastically with this random stream; None rounds to nearest.
        positive: for states stored in blocks, as in ``quantize_rows``.
    """
    if isinstance(state, BlockScaledTensor):
        state.set_blocks_(*quantize_rows(values, state.fmt, salt=salt, positive=positive))
    else:
        state.copy_(values if salt is None else round_stochastic(values, state.dtype, salt))


def portable(state: Tensor) -> Tensor:
    """A state as a plain tensor of exactly its values, which any optimizer loads.

    Block-scaled states are decoded on the CPU, 8 bits to BF16 and FP16 to FP32: a checkpoint takes no GPU memory.
    """
    local = local_shard(state)
    if not isinstance(local, BlockScaledTensor):
        return state.detach()
    dtype = torch.float32 if local.fmt == FP16 else torch.bfloat16
    if is_sharded(state):  # stays on its device: processes exchange shards there
        return as_dtensor_like(local.dequantize(dtype), state)
    on_cpu: BlockScaledTensor = local.to("cpu")  # type: ignore[assignment]
    return on_cpu.dequantize(dtype)
