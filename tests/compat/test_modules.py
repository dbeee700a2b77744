"""Modules and optimizers of torch: base classes and hooks that are already there."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from nemo_lowprec.compat import modules


def test_norms_with_statistics_have_one_base_class():
    statistics = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2)]
    assert all(isinstance(norm, modules.NormWithStatistics) for norm in statistics)
    assert not any(isinstance(norm, modules.NormWithStatistics) for norm in (nn.LayerNorm(2), nn.GroupNorm(1, 2)))


def test_hooks_of_a_module_are_found_and_removed():
    module, seen = nn.Linear(2, 2), []

    def before(*args):
        seen.append("before")

    def after(module, state, prefix, metadata):
        seen.append("state")

    def loading(*args):
        seen.append("loading")

    def loaded(*args):
        seen.append("loaded")

    assert modules.forward_pre_hooks(module) == []
    module.register_forward_pre_hook(before)
    assert modules.forward_pre_hooks(module) == [before]
    assert not modules.has_state_dict_hook(module, after)
    module.register_state_dict_post_hook(after)
    assert modules.has_state_dict_hook(module, after)
    module.register_load_state_dict_pre_hook(loading)
    module.register_load_state_dict_post_hook(loaded)
    module.load_state_dict(module.state_dict())
    assert seen == ["state", "loading", "loaded"]
    modules.remove_state_dict_hooks(module, {after, loading})
    module.load_state_dict(module.state_dict())
    assert seen == ["state", "loading", "loaded", "loaded"]
    modules.remove_state_dict_hooks(module, {loaded})
    module.load_state_dict(module.state_dict())
    assert len(seen) == 4 and not modules.has_state_dict_hook(module, after)


def test_hooks_of_two_modules_share_an_id():
    seen = []
    for module in (nn.Linear(2, 2), nn.Linear(2, 2)):
        module.register_forward_hook(lambda *_: seen.append("theirs"))
        own = module.register_forward_hook(
            lambda module, args, kwargs, out: seen.append(kwargs), prepend=True, with_kwargs=True, always_call=True
        )
        module.register_forward_hook(lambda *_: seen.append("last"))
        assert modules.share_hook_id(own, -7) is own
        assert -7 in module._forward_hooks and own.id == -7
        module(input=torch.ones(2))
        assert [what if isinstance(what, str) else list(what) for what in seen] == [["input"], "theirs", "last"]
        own.remove()
        module(torch.ones(2))
        assert seen[3:] == ["theirs", "last"]
        assert -7 not in {
            *module._forward_hooks,
            *module._forward_hooks_with_kwargs,
            *module._forward_hooks_always_called,
        }
        seen.clear()


@pytest.mark.parametrize("which", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_a_step_is_called_first(which):
    optimizer, seen = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), []
    getattr(optimizer, which)(lambda *args: seen.append("theirs"))
    handle = getattr(optimizer, which)(lambda *args: seen.append("ours"))
    optimizer.step()
    assert seen == ["theirs", "ours"]
    modules.call_first(optimizer, handle)
    optimizer.step()
    assert seen[2:] == ["ours", "theirs"]


def test_a_class_that_an_optimizer_gets_later_calls_its_hooks():
    class Later(torch.optim.SGD):
        def step(self, closure=None):
            seen.append("step")

    optimizer, seen = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), []
    optimizer.register_step_post_hook(lambda *args: seen.append("hook"))
    optimizer.__class__ = Later
    modules.patch_step(optimizer)
    optimizer.step()
    assert seen == ["step", "hook"]


def test_schedulers_are_told_of_a_step(recwarn):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    modules.note_step(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_a_step_that_is_marked_is_not_wrapped_again():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not modules.is_wrapped(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert modules.is_wrapped(optimizer.step)

    def step(closure=None):
        return None

    optimizer.step = step
    modules.mark_wrapped(step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step is step


def test_the_grad_scaler_unscales_by_this_method():
    scaler, called = torch.amp.GradScaler("cpu"), []
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum()).backward()
    own = getattr(scaler, modules.UNSCALE_METHOD)

    def unscale(*args):
        called.append(args[0])
        return own(*args)

    setattr(scaler, modules.UNSCALE_METHOD, unscale)
    scaler.step(optimizer)
    assert called == [optimizer]


def test_the_tables_of_hooks():
    module = nn.Linear(1, 1)
    for register in (
        module.register_forward_pre_hook, module.register_forward_hook, module.register_full_backward_pre_hook,
        module.register_full_backward_hook,
    ):  # fmt: skip
        before = sum(map(len, modules.all_hooks(module)))
        handle = register(lambda *_: None)
        assert sum(map(len, modules.all_hooks(module))) == before + 1
        handle.remove()
    every = nn.modules.module
    for register in (
        every.register_module_forward_pre_hook, every.register_module_forward_hook,
        every.register_module_full_backward_pre_hook, every.register_module_full_backward_hook,
    ):  # fmt: skip
        assert not any(modules.global_hooks())
        handle = register(lambda *_: None)
        assert any(modules.global_hooks())
        handle.remove()


def test_compiled_modules():
    module = nn.Linear(1, 1)
    assert not modules.is_compiled(module)
    assert modules.is_compiled(torch.compile(module, backend="eager"))
    module.compile(backend="eager")
    assert modules.is_compiled(module)


def test_who_makes_cuda_graphs():
    module = nn.Linear(2, 2)
    assert not modules.makes_cuda_graphs(module)
    for options, graphs in (({}, False), ({"backend": "eager"}, False), ({"mode": "reduce-overhead"}, True)):
        assert modules.makes_cuda_graphs(torch.compile(module, **options)) == graphs
        module.compile(**options)
        assert modules.makes_cuda_graphs(module) == graphs


def test_hooks_before_a_step_are_found():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before = len(modules.step_pre_hooks(optimizer))  # those of all optimizers

    def of_one(*_):
        pass

    def of_all(*_):
        pass

    optimizer.register_step_post_hook(lambda *_: None)
    handles = [optimizer.register_step_pre_hook(of_one), register_optimizer_step_pre_hook(of_all)]
    found = modules.step_pre_hooks(optimizer)
    assert len(found) == before + 2 and of_one in found and of_all in found
    for handle in handles:
        handle.remove()
    assert len(modules.step_pre_hooks(optimizer)) == before


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("by_method", [True, False])
def test_compiled_modules_run_outside_of_a_mode_that_the_others_see(by_method):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if by_method:
        model[0].compile(backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    x = torch.ones(1, 2)
    wanted = model(x)
    before = [dict(m.__dict__) for m in model.modules()]
    with torch.compiler.set_stance("fail_on_recompile"), Mode(), modules.compiled_outside_of_mode(model):
        found = model(x)
        assert torch.equal(found.detach(), wanted.detach())
    assert nn.functional.relu in seen and nn.functional.linear not in seen
    assert [dict(m.__dict__) for m in model.modules()] == before


def test_something_around_each_call():
    model, called = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    @contextmanager
    def note(module):
        called.append(("in", type(module).__name__))
        yield
        called.append(("out", type(module).__name__))

    call, x = nn.Module.__call__, torch.randn(1, 2)
    with modules.around_calls(note):
        found = model(x)
        assert not any(modules.all_hooks(model[0])) and not any(modules.global_hooks())
    assert nn.Module.__call__ is call and torch.equal(found, model(x))
    assert called == [
        ("in", "Sequential"), ("in", "Linear"), ("out", "Linear"), ("in", "ReLU"), ("out", "ReLU"),
        ("out", "Sequential"),
    ]  # fmt: skip
