"""Sums of residual blocks: the norm adds the gradient that comes back past it, to the bits of torch's own sums."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, residual
from nemo_lowprec.compute.backends.base import NormKind, plain_norm
from nemo_lowprec.compute.norm_function import fused_norm
from nemo_lowprec.compute.operands import new_histories
from nemo_lowprec.compute.residual import BranchOutput

HALF = torch.bfloat16


class TorchNorms:
    """``triton_norm``'s passes by torch's operations; a norm's kind goes from forward to backward with the statistics.

    Attributes:
        sums, halves: how often backward added a gradient, and how often it gave one in half precision.
        norms, behind: how often forward computed a norm, and how often with the sum before it.
    """

    def __init__(self):
        self.kinds, self.sums, self.halves, self.norms, self.behind = [], 0, 0, 0, 0

    def forward(self, x, weight, bias, eps, layer, zero_centered, out, save):
        kind = NormKind((x.shape[-1],), eps, layer, zero_centered)
        self.kinds.append((kind, out))
        self.norms += 1
        return plain_norm(x, weight, bias, kind, out), torch.tensor(len(self.kinds) - 1)

    def fits_sum(self, x, branch, weight, bias, out):
        return x.is_contiguous() and branch.is_contiguous()

    def add_forward(self, x, branch, *how):
        total = torch.add(x, branch)
        self.behind += 1
        self.norms -= 1
        return total, *self.forward(total, *how, True)

    def backward(
        self, grad, x, weight, bias, stats, layer, zero_centered, needs, dtypes, blocks=None, total=None, half=None
    ):
        kind, out = self.kinds[int(stats)]
        tensors = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            y = plain_norm(*tensors, kind, out)
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grad))
        dx, dw, db = (next(found) if need else None for need in needs)
        if total is not None:
            assert total.dtype == x.dtype and total.is_contiguous()
            dx = dx + total
            self.sums += 1
        if half is not None:
            half.copy_(dx)
            self.halves += 1
        return dx, dw, db


class Backend(ReferenceBackend):
    """The reference, whose norms run in the passes that a GPU's kernels have."""

    def __init__(self, sums):
        self.norms, self.sums = TorchNorms(), sums

    def norm(self, x, weight, bias, kind, out):
        y = fused_norm(self.norms, x, weight, bias, kind, out)
        if not self.sums:
            residual._latest = None
        return y


def convert(model, sums):
    """(backend, what is called after each step) of the converted model."""
    recipe = Recipe("delayed")
    histories, backend = new_histories(recipe), Backend(sums)
    convert_layers(model, HALF, recipe, backend, None, LayerFilter(), histories)
    return backend, histories.update


def llama():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.arange(26).view(2, 13)
    return LlamaForCausalLM(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def vit():
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        num_labels=8,
    )  # fmt: skip
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return ViTForImageClassification(config), lambda model: model(pixel_values=images).logits.float().pow(2).sum()


class Block(nn.Module):
    """A block with options: what is added first, and another sum of what the norm reads."""

    def __init__(self, branch_first=False, twice=False, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.branch_first, self.twice = branch_first, twice

    def forward(self, x):
        branch = self.down(F.gelu(self.up(self.norm(x))))
        out = branch + x if self.branch_first else x + branch
        return out + x if self.twice else out


def blocks(**options):
    model = nn.Sequential(nn.Linear(16, 32), Block(**options), Block(**options), nn.LayerNorm(32))
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    return model, lambda model: model(x).float().pow(2).mean()


MODELS = {
    "llama": (llama, 4), "vit": (vit, 4), "blocks": (blocks, 2), "branch first": (lambda: blocks(branch_first=True), 2),
}  # fmt: skip


def train(model, loss_of, update, steps=3):
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF):
            loss = loss_of(model)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        update()
    return seen


def assert_same(got, want):
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)


def pair(make, half):
    torch.manual_seed(0)
    model, loss_of = make()
    model = model.to(HALF) if half else model
    plain = copy.deepcopy(model)
    (backend, update), (_, plain_update) = convert(model, True), convert(plain, False)
    return model, plain, loss_of, backend.norms, update, plain_update


@pytest.mark.parametrize("half", [False, True], ids=["FP32 stream", "half stream"])
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_bits_of_torchs_sums(name, half):
    make, sums = MODELS[name]
    model, plain, loss_of, norms, update, plain_update = pair(make, half and name in ("llama", "vit"))
    plain_norms = next(m.norm_backend for m in plain.modules() if hasattr(m, "norm_backend")).norms
    got, want = train(model, loss_of, update), train(plain, loss_of, plain_update)
    assert_same(got, want)
    # The first pass shows which layers end a branch.
    assert norms.sums == 2 * sums
    # From then on a sum computes the norm behind it.
    assert norms.behind == 2 * sums
    assert norms.norms + norms.behind == plain_norms.norms and plain_norms.behind == 0
    # In a half stream no gradient is of another dtype.
    assert norms.halves == (2 * sums if name == "llama" and not half else norms.halves)


def test_another_sum_of_what_the_norm_reads():
    model, plain, loss_of, norms, *_ = pair(lambda: blocks(twice=True), False)
    for one in (model, plain):
        loss_of(one).backward()
        one.zero_grad()
        loss_of(one).backward()
    assert norms.sums == 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):  # three gradients, added in another order
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6 * q.grad.abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def make():
        model, _ = blocks()
        x = torch.randn(4, 8, 16)

        def loss_of(model):
            hidden = model[0](x)
            for block in model[1:3]:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return model[3](hidden).float().pow(2).mean()

        return model, loss_of

    model, plain, loss_of, norms, update, plain_update = pair(make, False)
    assert_same(train(model, loss_of, update), train(plain, loss_of, plain_update))
    assert norms.sums == (0 if reentrant else 2 * 2)  # a reentrant block's sum has no graph outside of the block


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_of_a_recomputed_block_is_held_after_its_backward_pass(reentrant):
    model, *_ = pair(blocks, False)
    for _ in range(2):
        hidden = model[0](torch.randn(4, 8, 16))
        storage = StorageWeakRef(hidden.untyped_storage())
        checkpoint(model[1], hidden, use_reentrant=reentrant).float().sum().backward()
        del hidden
        gc.collect()
        assert storage.expired()


def learned():
    """``pair(blocks, False)`` after a pass."""
    model, plain, loss_of, *rest = pair(blocks, False)
    for one in (model, plain):
        loss_of(one)
    return model, plain, loss_of, *rest


def test_gradients_of_what_the_norm_reads_are_whole():
    model, plain, *_ = learned()
    found = []
    for one in (model, plain):
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", HALF):
            hidden = one[0](x) * 1.0
            hidden.retain_grad()
            inner = one[1](hidden)
            out = one[2](inner).float().pow(2).sum()
        found.append([*torch.autograd.grad(out, [hidden, inner], retain_graph=True)])
        out.backward()
        found[-1].append(hidden.grad)
    assert_same(*found)


def test_a_loss_past_the_norm_or_through_it_alone():
    model, _, _, norms, *_ = learned()
    block = model[1]
    x = torch.randn(4, 32, requires_grad=True)
    for outputs in ("sum", "branch", "residual"):
        inner = x * 2.0
        branch = block.down(F.gelu(block.up(block.norm(inner))))
        out = inner + branch
        wanted = {"sum": out, "branch": branch, "residual": inner}[outputs]
        before = norms.sums
        (grad,) = torch.autograd.grad(wanted.sum(), x)
        assert norms.sums == before + (outputs == "sum")
        if outputs == "residual":
            assert torch.equal(grad, torch.full_like(x, 2.0))


def test_second_derivatives_and_batched_gradients():
    model, plain, *_ = learned()
    found = []
    for one in (model, plain):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = one(x).float()
        many = torch.autograd.grad(out, x, torch.stack([out.detach(), -out.detach()]), is_grads_batched=True,
                                   retain_graph=True)[0]  # fmt: skip
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().pow(2).sum(), x)
        found.append([many, first, second])
    for g, w in zip(*found, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2 * w.abs().max().item())


def test_only_the_ends_of_branches_return_another_class():
    model, _, loss_of, *_ = pair(blocks, False)
    x = torch.randn(4, 32, requires_grad=True)
    block = model[1]
    assert type(block.down(block.up(x))) is torch.Tensor
    loss_of(model)
    for _ in range(2):
        assert type(block.up(x)) is torch.Tensor and type(block.down(block.up(x))) is BranchOutput
    with torch.no_grad():
        assert type(block.down(block.up(x))) is torch.Tensor


def test_an_output_is_like_any_other_tensor():
    model, *_ = learned()
    layer = model[1].down
    x = torch.randn(4, 64, requires_grad=True)
    out = layer(x)
    assert type(out) is BranchOutput
    for result in (out + 1, 1 + out, out + x[:, :32], x[:, :32] + out, out + x[:1, :32], out * 2, out.view(-1)):
        assert type(result) is torch.Tensor and result.requires_grad
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert type(torch.load(file)) is torch.Tensor
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: (y.float() * 2).sum(), backend="aot_eager")
    compiled(out).backward()
    grad, x.grad = x.grad, None
    (layer(x).float() * 2).sum().backward()
    assert torch.equal(grad, x.grad)


def test_a_residual_that_was_changed_is_summed_by_torch(monkeypatch):
    model, *_ = learned()
    block, found = model[1], []
    x = torch.randn(4, 32, requires_grad=True)
    monkeypatch.setattr(residual, "_apply", lambda *args: found.append(args))
    inner = x * 1.0
    branch = block.down(F.gelu(block.up(block.norm(inner))))
    inner.add_(1.0)
    assert type(inner + branch) is torch.Tensor and not found


def passes(model, loss_of, count=1):
    for _ in range(count):
        model.zero_grad()
        with torch.autocast("cpu", HALF):
            loss_of(model).backward()


def test_a_sum_computes_the_norm_behind_it_while_the_norm_takes_it():
    model, _, loss_of, norms, *_ = pair(blocks, False)
    passes(model, loss_of, 2)
    assert (norms.norms, norms.behind) == (3 + 1, 2)
    last = model[2].down.gemm_plan
    assert last.read_by.weight is model[3].weight and last.read_by.taken
    handle = model[2].register_forward_hook(lambda *_: _[2] * 1.0)  # the norm reads another tensor
    passes(model, loss_of)
    assert norms.behind == 4 and not last.read_by.taken
    passes(model, loss_of)
    assert norms.behind == 5 and last.read_by is None
    handle.remove()
    passes(model, loss_of)
    assert norms.behind == 6 and last.read_by is None


@pytest.mark.parametrize("what", ["sum", "weight", "another norm", "autocast"])
def test_what_the_sum_has_computed_is_not_taken(what):
    model, plain, *_ = learned()
    found = []
    for one in (model, plain):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        block, norm = one[1], one[2].norm
        with torch.autocast("cpu", HALF):
            out = (inner := x * 1.0) + block.down(F.gelu(block.up(block.norm(inner))))
            if what == "sum":
                out.mul_(2.0)
            if what == "weight":
                norm.weight = nn.Parameter(norm.weight.detach() * 2.0)
            if what == "another norm":
                norm = one[3]
        with torch.autocast("cpu", HALF, enabled=what != "autocast"):
            y = norm(out)
        y.float().pow(2).sum().backward()
        found.append([y.detach(), x.grad])
    assert_same(*found)


def test_what_the_sum_has_computed_is_gone_with_the_norm():
    model, *_ = learned()
    block = model[1]
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", HALF):
        out = (inner := x * 1.0) + block.down(F.gelu(block.up(block.norm(inner))))
        assert residual._NORMED in out.__dict__
        model[2].norm(out)
    assert residual._NORMED not in out.__dict__


def test_copies_and_pickles_know_no_norm():
    model, *_ = learned()
    plan = model[1].down.gemm_plan
    assert plan.read_by is not None and plan.ends_branch
    plan.read_by.kernels = residual  # a module, as the GPU's kernels are, which has no copy
    assert copy.deepcopy(model)[1].down.gemm_plan.read_by is None
    assert pickle.loads(pickle.dumps(plan.read_by)) is None


def test_no_parameters_of_other_modules_where_something_gathers_them():
    model, _, loss_of, norms, *_ = pair(blocks, False)
    model[1].down.gemm_plan.inputs.parameters_stay = False
    passes(model, loss_of, 3)
    assert norms.behind == 0 and norms.sums == 2 * 2
