"""Weight gradients in FP32 at levels with half weights: what the GEMM accumulates, not rounded to half."""

import pytest
import torch
from torch import nn

from nemo_lowprec.compute.half_linear import HalfLinear
from tests.support import Net, plugin, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_is_not_rounded(half, bias):
    torch.manual_seed(0)
    layer = nn.Linear(256, 384, bias=bias, dtype=half, device="cuda")
    layer.__class__ = HalfLinear
    for param in layer.parameters():
        param.grad_dtype = torch.float32
    x = torch.randn(2, 100, 256, dtype=half, device="cuda", requires_grad=True)
    dy = torch.randn(2, 100, 384, dtype=half, device="cuda")
    layer(x).backward(dy)
    exact = dy.view(-1, 384).double().t() @ x.detach().view(-1, 256).double()
    error = (layer.weight.grad.double() - exact).norm() / exact.norm()
    assert layer.weight.grad.dtype == torch.float32
    assert error < 1e-5  # rounded to half it is 1e-3 or 2e-4
    torch.testing.assert_close(x.grad, (dy.float() @ layer.weight.float()).to(half), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_loss_on_gradients(half):
    results = []
    for dtype in (half, torch.float32):
        torch.manual_seed(0)
        layer = nn.Linear(256, 384, device="cuda").to(dtype)
        if dtype == half:
            layer.__class__ = HalfLinear
            for param in layer.parameters():
                param.grad_dtype = torch.float32
        x = torch.randn(100, 256, device="cuda").to(dtype).requires_grad_()
        grads = torch.autograd.grad(torch.tanh(layer(x)).float().sum(), (x, layer.weight), create_graph=True)
        sum(g.float().square().sum() for g in grads).backward()
        results.append([*(g.detach() for g in grads), x.grad, layer.weight.grad, layer.bias.grad])
    for got, want in zip(*results, strict=True):
        assert (got.float() - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize(("level", "used"), [("bf16_mixed", True), ("fp16_mixed", False)])  # its gradients are FP16
def test_a_trainer_uses_it_and_gives_the_layers_back(level, used):
    model, seen = Net(), []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, out: seen.append(type(m)))
    train(model, plugin(level), accelerator="gpu")
    assert seen and (HalfLinear in seen) == used
    assert not any(isinstance(m, HalfLinear) for m in model.modules())
