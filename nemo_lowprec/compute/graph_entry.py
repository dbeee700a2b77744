"""How a converted layer takes part in a compiled graph, whose operators take tensors and plain constants only.

A layer has these things of which the compiler may know (``GraphEntry``):

``tag``        A tensor of one element. Its address finds the layer's ``GemmPlan`` when an operator runs. To the
               compiler the tag is one more input of the graph, so that blocks of the same code share one compiled
               graph, each with its own tags.
``signature``  Says how the layer computes, without its state: a constant of the graph, which the compiler guards on.
``weight``, ``bias``  The parameters (``GraphParameter``).

No address is given to two tags: a CUDA graph that ``torch.compile`` has recorded is not replayed with another tag, so
that a layer which gets a new tag (``GraphEntry.renew``) lets the recorded graphs that read its old state go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import run_early
from nemo_lowprec.compat.compiler import keep_address
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight, QuantizedTensor, stored_data
from nemo_lowprec.tensors.dtensor import is_sharded
from nemo_lowprec.tensors.gradient import computed_dtype, gradient_dtype
from nemo_lowprec.tensors.weak_hooks import weakly

_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_entries: WeakSet[Any] = WeakSet()
_tags: list[Tensor] = []  # all that were ever made, so that none of their addresses is given again
_kinds: dict[str, Any] = {}


class GraphParameter:
    """What a compiled graph reads of one parameter.

    Dynamo takes no parameter in low-bit storage, and none with a gradient of another dtype; AOTAutograd would round the
    gradient to the parameter's dtype. Of such a parameter the graph reads ``data``, and gives its gradient to ``sink``.
    The compiler then guards on neither the parameter nor its ``requires_grad``: see ``follow_parameters``.

    Attributes:
        param: the parameter; None for none.
        data: the parameter's elements, without a gradient; None where the graph takes the parameter itself.
        scale_inv: FP32 [1]; value = data * scale_inv. None for no scale.
        dtype: that the parameter reads as.
        sink: a tensor without memory that hands its gradient on to the parameter, by autograd.
        trains: whether the parameter has a gradient.
        sums_in_fp32: whether the parameter's gradient in autograd is FP32.

    Args:
        computed: gives the dtype in which backward computes the gradient of a parameter.
    """

    def __init__(self, computed: Callable[[Tensor], torch.dtype]) -> None:
        self._computed = computed
        self.param: Tensor | None = None
        self.data: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.sink: Tensor | None = None
        self.dtype = torch.float32
        self.trains = self.sums_in_fp32 = False

    def follow(self, param: Tensor | None) -> None:
        """Read ``param`` from now on."""
        if self._is(param):
            return
        same, self.param = param is self.param, param
        self.data = self.scale_inv = None
        if param is None:
            return
        dtype = self._computed(param)
        self.trains, self.dtype = param.requires_grad, param.dtype
        self.sums_in_fp32 = gradient_dtype(param) == torch.float32
        if isinstance(param, QuantizedTensor):
            self.data, *scale = param.parts()
            self.scale_inv = scale[0] if scale else None
        elif dtype != param.dtype:
            self.data = param.detach()
        for part in (self.data, self.scale_inv):
            if part is not None:
                keep_address(part)
        if self.data is None or not self.trains:
            return
        if not same or self.sink is None or self.sink.dtype != dtype or self.sink.device != param.device:
            self.sink = _new_sink(param, dtype)

    @contextmanager
    def standing_in(self, twin: Tensor) -> Iterator[None]:
        """Context in which the parameter's gradient goes to ``twin``, which lies in the parameter's memory."""
        before = self.param, self.sink
        self.param, self.sink = twin, None if self.sink is None else _new_sink(twin, self.sink.dtype)
        try:
            yield
        finally:
            self.param, self.sink = before

    def _is(self, param: Tensor | None) -> bool:
        """Whether everything is as it was."""
        if param is not self.param or param is None:
            return False
        dtype = self._computed(param)
        if self.data is None:
            return not isinstance(param, QuantizedTensor) and dtype == param.dtype
        here = stored_data(param).data_ptr() == self.data.data_ptr() and param.device == self.data.device
        same = self.trains == param.requires_grad and self.dtype == param.dtype
        return here and same and (self.sink is None or self.sink.dtype == dtype)


class GraphEntry:
    """What a compiled graph reads of a layer.

    Args:
        plan: the layer's ``GemmPlan``, held weakly; its attribute ``entry`` is this object. None for a layer that has
            none, and needs no tag.
        layer, name, bias: the module that holds the weight, held weakly, and the names of weight and bias.
        computed: as ``GraphParameter`` has it.

    Attributes:
        tag, signature, weight, bias: see above.
        model: a tag that all layers have in common which share their inputs.
        used: whether any layer was traced.
        recorded: whether any graph was compiled for CUDA graphs, ``mode="reduce-overhead"``.
    """

    used = recorded = False

    def __init__(
        self,
        plan: Any,
        layer: nn.Module,
        name: str = "weight",
        bias: str = "bias",
        computed: Callable[[Tensor], torch.dtype] = computed_dtype,
    ) -> None:
        self._plan = ref(plan) if plan is not None else None
        self._layer = ref(layer, weakly(self._forget))  # the plan may outlive the layer, and must not hold parameters
        self._names, self._computed = (name, bias), computed
        self._forget()
        _entries.add(self)

    def _forget(self, _: Any = None) -> None:
        self.tag: Tensor | None = None
        self.model: Tensor | None = None
        self.signature = ""
        self._signed: Any = None
        self.weight, self.bias = GraphParameter(self._computed), GraphParameter(self._computed)

    def __getstate__(self) -> dict[str, Any]:
        name, bias = self._names
        plan = self._plan and self._plan()
        return {"plan": plan, "layer": self._layer(), "name": name, "bias": bias, "computed": self._computed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def renew(self) -> None:
        """Take another tag, if there is one: the layer's state has moved, or graphs must be recorded again."""
        if self.tag is not None:
            self._forget()
            self.follow()

    @torch.compiler.assume_constant_result
    def prepare(self) -> bool:
        """Prepare all layers that there are; called whenever a layer is traced. Whether the graph can hold this one."""
        GraphEntry.used = True
        follow_parameters()
        return self.follow()

    @torch.compiler.assume_constant_result
    def shows(self) -> bool:
        """Whether Dynamo can look at the weight while it traces the layer."""
        weight = self.weight.param
        if weight is None or isinstance(weight, QuantizedTensor):
            return weight is not None
        return weight.grad is None or weight.grad.dtype == weight.dtype

    def is_current(self) -> bool:
        """Whether the parameters are those that the graph reads, as far as the compiler does not see that itself."""
        layer = self._layer()
        if layer is None or self.weight.param is None:
            return False
        for param, name in zip((self.weight, self.bias), self._names, strict=True):
            if param.data is None:
                continue
            now = layer._parameters.get(name)
            if now is not param.param or now.requires_grad != param.trains:  # type: ignore[union-attr]
                return False
            if stored_data(now).data_ptr() != param.data.data_ptr():  # type: ignore[arg-type]
                return False
        return True

    def _follow_if_moved(self) -> None:
        if not self.is_current():
            self.follow()

    @torch.no_grad()
    def follow(self) -> bool:
        """Follow the layer's parameters. Whether a graph can hold the layer."""
        plan, layer = self._plan and self._plan(), self._layer()
        if layer is None or (plan is None and self._plan is not None):
            return False
        weight, bias = (layer._parameters.get(name) for name in self._names)
        if weight is None or not _fits(plan, weight):
            return False
        self.weight.follow(weight)
        self.bias.follow(bias)
        if plan is not None:
            self._find(plan, weight.device)
        return True

    def _find(self, plan: Any, device: torch.device) -> None:
        """Let operators on ``device`` find ``plan``."""
        if self.tag is None or self.tag.device != device:
            self.tag = _new_tag(device)
            _plans[self.tag.data_ptr()] = plan
        if plan.inputs.tag is None or plan.inputs.tag.device != device:
            plan.inputs.tag = _new_tag(device)
        self.model = plan.inputs.tag
        # FSDP2 frees a gathered weight between the passes. A graph that quantized the weight itself would hold the
        # quantized weight from forward to backward.
        keeps = plan.weight is not None and (plan.weight.keeps or plan.weight.gathered)
        if self._signed != (plan.half, keeps):
            self._signed = plan.half, keeps
            self.signature = _signature(plan, keeps)


def follow_parameters() -> None:
    """Follow the parameters of all layers: compiled graphs see neither new nor frozen ones.

    Layers that were not traced are prepared, too. The compiler then takes the graph that it has for blocks of the same
    code, and compiles no other.
    """
    for entry in list(_entries):
        entry._follow_if_moved()


@contextmanager
def twins_standing_in(twins: Mapping[int, Tensor]) -> Iterator[None]:
    """Context in which compiled graphs give their gradients to ``twins``, and not to the parameters.

    Args:
        twins: by the ids of the parameters, in whose memory the twins lie.
    """
    with ExitStack() as stack:
        for entry in list(_entries):
            for own in (entry.weight, entry.bias):
                if id(own.param) in twins:
                    stack.enter_context(own.standing_in(twins[id(own.param)]))
        yield


class _Sink(torch.autograd.Function):
    """(a parameter, a tensor [] of its gradient's dtype) to the sink, of the parameter's shape; for every pass."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, like: Tensor) -> Tensor:
        return like.expand(param.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _new_sink(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that hands its gradient, of ``dtype``, on to ``param``."""
    with torch.enable_grad():
        sink: Tensor = _Sink.apply(param, torch.empty((), dtype=dtype, device=param.device))
    run_early(sink)  # FSDP2 and DDP reduce gradients as soon as a block's backward is over
    keep_address(sink)
    return sink


def _new_tag(device: torch.device) -> Tensor:
    tag = torch.empty(1, device=device, dtype=torch.float32)
    keep_address(tag)
    _tags.append(tag)
    return tag


def _fits(plan: Any, weight: Tensor) -> bool:
    if weight.is_meta or is_sharded(weight):
        return False
    if isinstance(weight, QuantizedTensor) and type(weight) not in (Fp8Weight, Fp16Weight):
        return False
    if plan is None:
        return True
    # A layer in half precision computes by operations that the compiler knows.
    return all(plan.backend.packing(operand) is not None for operand in plan.operands.values())


def _signature(plan: Any, keeps: bool) -> str:
    backend = "torch" if plan.backend is None else plan.backend.name
    signature = f"{backend}, {plan.half}, {keeps}, {plan.recipe}"
    if signature not in _kinds:
        operands = {kind: replace(operand, slot=None) for kind, operand in plan.operands.items()}
        _kinds[signature] = type(plan)(plan.backend, plan.half, plan.recipe, operands), keeps
    return signature


def plan_of(tag: Tensor) -> Any:
    """The ``GemmPlan`` of ``tag``."""
    plan = _plans.get(tag.data_ptr())
    if plan is None:
        raise RuntimeError("A compiled graph ran with a converted layer that is gone. Compile the model again.")
    return plan


def kind_of(signature: str) -> tuple[Any, bool]:
    """(a plan without state that computes so, whether operators find or make the quantized weights)."""
    return _kinds[signature]  # type: ignore[no-any-return]
