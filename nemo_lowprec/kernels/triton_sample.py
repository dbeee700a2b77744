"""Reads some elements of many tensors of one format into one FP32 matrix, in one launch. Importing this file needs
Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher
from nemo_lowprec.kernels.multi_tensor import PointerTable
from nemo_lowprec.kernels.triton_blocks import decoded, power_of_two
from nemo_lowprec.kernels.triton_cast import TYPES

_SIZE, _WARPS = 1024, 4


@triton.jit
def _read_kernel(
    cuts_ptr, address_ptr, out_ptr, width, chunks, DTYPE: tl.constexpr, BLOCKED: tl.constexpr, SCALED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0) // chunks
    cut, row_of_addresses = cuts_ptr + member * 5, address_ptr + member * 3
    row, count, cols = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
    index = (tl.program_id(0) % chunks) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    r, c = index // cols, index % cols
    data = tl.load(row_of_addresses).to(tl.pointer_type(DTYPE))
    x = decoded(data, r * tl.load(cut + 3) + c, inside)
    if BLOCKED:
        exponents = tl.load(row_of_addresses + 1).to(tl.pointer_type(tl.uint8))
        at = r * tl.load(cut + 4) + c // 128
        x = x * power_of_two(tl.load(exponents + at, mask=inside, other=127).to(tl.int32))
    if SCALED:
        x = x * tl.load(tl.load(row_of_addresses + 2).to(tl.pointer_type(tl.float32)))
    tl.store(out_ptr + row * width + index, x, mask=inside)


_read = Launcher(_read_kernel, num_warps=_WARPS)


class SampleReader:
    """Reads the same cuts of tensors of one format again and again. The addresses stay on the GPU where they can.

    Args:
        cuts: for each tensor its row in the result, the number of elements, the columns of a row of the sample, and the
            distance of two such rows in the data and in the exponents.
        device: of the tensors.
    """

    def __init__(self, cuts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._cuts = torch.tensor(cuts, dtype=torch.int64).to(device)
        self._longest = max(cut[1] for cut in cuts)
        self._pointers = PointerTable()

    def read(
        self, data: Sequence[Tensor], exponents: Sequence[Tensor] | None, factors: Sequence[Tensor] | None, out: Tensor
    ) -> None:
        """Fill the rows of ``out``, FP32 [rows, width], contiguous. The row of a short sample keeps its rest.

        Args:
            data: contiguous, of one dtype.
            exponents: uint8, contiguous, of data in blocks of 128 elements; None for others.
            factors: FP32 [1], by which all values of a tensor are multiplied; None for none.
        """
        table = [0] * (3 * len(data))
        for at, tensors in enumerate((data, exponents, factors)):
            if tensors is not None:
                table[at::3] = [tensor.data_ptr() for tensor in tensors]
        addresses = self._pointers.upload(table, len(data), out.device, ())
        chunks, dtype = -(-self._longest // _SIZE), data[0].dtype
        numbers = out.shape[1], chunks
        _read(
            out.get_device(),
            (dtype, exponents is None, factors is None, tuple([(n == 1, n % 16 == 0) for n in numbers])),
            len(data) * chunks, (self._cuts, addresses, out, *numbers),
            lambda: {
                "DTYPE": TYPES[dtype], "BLOCKED": exponents is not None, "SCALED": factors is not None, "SIZE": _SIZE,
            },
        )  # fmt: skip
