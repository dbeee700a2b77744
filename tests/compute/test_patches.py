"""Patch embeddings: convolutions whose kernels do not overlap compute by the GEMMs of a linear layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, gemm_plans, revert_layers
from nemo_lowprec.compute.patches import LowPrecisionPatches, is_patch_embedding
from nemo_lowprec.compute.speed_filter import choose
from nemo_lowprec.engine import Engine
from tests.auto import MADE_UP, made_up_times


def convert(model, recipe=None, **layers):
    recipe = recipe or Recipe("current")
    return convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(**layers), None)


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        (nn.Conv2d(3, 64, 16, 16), True),
        (nn.Conv2d(3, 64, 16, 16, padding="valid"), True),
        (nn.Conv2d(3, 64, (2, 4), (2, 4), bias=False), True),
        (nn.Conv1d(8, 32, 4, 4), True),
        (nn.Conv3d(3, 64, (2, 14, 14), (2, 14, 14)), True),
        (nn.Conv2d(3, 64, 16, 8), False),
        (nn.Conv2d(3, 64, 16, 16, padding=1), False),
        (nn.Conv2d(3, 64, 2, 2, dilation=2), False),
        (nn.Conv2d(4, 64, 2, 2, groups=2), False),
        (nn.Conv2d(64, 64, 1), False),  # a layer for each pixel: no patches
        (nn.Conv2d(3, 64, 3, padding="same"), False),
        (nn.ConvTranspose2d(16, 16, 2, 2), False),
        (nn.Linear(16, 16), False),
    ],
    ids=str,
)
def test_what_is_a_patch_embedding(module, is_one):
    assert is_patch_embedding(module) == is_one


def by_hand(x, kernel):
    """[batch, channels, *size] to [patches, elements of a patch], with loops."""
    found = []
    counts = [size // side for size, side in zip(x.shape[2:], kernel, strict=True)]
    for image in x:
        for place in torch.cartesian_prod(*map(torch.arange, counts)).view(-1, len(counts)).tolist():
            cut = image
            for dim, (at, side) in enumerate(zip(place, kernel, strict=True)):
                cut = cut.narrow(1 + dim, at * side, side)
            found.append(cut.reshape(-1))
    return torch.stack(found)


CASES = {
    "1d": (nn.Conv1d(8, 32, 4, 4), (2, 8, 32)),
    "2d": (nn.Conv2d(4, 48, 4, 4), (2, 4, 16, 24)),
    "no bias": (nn.Conv2d(4, 48, 4, 4, bias=False), (2, 4, 16, 24)),
    "cut": (nn.Conv2d(4, 32, (2, 4), (2, 4)), (3, 4, 9, 22)),
    "3d": (nn.Conv3d(2, 16, (2, 4, 4), (2, 4, 4)), (2, 2, 4, 8, 12)),
    "channels_last": (nn.Conv2d(4, 48, 4, 4).to(memory_format=torch.channels_last), (2, 4, 16, 24)),
}


@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_a_linear_layer_on_the_patches(case, scaling):
    """Outputs and all gradients, bit for bit."""
    conv, shape = copy.deepcopy(CASES[case][0]), CASES[case][1]
    torch.manual_seed(0)
    recipe = Recipe(scaling, fp8="e4m3")
    linear = nn.Linear(conv.weight[0].numel(), conv.out_channels, bias=conv.bias is not None)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
        if conv.bias is not None:
            linear.bias.copy_(conv.bias)
    original = conv(torch.zeros(shape))
    for layer in (conv, linear):
        assert convert(nn.Sequential(layer), recipe).low == ["0"]
    x = torch.randn(shape)
    if case == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    rows = by_hand(x.detach(), conv.kernel_size).requires_grad_()
    out, wanted = conv(x), linear(rows)
    assert out.shape == original.shape and isinstance(conv, type(CASES[case][0]))
    assert torch.equal(out.movedim(1, -1).reshape(wanted.shape), wanted)
    dy = torch.randn(wanted.shape)
    out.backward(dy.view(*out.movedim(1, -1).shape).movedim(-1, 1))
    wanted.backward(dy)
    assert conv.weight.grad.shape == conv.weight.shape
    assert torch.equal(conv.weight.grad.flatten(1), linear.weight.grad)
    assert conv.bias is None or torch.equal(conv.bias.grad, linear.bias.grad)
    assert torch.equal(by_hand(x.grad, conv.kernel_size), rows.grad)
    covered = [size // side * side for size, side in zip(shape[2:], conv.kernel_size, strict=True)]
    outside = torch.ones(shape[2:])
    outside[tuple(map(slice, covered))] = 0
    assert not (x.grad * outside).any()


def test_an_image_without_gradient_and_without_a_batch():
    conv = nn.Conv2d(4, 32, 4, 4)
    convert(nn.Sequential(conv), Recipe("rowwise", fp8="e4m3"))
    assert "rowwise, backend=reference" in repr(conv)
    x = torch.randn(2, 4, 8, 8)
    out = conv(x)
    out.sum().backward()
    assert conv.weight.grad.shape == conv.weight.shape and x.grad is None
    assert torch.equal(conv(x[0]), out[0])


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 4, 3, 8), (2, 4, 8), (8,)])
def test_bad_input_is_the_convolutions_error(shape):
    conv, x = nn.Conv2d(4, 32, 4, 4), torch.randn(shape)
    with pytest.raises(RuntimeError) as wanted:
        conv(x)
    convert(nn.Sequential(conv))
    with pytest.raises(RuntimeError) as found:
        conv(x)
    assert str(found.value) == str(wanted.value)


def test_gemms_in_half_precision_are_the_convolution():
    conv = nn.Conv2d(4, 32, 4, 4)
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        wanted = F.conv2d(x.bfloat16().float(), conv.weight.bfloat16().float(), conv.bias, 4)
    convert(nn.Sequential(conv), Recipe("current", override_linear_precision=(True, True, True)))
    torch.testing.assert_close(conv(x).detach(), wanted, rtol=0.01, atol=0.01)


def test_second_derivatives():
    conv = nn.Conv2d(4, 16, 4, 4)
    convert(nn.Sequential(conv))
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert conv.weight.grad.shape == conv.weight.shape and conv.weight.grad.abs().sum() > 0


def test_under_torch_func():
    conv = nn.Conv2d(4, 16, 4, 4)
    convert(nn.Sequential(conv))
    x = torch.randn(3, 4, 8, 8)
    found = torch.func.vmap(lambda image: torch.func.functional_call(conv, dict(conv.named_parameters()), image))(x)
    torch.testing.assert_close(found, F.conv2d(x, conv.weight, conv.bias, 4), rtol=0.02, atol=0.02)


def test_revert_gives_the_convolution_back():
    model = nn.Sequential(nn.Conv2d(4, 32, 4, 4))
    x = torch.randn(2, 4, 8, 8)
    before = model(x)
    convert(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x)) and not torch.equal(model(x), before)
    revert_layers(model)
    assert type(model[0]) is nn.Conv2d and torch.equal(model(x), before)


class Vit(nn.Module):
    def __init__(self, width=64, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, patch)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def test_which_are_converted():
    linears = [f"blocks.{i}.{j}" for i in (0, 1) for j in (1, 3)]
    assert sorted(convert(Vit()).low) == [*linears, "patches"]
    skipped = convert(Vit(), skip=["patches"])
    assert sorted(skipped.low) == linears and skipped.kept["patches"] == "in skip" and "patches" in skipped.asked
    named = convert(Vit(), convert=["patches"])
    assert named.low == named.patches == ["patches"] and named.weights == ["patches.weight"]
    assert convert(Vit(), convert=lambda _, module: isinstance(module, nn.Conv2d)).low == ["patches"]
    assert convert(Vit(), convert="blocks").kept["patches"] == "not in convert"
    assert convert(Vit(patch=3)).kept["patches"] == "a side of 36 is no multiple of 16"
    half = convert_layers(
        Vit(), torch.bfloat16, None, ReferenceBackend(), ReferenceBackend(), LayerFilter(), None, True
    )  # fmt: skip
    assert "patches" not in half.half


def started(level, **options):
    torch.manual_seed(0)
    model = Vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer = prepare(model, optimizer, level, backend="reference", **options)
    return model, optimizer


def steps(model, optimizer, count=8):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, 16, 16, generator=generator), torch.randint(16, (8,), generator=generator)
    losses = []
    for _ in range(count):
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "case",
    [
        "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params",
        "bf16_with_fp8_rowwise_mixed",
    ],
)  # fmt: skip
@pytest.mark.parametrize("weight_cache", [False, True])
def test_models_train_and_keep_the_shapes_of_their_weights(case, weight_cache):
    level, _, variant = case.partition("+")
    model, optimizer = started(level, convert=None, weight_cache=weight_cache, **({variant: True} if variant else {}))
    conversion = Engine.of(model).columns.computation.conversion
    assert conversion.patches == ["patches"] and "patches" not in conversion.left
    before = model.state_dict()["patches.weight"].float().clone()
    losses, wanted = steps(model, optimizer), steps(*started(None))
    assert losses[-1] < losses[0] and losses[-1] == pytest.approx(wanted[-1], rel=0.1)
    after = model.state_dict()["patches.weight"]
    assert after.shape == (64, 4, 4, 4) and not torch.equal(after.float(), before)
    plain = Vit()
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()}, strict=True)
    x = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x).float(), plain(x), rtol=0.1, atol=0.1)


def test_auto_leaves_them_where_nobody_knows_times():
    model, optimizer = started("bf16_with_fp8_mixed")
    assert sorted(Engine.of(model).columns.computation.conversion.left) == ["patches"]
    plan = gemm_plans(model.patches)["weight"]
    assert plan.recipe is None and isinstance(model.patches, nn.Conv2d | LowPrecisionPatches)
    steps(model, optimizer, 2)
    model(torch.randn(1, 4, 16, 16))  # FP32 input, half weights, and no autocast


@pytest.mark.parametrize(("size", "left"), [(16, []), (4, ["patches"])])
def test_auto_decides_by_the_patches_of_the_first_step(size, left):
    with made_up_times():
        model, optimizer = started("bf16_with_fp8_mixed", skip=["blocks"])
        for _ in range(2):
            model(torch.randn(8 if size > 4 else 1, 4, size, size)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        computation = Engine.of(model).columns.computation
        assert list(computation.conversion.left) == left
        assert (gemm_plans(model.patches)["weight"].recipe is None) == bool(left)


def test_auto_wants_a_clear_gain():
    cost = torch.tensor([[95.0, 100.0, 1.0, 1.0, 1.0, 1.0, 0.0]] * 2 + [[80.0, 100.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    choice = choose(cost, ["linear", "patches", "large"], MADE_UP, "BF16", 0, patches=["patches", "large"])
    assert list(choice.left) == ["patches"] and choice.left["patches"].endswith("FP8 takes 0.95 × BF16's time")


@pytest.mark.parametrize(
    ("case", "convert"),
    [("bf16_with_fp8_mixed+fp8_params", None), ("bf16_with_fp8_rowwise_mixed", None), ("msamp_o2", "auto")],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_train_bit_for_bit_as_without(case, convert):
    """But for norms, which the compiler computes by torch's operations."""
    level, _, variant = case.partition("+")
    found = []
    for compiled in (False, True):
        options = {"convert": convert, "skip": ["*.0"], **({variant: True} if variant else {})}
        model, optimizer = started(level, **options)
        if compiled:
            for module in (model.patches, *model.blocks):
                module.compile(backend="aot_eager", fullgraph=True)
        found.append({"losses": torch.tensor(steps(model, optimizer, 3)), **model.state_dict()})
    if convert is None:
        assert_same(*found)
    # The convolution's gradient is FP32 in the graph.
    torch.testing.assert_close(found[1]["losses"], found[0]["losses"], rtol=1e-4, atol=0)
