"""Half (or FP8) copies of the parameters with FP32 masters on the optimizer's side.

The model's parameters keep their identity. Their data become half copies, and each parameter carries its master in the
attribute ``master_weight``. The optimizer's groups, clipping, callbacks and ``zero_grad`` see the model's parameters
and their gradients. Only inside ``optimizer.step()`` do the masters take the parameters' places in the groups, so any
torch optimizer computes in FP32; afterwards the copies are refreshed. A copy that the user has written is first taken
over into its master.

A frozen parameter that came in the half dtype has no master and stays as it is. The values of a frozen parameter of
another dtype wait on the CPU, to be saved and given back; so do the masters of parameters that are frozen in mid-run. A
frozen parameter gets its FP32 master when it is unfrozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.compat.modules import call_first, step_pre_hooks
from nemo_lowprec.formats import E4M3
from nemo_lowprec.kernels.loader import copy_kernels
from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.fp32_modules import needs_fp32
from nemo_lowprec.weights.frozen import FrozenInFp8, is_frozen_fp8
from nemo_lowprec.weights.half import FLOATS, HalfStore, is_lazy
from nemo_lowprec.weights.places import Places
from nemo_lowprec.weights.recurrent import flatten_recurrent
from nemo_lowprec.weights.saved_form import MASTER, master_of, with_masters
from nemo_lowprec.weights.swap import swap, swap_or_replace
from nemo_lowprec.weights.widened import note_original_dtype, to_original_dtype
from nemo_lowprec.weights.written import (
    Comparison,
    copy_exactly,
    forget,
    master_was_written,
    moved,
    note,
    take_over,
    take_over_written,
    was_written,
)

_PACKAGE = __name__.partition(".")[0] + "."


class MasterWeights(HalfStore):
    """The half copies of one model and their masters.

    Args:
        half: dtype of the copies.
        grad_fp32: whether gradients are stored in FP32, instead of the copies' dtype.
        fp8: names of the parameters that are stored in E4M3, scaled by their masters' amax at every refresh.
        margin: FP8 scales are divided by 2**margin.
        measures: whether a refresh stores the amax of each matrix in the matrix' attribute ``amax_of_step``.
        steps: a function of the optimizer and all pairs of a copy and its master, called when the masters are in place
            for a step. The function may step some masters and refresh their copies, and returns the pairs that it has
            stepped.
        frozen: stores frozen weights in FP8.
    """

    def __init__(
        self,
        half: torch.dtype,
        grad_fp32: bool,
        fp8: Callable[[], list[str]] = list,
        margin: int = 0,
        measures: bool = False,
        steps: Callable[[Optimizer, list[tuple[Any, Tensor]]], list[tuple[Any, Tensor]]] | None = None,
        frozen: FrozenInFp8 | None = None,
    ) -> None:
        super().__init__(fp8, margin, frozen)
        self._steps_masters = steps
        self._stepped_pairs: list[tuple[Any, Tensor]] = []
        self.half, self.grad_fp32, self.measures = half, grad_fp32, measures
        self._copies = ChosenParams(lambda param: master_of(param) is not None)
        self._places: WeakKeyDictionary[Optimizer, Places] = WeakKeyDictionary()
        self._comparisons: WeakKeyDictionary[Optimizer, Comparison] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._compared: Comparison | None = None
        self._copier: Any = None

    @torch.no_grad()
    def install(self, model: nn.Module, training: bool) -> None:
        """Turn the floating-point parameters of ``model`` into half copies of FP32 masters."""
        super().install(model, training)
        for module, params in self._own_params():
            for param in params:
                if needs_fp32(module):
                    self._widened.add(param)
                else:
                    self._split(param)
            if params:
                self._widened.add_statistics(module)

    def _split(self, param: nn.Parameter) -> None:
        if param.dtype not in FLOATS or is_lazy(param) or is_frozen_fp8(param):
            return
        if not param.requires_grad:
            if param not in self._came_as:
                self._add_frozen(param)
                if param.dtype != self.half:
                    self._give_master(param, param.detach().to("meta" if param.is_meta else "cpu", copy=True))
            return
        if master_of(param) is None:
            if not self._training:
                note_original_dtype(param, param.dtype)
            self._give_master(param, param.detach().to(torch.float32, copy=True))
        self._set_grad_dtype(param)

    def _give_master(self, param: nn.Parameter, values: Tensor) -> None:
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        setattr(param, MASTER, master)
        self._copies.renew()
        param.grad = None
        param.data = param.data.to(self.half)
        note(param, master)
        copy_exactly(param, master)

    def _set_grad_dtype(self, param: nn.Parameter) -> None:
        wanted = torch.float32 if self.grad_fp32 else self.half
        if param.is_leaf and param.grad_dtype != wanted and param.grad is None:
            param.grad_dtype = wanted

    @torch.no_grad()
    def settle(self) -> None:
        """Store the FP8 parameters in FP8, and move the masters of trained parameters to the parameters' device."""
        for param, master in with_masters(map(self.model.get_parameter, self._fp8())):
            if not isinstance(param, Fp8Weight):
                self._to_fp8(param, master)
        flatten_recurrent(self.model)
        for param, master in with_masters(self.model.parameters()):
            if param.requires_grad and master.device != param.device:
                master.data = master.data.to(param.device)
            if not isinstance(param, Fp8Weight):
                moved(param, master)
            if not is_frozen_fp8(param):
                self._set_grad_dtype(param)

    @torch.no_grad()
    def before_forward(self) -> None:
        """Refresh copies whose masters were written, and give unfrozen parameters their masters."""
        self._widened.follow()
        copies = with_masters(param for _, param in self._copies.of(self.model))
        written = [(param, master) for param, master in copies if master_was_written(master)]
        written = [pair for pair in written if not was_written(*pair)]
        if written:
            self.refresh(written)
        for _, param in self._frozen_fp8.unfrozen(self.model):
            self._split(param)
        for _, param in self._frozen.of(self.model):
            master = master_of(param)
            if param.requires_grad:
                self._came_as.discard(param)
                values = (param if master is None else master).detach().to(param.device, torch.float32, copy=True)
                if master is None:
                    self._give_master(param, values)
                else:
                    master.data = values
                self._set_grad_dtype(param)
            elif master is not None and was_written(param, master):
                self._came_as.discard(param)
                master.data = master.data.float()
                take_over(param, master)
                _to_plain(param, master)

    def note_frozen(self) -> None:
        for param, master in with_masters(param for _, param in self._frozen.of(self.model)):
            if not isinstance(param, Fp8Weight):
                note(param, master)

    def before_backward(self) -> None:
        """Store new gradients in the half dtype again: unscaling has made the last gradients FP32."""
        if not self.grad_fp32:
            for param in self.stored():
                self._set_grad_dtype(param)

    def stored(self) -> list[nn.Parameter]:
        """The model's parameters that have a master, each once."""
        return [param for param, _ in with_masters(self.model.parameters()) if not is_frozen_fp8(param)]

    @torch.no_grad()
    def refresh(self, pairs: list[tuple[Any, Tensor]]) -> None:
        """Write the values of masters into their copies."""
        on_device = []
        for param, master in pairs:
            if isinstance(param, Fp8Weight):
                param.quantize_(master)
            elif param.device == master.device:
                on_device.append((param, master))
            else:
                param.copy_(master)
        left = self._copy_measuring(on_device)
        if left:
            torch._foreach_copy_([param for param, _ in left], [master for _, master in left])
        for param, master in pairs:
            note(param, master)

    def _copy_measuring(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Refresh copies with the kernel that also measures the copies; returns the pairs that the kernel refuses."""
        kernels = copy_kernels() if self.measures and pairs and pairs[0][0].is_cuda else None
        if kernels is None:
            return pairs
        device = pairs[0][0].device
        taken: list[tuple[Tensor, Tensor]] = []
        left: list[tuple[Tensor, Tensor]] = []
        for p, m in pairs:
            takes = p.device == device and p.ndim > 1 and p.numel() and p.is_contiguous() and m.is_contiguous()
            (taken if takes else left).append((p, m))
        if taken:
            if self._copier is None:
                self._copier = kernels.FusedCopy()
            amaxes = self._copier.copy([m for _, m in taken], [p for p, _ in taken]).unbind()
            for (param, _), amax in zip(taken, amaxes, strict=True):
                param.amax_of_step = amax  # type: ignore[attr-defined]
        return left

    def _give_back(self, param: nn.Parameter, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        master = master_of(param)
        assert master is not None
        param.grad_dtype = param.dtype
        if isinstance(param, Fp8Weight):
            delattr(param, MASTER)
            values = to_original_dtype(param, master.data.to(param.device))
            note_original_dtype(param, None)
            plain = nn.Parameter(values, requires_grad=param.requires_grad)
            swap_or_replace(self.model, param, plain, replaced)
        else:
            take_over_written(param, master)
            _to_plain(param, master)

    def remove(self) -> None:
        super().remove()
        self._places.clear()
        self._comparisons.clear()
        self._compared = None

    def _to_fp8(self, param: nn.Parameter, master: Tensor) -> None:
        stored = Fp8Weight.from_float(master.to(param.device), E4M3, self.half, self._margin)
        param.grad = None
        forget(param)
        swap(param, nn.Parameter(stored, requires_grad=param.requires_grad))

    # The optimizer's side

    def attach(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` step on the masters."""
        super().attach(optimizer)
        for param, state in optimizer.state.items():
            if master_of(param) is not None:  # Adagrad makes its state when it is built, in the copies' dtype
                state.update({k: v.float() for k, v in state.items() if getattr(v, "dtype", None) == self.half})
        after = optimizer.register_step_post_hook(lambda opt, args, kwargs: self._after_step(opt))
        # First, so that the user's hooks find the model's own parameters in the groups.
        call_first(optimizer, after)
        for handle in (
            after,
            optimizer.register_step_pre_hook(self._before_step),
            # Optimizer.load_state_dict casts state to the dtype of the parameters in the groups.
            optimizer.register_load_state_dict_pre_hook(lambda opt, state: self.swap_in(opt)),
            optimizer.register_load_state_dict_post_hook(self.swap_out),
        ):
            self._hooks.enter_context(handle)
        for name in ("train", "eval"):
            if callable(getattr(optimizer, name, None)):
                self._write_masters_in(optimizer, name)

    def _write_masters_in(self, optimizer: Optimizer, name: str) -> None:
        """Let a method of a schedule-free ``optimizer``, which moves weights to their averages or back, see masters.

        Source: "The Road Less Scheduled", arXiv:2405.15682, whose optimizers have the methods ``train`` and ``eval``.
        """
        held, function = ref(optimizer), getattr(type(optimizer), name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = held()
            assert found is not None
            self.swap_in(found)
            try:
                return function(found, *args, **kwargs)
            finally:
                self.swap_out(found)
                with torch.no_grad():
                    self.refresh(self._places[found].pairs)

        def undo() -> None:
            found = held()
            if found is not None:
                found.__dict__.pop(name, None)

        optimizer.__dict__[name] = call
        self._hooks.callback(undo)

    def find_written(self, optimizer: Optimizer) -> Tensor | None:
        copies = self._places_of(optimizer).pairs
        pairs = [pair for pair in copies if not isinstance(pair[0], Fp8Weight) and not was_written(*pair)]
        compared = self._comparisons.get(optimizer)
        if compared is None or not compared.is_of(pairs):
            compared = self._comparisons[optimizer] = Comparison(pairs)
        self._compared = compared
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        return compared.differ(samples=steps & (steps - 1) != 0)

    def refuse_written(self) -> None:
        assert self._compared is not None
        name = self._name(self._compared.which())
        raise RuntimeError(
            f"{name} was written in place through .data, which nothing tells of, and this "
            "step has overwritten it from its master. Write to the parameter itself, under torch.no_grad(): "
            "param.clamp_(-1, 1) instead of param.data.clamp_(-1, 1)."
        )

    def _name(self, written: list[Tensor]) -> str:
        wanted = {id(param) for param in written}
        return next((name for name, param in self.named().items() if id(param) in wanted), "A weight")

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.swap_in(optimizer)
        self._stepped_pairs = []
        evaluates = len(args) > 1 or any(value is not None for value in kwargs.values())  # a closure, of new gradients
        # A hook of the user's may read or write the gradients.
        ours = all(getattr(hook, "__module__", "").startswith(_PACKAGE) for hook in step_pre_hooks(optimizer))
        if self._steps_masters is not None and not evaluates and ours:
            self._stepped_pairs = self._steps_masters(optimizer, self._places[optimizer].pairs)

    def _after_step(self, optimizer: Optimizer) -> None:
        for param, master in self._stepped_pairs:
            note(param, master)
        self._stepped_pairs = []
        pairs = self._places[optimizer].pairs
        stepped = [(param, master) for param, master in pairs if master.grad is not None]
        written = [param for param, master in pairs if was_written(param, master)]
        self.swap_out(optimizer)
        if written:
            raise RuntimeError(
                f"{self._name(written)} was written while its optimizer stepped, by a hook that was registered after "
                "the training had begun: the step has not seen it. Write weights before optimizer.step() or after it, "
                "or register the hook in configure_optimizers."
            )
        self.refresh(stepped)

    @contextmanager
    def evaluating(self, optimizer: Optimizer) -> Iterator[None]:
        self.swap_out(optimizer)
        self.refresh(with_masters(param for group in optimizer.param_groups for param in group["params"]))
        try:
            yield
        finally:
            self.swap_in(optimizer)

    def swap_in(self, optimizer: Optimizer) -> None:
        """Put the masters and their gradients in the copies' places, in the existing lists."""
        places = self._places_of(optimizer)
        for param, master in places.pairs:
            if was_written(param, master):
                take_over(param, master)
            grad = param.grad
            master.grad = grad if grad is None or grad.dtype == torch.float32 else grad.float()
        places.take(optimizer)

    def swap_out(self, optimizer: Optimizer) -> None:
        """Put the copies back into the optimizer's groups."""
        places = self._places[optimizer]
        for _, master in places.pairs:
            master.grad = None
        places.leave(optimizer)

    def _places_of(self, optimizer: Optimizer) -> Places:
        """The places of the copies, which are in the groups after the call, whatever a step that failed has left."""
        places = self._places.get(optimizer)
        if places is not None and places.taken:
            self.swap_out(optimizer)
        groups = optimizer.param_groups
        if places is None or not places.fits(groups) or any(self._stepped(p) is not None for p in places.others):
            for param in [param for group in groups for param in group["params"]]:
                self._put_aside(param)
            places = self._places[optimizer] = Places(groups, self._stepped)
        return places

    def _put_aside(self, param: nn.Parameter) -> None:
        """Let the master of ``param`` wait on the CPU, as masters of frozen parameters do, where ``param`` was frozen.

        Its own optimizer steps without a gradient for it. A network of a GAN, which is frozen while the other one
        steps, is not meant: its own optimizer finds it unfrozen.
        """
        master = master_of(param)
        frozen = master is not None and not param.requires_grad and param.grad is None
        if frozen and param not in self._came_as and not is_frozen_fp8(param):
            assert master is not None
            if was_written(param, master):
                take_over(param, master)
            master.data = master.data.to("cpu")
            if not isinstance(param, Fp8Weight):
                moved(param, master)
            self._add_frozen(param)

    def _stepped(self, param: nn.Parameter) -> Tensor | None:
        """The master that is stepped in the place of ``param``; None for a parameter that is stepped itself."""
        # Put into the model after the conversion, or swapped by torch.
        if param.dtype == self.half and param.requires_grad and master_of(param) is None:
            grad = param.grad
            self._give_master(param, param.detach().to(torch.float32, copy=True))
            self._set_grad_dtype(param)
            param.grad = grad if grad is None else grad.to(param.grad_dtype)
        return None if param in self._came_as or is_frozen_fp8(param) else master_of(param)


def _to_plain(param: nn.Parameter, master: Tensor) -> None:
    """Give a half copy the values of its master, in the dtype in which the parameter came."""
    delattr(param, MASTER)
    forget(param)
    param.data = to_original_dtype(param, master.data.to(param.device))
    note_original_dtype(param, None)
    param.grad_dtype = param.dtype
