"""Layers that read one tensor and compute as one: q, k and v of a block, its gate and up projections.

The model's code runs as it is, and the layers keep their parameters. Which layers belong together is learned: the
backward pass of the layer that has read a tensor first knows all that have read the tensor after it. From the next
step on the first one computes the outputs of all (``group_function.py``), and the others hand theirs out when they are
called. Within a step nothing changes: activation checkpointing repeats forward passes with the roundings they had.

The weights of a group have one scale, of the largest of their amaxes, and so have its output gradients. What was
learned is saved with a run, since sums are rounded otherwise than those of single layers. Code that ``torch.compile``
compiles, evaluation, and levels without delayed scaling or with FP8 weights compute each layer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import saves_through_hooks, unwrap_if_dead
from nemo_lowprec.compat.tensors import is_plain
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import QuantizedOperand, is_transformed
from nemo_lowprec.compute.class_swap import kind_of
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.group_function import apply_group
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.compute.producers import GradReader, reader_of
from nemo_lowprec.compute.shared_input import Latest, may_change_unseen
from nemo_lowprec.compute.weight_scales import WeightScale, WeightScales
from nemo_lowprec.formats import DelayedScaling
from nemo_lowprec.tensors import Fp8Gathered, Fp8Weight, stored_data
from nemo_lowprec.tensors.dtensor import is_sharded, local_shard

_ALL = (True, True, True)  # GEMMs in FP8
_MISSES = 2  # passes in which a layer of a group was not called behind the first, after which the group is given up


class LayerGroup:
    """Layers that compute as one.

    Args:
        plans: of the layers, in the order of their calls.
        histories: of the layers' inputs and output gradients.
        given_up: is called with the group when its layers were called otherwise.

    Attributes:
        plans: as above.
        widths: out_features of each.
    """

    def __init__(
        self, plans: Sequence[GemmPlan], histories: DelayedScaling, given_up: Callable[[LayerGroup], None]
    ) -> None:
        self.plans, self._histories, self._given_up = tuple(plans), histories, given_up
        self._states: list[WeightScale] = [plan.weight for plan in plans]  # type: ignore[misc]
        self.widths = [layer.out_features for layer in _layers(plans) or ()]
        self._own = [plan.operands["grad_output"].slot for plan in plans]
        histories.join(self._own[0], self._own[1:])
        self._before = [state.histories for state in self._states]
        for state, plan in zip(self._states[1:], self.plans[1:], strict=True):
            plan.operands["grad_output"].slot = self._own[0]
            state.histories = [*state.histories, self._own[0]]  # they start anew where the weight is written
        table = self._states[0].table
        assert isinstance(table, WeightScales)
        table.join(self._states)
        for plan in plans:
            plan.group = self
        self._made = Latest()
        self._left = 0  # outputs that no layer has handed out
        self._judges, self._missed = True, 0
        self._kept: tuple[Any, list[Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the layers of a copied model compute by themselves

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(plan.name for plan in self.plans)

    def part(self) -> None:
        """Let each layer compute by itself."""
        for plan, state, slot, histories in zip(self.plans, self._states, self._own, self._before, strict=True):
            plan.group, plan.operands["grad_output"].slot, state.histories = None, slot, histories
            state.drop()  # what is kept of the weights has one 1 / scale in common
        table = self._states[0].table
        if isinstance(table, WeightScales):
            table.part(self._states)

    def output(self, layer: nn.Module, plan: GemmPlan, x: Tensor) -> Tensor | None:
        """The output of ``layer``, whose plan is ``plan``, for ``x``; None where the layer has to compute by itself."""
        if plan.weight is None or plan.weight.layer is not layer:  # a replica of ``nn.DataParallel``
            return None
        if plan is not self.plans[0]:
            outs = self._made.get(x)
            out: Tensor | None = None if outs is None or not torch.is_grad_enabled() else outs.pop(id(plan), None)
            self._left -= out is not None
            return out
        if not self._fits(x):
            return None
        self._missed = self._missed + 1 if self._left and self._judges else 0
        if self._missed >= _MISSES:
            self._given_up(self)
        first, *others = self._compute(x, False)
        self._left = len(others)
        self._judges = not saves_through_hooks()  # recomputation inside of backward may stop before all are called
        self._made.set(x, {id(plan): out for plan, out in zip(self.plans[1:], others, strict=True)})
        return first

    def joint_output(self, plans: Sequence[GemmPlan], x: Tensor) -> Tensor | None:
        """The outputs of all layers side by side [..., features]; None where ``plans`` are no group, or cannot now."""
        if len(plans) != len(self.plans) or any(a is not b for a, b in zip(plans, self.plans, strict=True)):
            return None
        if not self._fits(x):
            return None
        (out,) = self._compute(x, True)
        return out

    def _fits(self, x: Tensor) -> bool:
        """Whether the layers can compute ``x`` [..., in_features] together now."""
        layers, plan = _layers(self.plans), self.plans[0]
        if layers is None or not torch.is_grad_enabled() or is_transformed() or plan.calls is not None:
            return False
        if not is_plain(x) or not x.numel() or may_change_unseen(x):
            return False
        if x.numel() // x.shape[-1] % plan.backend.row_multiple:
            return False
        device = "cuda" if x.is_cuda else x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if any(is_sharded(layer.weight) for layer in layers):  # not gathered yet: it is a unit of FSDP2 by itself
            return False
        return dtype == plan.half and all(layer.training == layers[0].training for layer in layers)

    def _compute(self, x: Tensor, joint: bool) -> list[Tensor]:
        layers = _layers(self.plans)
        assert layers is not None
        plan, record = self.plans[0], layers[0].training
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        x = unwrap_if_dead(x)
        source, gradient, gives_out = x, None, False
        if x.requires_grad:
            gradient, handle = plan.inputs.gradient(x)
            gradient.readers.append(plan)
            gives_out = handle is None
            source = x if handle is None else handle
        call = self, x, gradient, gives_out, plan.half, record, joint
        arguments = *map(unwrap_if_dead, weights), *(b if b is None else unwrap_if_dead(b) for b in biases), call
        with AutocastOff("cuda" if x.is_cuda else x.device.type):
            given_out, *outs = apply_group(source, *arguments)
        if given_out is not None:
            plan.inputs.give_out(x, gradient, given_out)  # type: ignore[arg-type]
        if joint:
            wanted = any(weight.requires_grad for weight in weights)
            sums = any(bias is not None and bias.requires_grad for bias in biases)
            GradReader.add(plan, outs[0], x.requires_grad, wanted, sums, record)
        return outs

    # Called by ``GroupFunction``

    def follow(self, weights: Sequence[Tensor], record: bool) -> None:
        """``WeightState.follow`` of each weight."""
        for state, weight in zip(self._states, weights, strict=True):
            state.follow(weight, record)

    def share_input(self, x: Tensor, record: bool) -> None:
        """The first layer has quantized ``x``: count its amax for the others, too."""
        first, reader = self.plans[0].operands["input"], reader_of(x)
        for plan, own in zip(self.plans[1:], self._own[1:], strict=True):
            operand = plan.operands["input"]
            if record:
                self._histories.share(operand.slot, first.slot)
                self._histories.share(own, self._own[0])
            if reader is not None:
                reader.follow(operand)

    @property
    def saves_weights(self) -> bool:
        """Whether forward saves the columnwise operand of the weights for backward."""
        return all(plan.keeps_weight for plan in self.plans)

    def weight_operand(
        self, weights: Sequence[Tensor], rowwise: bool, columnwise: bool, is_later: bool = False
    ) -> QuantizedOperand:
        """The quantized weights, below each other; kept until a weight is written where the layers keep them.

        Args:
            is_later: whether backward calls, after a forward pass that has saved no operand of the weights.
        """
        plan, states = self.plans[0], self._states
        data = [stored_data(weight) for weight in weights]
        if is_later or not all(state.keeps for state in states):
            return self._quantized(data, rowwise, columnwise)
        if self._kept is not None:
            operand, parts = self._kept
            if all([state.kept(True, columnwise) is part for state, part in zip(states, parts, strict=True)]):
                return plan.backend.copy_operand(operand)  # type: ignore[no-any-return]
        with torch.inference_mode(False), torch.no_grad():  # a later pass may save it for backward
            operand = self._quantized(data, True, columnwise)
            parts = operand.split(self.widths, 0)
        for state, part in zip(states, parts, strict=True):
            state.keep(part, True, columnwise, False)
        self._kept = operand, parts
        return plan.backend.copy_operand(operand)  # type: ignore[no-any-return]

    def _quantized(self, data: list[Tensor], rowwise: bool, columnwise: bool) -> QuantizedOperand:
        plan, how = self.plans[0], {"rowwise": rowwise, "columnwise": columnwise}
        made: QuantizedOperand = plan.backend.quantize_weights(data, plan.operands["weight"], **how)
        return made


def _layers(plans: Iterable[GemmPlan]) -> list[LowPrecisionLinear] | None:
    """The layers of ``plans``; None where a plan is no longer its layer's."""
    layers: list[Any] = [None if plan.weight is None else plan.weight.layer for plan in plans]
    mine = zip(layers, plans, strict=True)
    alike = all(kind_of(layer) is LowPrecisionLinear and layer.gemm_plan is plan for layer, plan in mine)
    return layers if alike and all(layer._parameters.get("weight") is not None for layer in layers) else None


class LayerGroups:
    """The groups of one model.

    Args:
        plans: of all layers of the model, by name.
        histories: of the model.
        names: what was learned, to which is added.
    """

    def __init__(
        self, plans: dict[str, GemmPlan], histories: DelayedScaling | None, names: list[tuple[str, ...]]
    ) -> None:
        self._histories, self.names = histories, names
        self._groups: list[LayerGroup] = []
        self._refused: set[str] = set()  # names of the first layers
        self._seen: dict[str, list[GemmPlan]] = {}  # in this step, by the names of the first layers
        self._given_up: list[LayerGroup] = []  # in this step
        for own in names:
            found = [plans[name] for name in own if name in plans]
            if len(found) == len(own) and self._can(found):
                self._add(found)
        me = ref(self)
        for inputs in {id(plan.inputs): plan.inputs for plan in plans.values()}.values():
            inputs.see = lambda readers, me=me: (groups := me()) and groups.see(readers)

    def see(self, plans: list[GemmPlan]) -> None:
        """Layers have read one tensor one after another; called in the backward pass of the first."""
        if not any(plan.group is not None for plan in plans) and plans[0].name not in self._refused:
            self._seen.setdefault(plans[0].name, plans)

    def end_step(self) -> None:
        """Let layers that were seen in this step compute as one, and layers of groups that were given up by themselves.

        Comes before the amaxes of the step enter the histories.
        """
        for group in self._given_up:
            group.part()
            self._groups.remove(group)
            self.names.remove(group.names)
            self._refused.add(group.names[0])
        self._given_up.clear()
        for plans in self._seen.values():
            self._begin(plans)
        self._seen.clear()

    def _begin(self, plans: list[GemmPlan]) -> None:
        if any(plan.group is not None for plan in plans):
            return
        alike: dict[Any, list[GemmPlan]] = {}
        for plan in plans:
            alike.setdefault(_kind(plan), []).append(plan)
        found = [own for own in alike.values() if len(own) > 1 and self._can(own)]
        for own in found:
            self._add(own)
            self.names.append(self._groups[-1].names)
        if not found and plans[0].calls is None:
            self._refused.add(plans[0].name)

    def _add(self, plans: Sequence[GemmPlan]) -> None:
        assert self._histories is not None
        me = ref(self)

        def given_up(group: LayerGroup) -> None:
            if (groups := me()) is not None and group not in groups._given_up:
                groups._given_up.append(group)

        with torch.no_grad():
            self._groups.append(LayerGroup(plans, self._histories, given_up))

    def part(self) -> None:
        """Let all layers compute by themselves; what was learned stays known."""
        for group in self._groups:
            if all(plan.group is group for plan in group.plans):
                group.part()
        self._groups.clear()

    def _can(self, plans: Sequence[GemmPlan]) -> bool:
        """Whether the layers of ``plans`` may compute as one."""
        first, scaled = plans[0], all(isinstance(plan.weight, WeightScale) for plan in plans)
        layers = _layers(plans) if scaled else None
        if self._histories is None or layers is None or len({id(plan) for plan in plans}) != len(plans):
            return False
        if not first.backend.joins or first.calls is not None or not _is_eager(layers):
            return False
        for plan in plans:
            same = type(plan.backend) is type(first.backend) and plan.half == first.half
            if not same or plan.recipe != first.recipe or plan.fp8 != _ALL or plan.ends_branch:
                return False
            if not isinstance(plan.weight.table, WeightScales):  # type: ignore[union-attr]
                return False
            if plan.operands["input"].slot is None or plan.operands["grad_output"].slot is None:
                return False
        local = [local_shard(layer.weight) for layer in layers]
        if any(isinstance(weight, Fp8Weight | Fp8Gathered) for weight in local):
            return False
        if len({(weight.dtype, stored_data(weight).dtype) for weight in local}) > 1:
            return False
        biases = {layer.bias.dtype for layer in layers if layer.bias is not None}
        return len(biases) <= 1 and len({layer.in_features for layer in layers}) == 1


def _kind(plan: GemmPlan) -> Any:
    """Whether the weight is trained. Frozen layers, such as those below adapters, form no group with trained layers."""
    weight = plan.weight.weight if isinstance(plan.weight, WeightScale) else None  # traced plans have another object
    return None if weight is None else weight.requires_grad


def _is_eager(layers: Iterable[nn.Module]) -> bool:
    """Whether the layers run as they are, neither traced nor with a forward of their own."""
    return not torch.compiler.is_compiling() and not any("forward" in layer.__dict__ for layer in layers)
