"""Messages of FP8 gradients; the fused kernels are held to this reference in tests/gpu."""

import pytest
import torch

from nemo_lowprec.comm.wire import Messages, Packer, mean_of_messages
from nemo_lowprec.tensors import GradientTensor

SHAPES = [torch.Size((37, 129)), torch.Size((64, 256))]


@pytest.mark.parametrize("own", range(3))
def test_a_message_may_lie_elsewhere(own):
    layout = Messages.in_turn(SHAPES, 3)
    received = []
    for seed in range(3):
        torch.manual_seed(seed)
        gradients = [GradientTensor.from_float(torch.randn(s)) for s in SHAPES]
        messages = torch.zeros(3, layout.bytes, dtype=torch.uint8)
        Packer(layout).pack([(g.data_blocks, g.exponent, g.nonfinite) for g in gradients], messages)
        received.append(messages[0])
    together = torch.stack(received)
    want, got = torch.empty(layout.bytes, dtype=torch.uint8), torch.empty(layout.bytes, dtype=torch.uint8)
    mean_of_messages(together, layout, want)
    elsewhere = together.clone()
    elsewhere[own] = 0x55
    mean_of_messages(elsewhere, layout, got, (own, together[own]))
    assert torch.equal(got, want)
    assert (elsewhere[own] == 0x55).all()  # what was received stays
