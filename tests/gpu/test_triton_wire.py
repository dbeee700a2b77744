"""The fused kernels for FP8 messages: bit for bit the plain-torch reference."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.comm import wire
from nemo_lowprec.comm.wire import Messages, Packer, fused_wire, mean_of_messages
from nemo_lowprec.tensors import GradientTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Whole blocks only; ragged rows; what is empty; many tiles.
SHAPES = {
    "aligned": [(64, 256), (1, 128), (300, 1024)],
    "ragged": [(37, 129), (5, 3), (64, 256), (3, 5, 7, 9), (1, 1)],
    "empty": [(0, 4), (7, 300), (4, 0)],
    "only_empty": [(0, 4)],
}
WORLDS = [1, 2, 3, 8]


@pytest.fixture(autouse=True)
def kernels():
    return kernels_or_skip(fused_wire())


def without_kernels(monkeypatch):
    monkeypatch.setattr(wire, "fused_wire", lambda: None)


def make(shapes, seed):
    torch.manual_seed(seed)
    values = [torch.randn(s, device="cuda") * torch.exp2(torch.randint(-20, 20, s, device="cuda")) for s in shapes]
    return [GradientTensor.from_float(v) for v in values]


def bits(gradients):
    return [[p.view(torch.uint8) if p.element_size() == 1 else p for p in g.parts()] for g in gradients]


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_messages_are_packed_averaged_and_unpacked_as_by_the_reference(shapes, world, monkeypatch):
    shapes = [torch.Size(s) for s in shapes]
    layout = Messages.in_turn(shapes, world)
    sources = [make(shapes, seed) for seed in range(world)]
    if sources[0][0].numel() > 300:
        spoilt = sources[-1][0].dequantize()
        spoilt.view(-1)[200] = float("inf")
        sources[-1][0] = GradientTensor.from_float(spoilt)

    def rows(gradients):
        return [(g.data_blocks, g.exponent, g.nonfinite) for g in gradients]

    def everything():
        packer = Packer(layout)
        packed = [torch.zeros(world, layout.bytes, dtype=torch.uint8, device="cuda") for _ in sources]
        for gradients, messages in zip(sources, packed, strict=True):
            packer.pack(rows(gradients), messages)
        # What one process receives: the first message of each.
        mean = torch.empty(layout.bytes, dtype=torch.uint8, device="cuda")
        received = torch.stack([p[0] for p in packed])
        mean_of_messages(received, layout, mean)
        for own in range(world):
            elsewhere, again = received.clone(), torch.empty_like(mean)
            elsewhere[own] = 0x55
            mean_of_messages(elsewhere, layout, again, (own, received[own].clone()))
            assert torch.equal(again, mean)
        into = make(shapes, 99)
        packer.unpack(packed[-1], rows(into))
        return packed, mean, into

    packed, mean, into = everything()
    without_kernels(monkeypatch)
    want_packed, want_mean, want_into = everything()
    assert all(torch.equal(a, b) for a, b in zip(packed, want_packed, strict=True))
    nan = (want_mean[: layout.chunk * 128] & 0x7F) == 0x7F  # which of the NaNs does not matter
    same = mean == want_mean
    same[: nan.numel()] |= nan & ((mean[: nan.numel()] & 0x7F) == 0x7F)
    assert same.all()
    assert_equal(bits(into), bits(want_into))
    assert_equal(bits(into), bits(sources[-1]))
