"""The transpose of FP8 weights, which backward makes of frozen weights that are stored in FP8."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.formats import E4M3
from nemo_lowprec.kernels.loader import transpose_kernels
from nemo_lowprec.tensors import Fp8Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("shape", [(16, 16), (64, 128), (37, 48), (1, 130), (257, 1040), (4096, 14336)])
def test_every_byte_finds_its_place(shape):
    kernels = kernels_or_skip(transpose_kernels())
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    flipped = kernels.transpose(values.view(torch.float8_e4m3fn))
    assert flipped.dtype == torch.float8_e4m3fn and flipped.is_contiguous()
    assert torch.equal(flipped.view(torch.uint8), values.t())
    assert torch.equal(kernels.transpose(values), values.t())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stored_weight_is_the_operand_of_the_reference(transposed):
    weight = Fp8Weight.from_float(torch.randn(128, 256, device="cuda"), E4M3, torch.bfloat16)
    weight = weight.transposed() if transposed else weight
    how = {"rowwise": True, "columnwise": True}
    got, want = (backend.from_storage(weight, **how) for backend in (ScaledMMBackend(), ReferenceBackend()))
    for part, other in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
        assert part.data.is_contiguous() and torch.equal(part.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(part.scale_inv, other.scale_inv)
    assert ScaledMMBackend().from_storage(weight, rowwise=False, columnwise=True).rowwise is None
