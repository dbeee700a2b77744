"""Subclasses of tensors, modes of the dispatcher, and trees of tensors."""

import pickle

import pytest
import torch
from torch import nn

from nemo_lowprec.compat import tensors


class Wrapper(torch.Tensor):
    """Reads as FP32 zeros, and counts the operators that it gets."""

    __torch_function__ = tensors.disabled_torch_function
    seen: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return torch.zeros(args[0].shape)


def test_wrappers_have_no_storage_and_get_each_operator():
    wrapper = tensors.make_wrapper(Wrapper, (2, 3), dtype=torch.float32)
    assert type(wrapper) is Wrapper and wrapper.shape == (2, 3)
    assert torch.equal(wrapper + 1, torch.zeros(2, 3))
    assert Wrapper.seen == ["add.Tensor"]


def test_subclasses_compute_as_plain_tensors_without_torch_function():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with tensors.without_torch_function():
                return func(*args, **(kwargs or {})), "seen"

    loud = tensors.make_subclass(Loud, torch.ones(3))
    out, seen = loud + 1
    assert seen == "seen" and type(out) is torch.Tensor


def test_subclasses_share_the_memory_of_their_tensor():
    class Marked(torch.Tensor):
        __torch_function__ = tensors.disabled_torch_function

    plain = torch.ones(3)
    marked = tensors.make_subclass(Marked, plain)
    assert type(marked) is Marked and marked.data_ptr() == plain.data_ptr()
    assert type(marked + 1) is torch.Tensor  # without a torch function, results are plain


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_runs_on_a_plain_subclass_as_it_is_written(backend):
    class Adding(tensors.PlainSubclass):
        def __add__(self, other):
            return "added"

    torch._dynamo.reset()
    leaf = torch.ones(2, 3, requires_grad=True)
    adding = leaf * 2
    adding.__class__ = Adding
    assert type(adding.view(-1)) is torch.Tensor and tensors.is_plain(adding)
    compiled = torch.compile(lambda x: (x.view(-1).float() * 3).sum() if x + 1 == "added" else None, backend=backend)
    compiled(adding).backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 6.0))
    assert type(pickle.loads(pickle.dumps(adding.detach()))) is torch.Tensor


def test_fake_tensors_have_sizes_and_storages_only():
    with tensors.FakeTensorMode():
        x = torch.empty(1 << 40)
        y = x.view(2, -1)
        z = x + 1
    assert x.numel() == 1 << 40
    key = tensors.storage_key
    assert key(x.untyped_storage()) == key(y.untyped_storage()) != key(z.untyped_storage())


def test_modes_see_each_operator():
    class Counts(tensors.TorchDispatchMode):
        adds = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.adds += func is torch.ops.aten.add.Tensor
            return func(*args, **(kwargs or {}))

    with Counts() as mode:
        torch.ones(2) + torch.ones(2)
    assert mode.adds == 1


def test_trees():
    tree = {"a": [1, (2, None)], "b": 3}
    assert tensors.tree_leaves(tree) == [1, 2, None, 3]
    assert tensors.tree_map(lambda leaf: leaf and leaf + 1, tree) == {"a": [2, (3, None)], "b": 4}


def test_sparse_values_are_not_summed():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,))
    assert tensors.sparse_values(sparse).tolist() == [1.0, 2.0]
    assert not sparse.is_coalesced()


def test_views_and_graphs_count_as_uses():
    param = nn.Parameter(torch.ones(2))
    others = [param, param]  # names of Python do not count
    assert tensors.use_count(param) == 1 and len(others) == 2
    graph = param * 2
    assert tensors.use_count(param) == 2
    view = param.view(-1)
    assert tensors.use_count(param) == 3
    del graph, view
    assert tensors.use_count(param) == 1


def test_hooks_are_kept_while_the_storage_changes():
    param, seen = nn.Parameter(torch.ones(2)), []
    param.register_hook(lambda grad: seen.append("grad"))
    param.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    hooks = tensors.backward_hooks(param)
    param.data = param.data.to(torch.bfloat16)
    tensors.set_backward_hooks(param, hooks)
    param.float().sum().backward()
    assert seen == ["grad", "accumulated"]
    assert tensors.backward_hooks(nn.Parameter(torch.ones(2))) == (None, None)


def test_hooks_of_a_gradient_are_counted():
    param = nn.Parameter(torch.ones(2))
    assert len(tensors.accumulated_hooks(param)) == 0
    handles = [param.register_post_accumulate_grad_hook(lambda _: None) for _ in range(2)]
    assert len(tensors.accumulated_hooks(param)) == 2
    handles[0].remove()
    assert len(tensors.accumulated_hooks(param)) == 1


def test_a_dispatch_mode_is_seen():
    assert not tensors.has_dispatch_mode() and not tensors.dispatch_modes()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert tensors.has_dispatch_mode() and tensors.dispatch_modes() == 1
    assert not tensors.has_dispatch_mode()


def test_tensors_of_one_memory_are_counted():
    tensor = torch.ones(4)
    alone = tensors.storage_use_count(tensor)
    part, alias = tensor[:2], tensor.detach()
    assert tensors.storage_use_count(tensor) == alone + 2
    del part
    assert tensors.storage_use_count(alias) == alone + 1
    del alias
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = tensor.detach()
    assert tensors.storage_use_count(tensor) == alone + 1
    param.grad = None
    assert tensors.storage_use_count(tensor) == alone


def test_the_base_of_a_view():
    x = torch.ones(4, requires_grad=True) * 2
    assert tensors.base_of(x.view(2, 2)) is x and tensors.base_of(x) is None


def test_outside_of_dispatch_modes_tensors_have_values():
    with tensors.FakeTensorMode(), tensors.without_dispatch_modes():
        assert torch.ones(2).sum().item() == 2.0


def test_fake_tensors_stand_for_plain_ones():
    with tensors.FakeTensorMode():
        fake = torch.empty(2)
    assert tensors.is_plain(torch.empty(2)) and tensors.is_plain(fake)
    assert not tensors.is_plain(torch.nn.Parameter(torch.empty(2))) and not tensors.is_plain(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_on_the_current_device():
    made = tensors.empty_strided_cuda((3, 4), (4, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (4, 1), torch.float16)
    assert made.get_device() == torch.cuda.current_device() and not made.requires_grad


def test_fake_tensors_have_a_shape_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert tensors.is_fake(torch.ones(2))
    assert not tensors.is_fake(torch.ones(2))
