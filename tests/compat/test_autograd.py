"""Autograd's engine, ``torch.func``'s wrappers and the tracer of ``torch.jit``."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.compat import autograd


class Asks(torch.autograd.Function):
    """Doubles two inputs, and notes in ``wanted`` which gradients the backward pass goes on with."""

    wanted: list[bool] = []

    @staticmethod
    def forward(ctx, a, b):
        return 2 * a + 2 * b

    @staticmethod
    def backward(ctx, grad):
        Asks.wanted = [autograd.is_wanted(ctx, 0), autograd.is_wanted(ctx, 1)]
        return 2 * grad, 2 * grad


def test_a_backward_pass_tells_which_inputs_it_goes_on_to():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Asks.apply(a * 1, b * 1).sum().backward(inputs=[a])
    assert Asks.wanted == [True, False]
    Asks.apply(a * 1, b * 1).sum().backward()
    assert Asks.wanted == [True, True]
    torch.autograd.grad(Asks.apply(a, b * 1).sum(), [a])  # for a leaf torch does not say: it counts as wanted
    assert Asks.wanted == [True, False]


def test_a_backward_pass_has_a_number_and_calls_at_its_end():
    x, seen = torch.ones(2, requires_grad=True), []

    def at_gradient(grad):
        seen.append(("hook", autograd.current_backward()))
        autograd.after_backward(lambda: seen.append(("end", x.grad is not None)))

    assert autograd.current_backward() == -1
    y = x * 2
    y.register_hook(at_gradient)
    y.sum().backward(retain_graph=True)
    (hook, first), end = seen
    assert (hook, end) == ("hook", ("end", True))
    y.sum().backward()
    assert -1 != seen[2][1] != first != -1


def test_a_backward_pass_tells_whether_another_one_may_follow():
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(autograd.keeps_graph()))
    total = y.sum()
    total.backward(retain_graph=True)
    total.backward()
    assert seen == [True, False]


def test_transforms_are_seen_through():
    def look(x):
        seen.append((autograd.is_batched(x), autograd.is_transforming()))
        plain = autograd.outside_transforms(x)
        assert type(plain) is torch.Tensor and plain.shape == (3, 2) and not autograd.is_batched(plain)
        return x * 2

    seen: list[tuple[bool, bool]] = []
    look(torch.ones(3, 2))
    torch.vmap(look)(torch.ones(3, 2))
    torch.vmap(torch.func.grad(lambda x: look(x).sum()))(torch.ones(3, 2))
    assert seen == [(False, False), (True, True), (False, True)]  # outermost in the last is the wrapper of ``grad``
    assert autograd.outside_transforms("no tensor") == "no tensor"


def test_a_function_is_applied_without_the_search_of_its_arguments():
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    out = autograd.apply_function(Asks)(a, b)
    assert torch.equal(out, Asks.apply(a, b)) and type(out.grad_fn) is type(Asks.apply(a, b).grad_fn)
    out.sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [2.0, 2.0] and Asks.wanted == [True, True]


def test_what_a_transform_has_left_behind_is_a_plain_tensor():
    left = []
    torch.func.grad(lambda x: left.append(x) or x.square().sum())(torch.ones(2))
    plain = autograd.unwrap_if_dead(left[0])
    assert torch.equal(plain, torch.ones(2)) and autograd.outside_transforms(plain) is plain
    alive = torch.ones(2)
    assert autograd.unwrap_if_dead(alive) is alive


def test_batched_gradients_are_told():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(autograd.is_legacy_batched(grad) or autograd.is_batched(grad))
            return grad * 2

    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Looks.apply(x), x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(Looks.apply(x).sum(), x)
    assert seen == [True, False]


def test_the_tracer_is_told():
    seen = []

    def look(x):
        seen.append(autograd.is_tracing())
        return x * 2

    look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen == [False, True]


def test_backward_leaves_function_modes_on_for_recomputed_blocks():
    class Counts(TorchFunctionMode):
        sines = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.sines += func is torch.sin
            return func(*args, **(kwargs or {}))

    def sines_of(backward):
        x = torch.ones(2, requires_grad=True)
        with Counts() as mode:
            backward(checkpoint(lambda v: torch.sin(v), x, use_reentrant=False).sum())
        assert torch.equal(x.grad, torch.ones(2).cos())
        return mode.sines

    assert sines_of(autograd.run_backward) == 2  # forward, and recomputed in backward
    assert sines_of(torch.Tensor.backward) == 1


def test_hooks_of_saved_tensors_are_seen():
    seen = []

    def look(x):
        seen.append(autograd.saves_through_hooks())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    look(x)
    checkpoint(look, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        look(x)
    look(x)
    assert seen == [False, True, True, False]


def test_nodes_and_leaves_of_a_graph():
    a, b, c, d = (torch.ones(2, requires_grad=True) for _ in range(4))
    out, other = (a * 2 + b) * a, c.exp()
    nodes, leaves = autograd.graph_of([out, other, torch.ones(1)])
    assert {id(leaf) for leaf in leaves} == {id(a), id(b), id(c)}
    assert sorted(node.name() for node in nodes if "Mul" in node.name()) == ["MulBackward0", "MulBackward0"]
    assert autograd.graph_of([(d * 2).detach()]) == (set(), [])


def test_a_node_of_an_earlier_pass_runs_early():
    orders = []
    for early in (False, True):
        seen, x = [], torch.ones(2, requires_grad=True)
        old, young = x * 2, x * 3
        old.register_hook(lambda _, seen=seen: seen.append("old"))
        young.register_hook(lambda _, seen=seen: seen.append("young"))
        if early:
            autograd.run_early(old)
        (young * 3 + old).sum().backward()
        orders.append(seen)
    assert orders == [["young", "old"], ["old", "young"]]
