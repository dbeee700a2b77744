"""``convert="auto"``: leaves layers in half precision that are too small to gain.

How many rows a layer multiplies shows when it runs. So all layers are converted at first, and run so for one step, in
which ``Calls`` notes their sizes. After the step ``choose`` compares the times of ``gemm_times.py``. From then on a
layer that is left has a plan without a recipe: its GEMMs run in half precision, and its weight stays stored as it was.
Batches of other sizes than the first step's are not looked at.

The times are the GPU's. With CUDA graphs they are what counts, since the host launches whole blocks. Compiled code is
taken to be like that, whose host time has not been measured. Where layers launch their kernels one by one, the host
needs longer for a layer in FP8 than for ``nn.Linear``, and the layers together take the longer one of the GPU's and of
the host's time. The host runs ahead of the GPU, so what counts is the sum over a step and not the single layer: if the
host's sum is longer, the layers that gain least on the GPU are left, one after the other, as long as this makes the
longer sum shorter. What is no linear layer is not looked at, as if the GPU and the host needed the same time for it.
Where graphs are wanted, blocks count as captured ones, even if they cannot be captured in the end.

Several processes that average gradients compare the longest time of each layer over the processes, for which the step
waits, and so choose alike.

Layers that read one tensor, such as query, key and value, share the time to quantize the tensor: it is charged to those
that gain by the rest, in proportion to their gains. Layers that may compute as one (``group.py``) are looked at as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.choice import Choice
from nemo_lowprec.compute.convert import gemm_plans, replace_plan
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.gemm_times import HOST_FP8, HOST_HALF, Call, GemmTimes, Stored
from nemo_lowprec.compute.producers import Reader, reader_of
from nemo_lowprec.compute.weight_state import WeightStates


class Calls:
    """The calls of a model's layers in one step.

    Attributes:
        groups: how often each group of calls has come that read one tensor after each other; with whether the module
            that has computed the tensor quantizes it, too.
        launched: how often each layer was called outside of compiled code.
    """

    def __init__(self) -> None:
        self.groups: Counter[tuple[tuple[Call, ...], bool]] = Counter()
        self.launched: Counter[str] = Counter()
        self._open: list[Call] = []
        self._offered = False
        self._tensor: Any = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model is not watched

    def __reduce__(self) -> Any:
        return type(None), ()

    def see(self, name: str, x: Tensor, outs: int, wgrad: bool) -> None:
        """The layer ``name`` is about to multiply ``x`` [..., ins]."""
        if self._tensor() is not x:
            self.close()
            self._tensor, self._offered = ref(x), reader_of(x) is not None
        ins = x.shape[-1]
        self.launched[name] += 1
        self._open.append(Call(name, x.numel() // ins, ins, outs, x.requires_grad, wgrad))

    def see_traced(self, name: str, rows: int, ins: int, outs: int, is_first: bool) -> None:
        """The same in a compiled graph. ``is_first``: this layer is the first one that reads the tensor."""
        if is_first:
            self.close()
        self._open.append(Call(name, rows, ins, outs, True, True))

    def close(self) -> None:
        """No more calls with the tensor of the last call."""
        if self._open:
            self.groups[tuple(self._open), self._offered] += 1
        self._open, self._tensor, self._offered = [], lambda: None, False


def _are_one(group: tuple[Call, ...]) -> bool:
    """Whether the layers of ``group`` can compute as one."""
    alike = {(call.rows, call.ins, call.dgrad, call.wgrad) for call in group}
    return len(group) > 1 and len(alike) == 1 and len({call.name for call in group}) == len(group)


# A patch embedding reads what the data are, and is left unless FP8 takes at most this share of its time.
_CLEAR = 0.9

# Of each layer, over its calls of a step: µs in FP8 and in half precision, FLOP, rows, the sizes of its weight, and
# calls that the host launches one by one.
LOW, HALF, _FLOP, _ROWS, _INS, _OUTS, _LAUNCHED = range(7)


def costs(
    calls: Calls, names: list[str], times: GemmTimes, recipe: Recipe, stored: Stored, offered: Container[str] = (),
    joins: bool = False,
) -> Tensor:  # fmt: skip
    """What the layers cost, FP32 [len(names), 7]; zeros for a layer that was not called.

    Args:
        stored: how the weights are stored.
        offered: the layers whose output gradient is quantized by the module that computes it.
        joins: whether layers that read one tensor compute as one.
    """
    calls.close()
    at = {name: index for index, name in enumerate(names)}
    found = torch.zeros(len(names), 7, dtype=torch.float64)
    called: Counter[str] = Counter()
    for (group, is_offered), count in calls.groups.items():
        each = [(call, times.in_fp8(call, recipe, call.name in offered), times.in_half(call)) for call in group]
        gained = [max(half - low, 0.0) for _, low, half in each]
        shared = max(times.of_input(call, recipe, is_offered) for call in group)
        if joins and _are_one(group):
            one = group[0]._replace(outs=sum(call.outs for call in group))
            forward = [times.in_fp8(c._replace(dgrad=False, wgrad=False), recipe) for c in (one, *group)]
            together = shared + times.in_fp8(one, recipe, all(call.name in offered for call in group))
            together += sum(forward[1:]) - forward[0]  # each layer has an output of its own
            alone = sum(half for *_, half in each)
            if together < alone:  # each at the same share of its half time, so that all are converted or none
                each, gained, shared = [(c, h * together / alone, h) for c, _, h in each], [0.0] * len(each), 0.0
        for (call, low, half), gain in zip(each, gained, strict=True):
            row = found[at[call.name]]
            row[LOW] += count * (low + (shared * gain / sum(gained) if gain else 0.0))
            row[HALF] += count * half
            row[_FLOP] += count * call.flop * (1 + call.dgrad + call.wgrad)
            row[_ROWS] = max(row[_ROWS].item(), call.rows)
            row[_INS], row[_OUTS] = call.ins, max(row[_OUTS].item(), call.outs)
            called[call.name] += count
    for name, count in called.items():
        row = found[at[name]]
        low, half = times.of_weight(int(row[_INS] * row[_OUTS]), stored)
        row[LOW] += low
        row[HALF] += half * (count if stored.each_call else 1)
        row[_LAUNCHED] = calls.launched[name]
    return found.float()


def choose(
    cost: Tensor, names: list[str], times: GemmTimes, half: str, kept: int, by_host: bool = False,
    patches: Container[str] = (),
) -> Choice:  # fmt: skip
    """The layers to leave in half precision.

    Args:
        cost: of ``costs``.
        half: the format's name.
        kept: elements of the matrices that GEMMs read and that are in half precision anyway.
        by_host: whether the host's time counts, too.
        patches: the names of patch embeddings.
    """
    choice, rows = Choice(), cost.tolist()
    slow = _slow_on_host(rows) if by_host else set()
    low = in_half = low_flop = left_flop = 0.0
    for at, (name, (fp8, other, flop, m, ins, outs, _)) in enumerate(zip(names, rows, strict=True)):
        clear = _CLEAR if name in patches else 1.0
        if other and (fp8 >= clear * other or at in slow):
            reason = f"too small: {ins:,.0f} × {outs:,.0f} at {m:,.0f} rows, "
            reason += f"FP8 takes {fp8 / other:.2f} × {half}'s time"
            choice.left[name] = reason if fp8 >= clear * other else f"{reason}, but the GPU waits for the host"
            left_flop += flop
        else:
            low, in_half, low_flop = low + fp8, in_half + other, low_flop + flop
    how = "measured" if times.measured else "by its roofline"
    if in_half:
        choice.expected = f"{low / in_half:.2f} × {half}'s GPU time expected on {times.family} ({how})"
    elements = sum(row[_INS] * row[_OUTS] for row in rows if row[HALF])
    others = (low_flop + left_flop) * kept / elements if elements else 0.0  # as many rows as in the other layers
    total = low_flop + left_flop + others
    if choice.left and left_flop + others > total / 2:
        choice.problem = (
            f"{(left_flop + others) / total:.0%} of the FLOP of the model's matrices stay in {half}: "
            f"{len(choice.left)} layers are too small to gain by FP8 at {max(r[_ROWS] for r in rows):,.0f} rows. A "
            "larger batch gives them more rows; convert=None converts them all the same."
        )
    return choice


def _slow_on_host(rows: list[list[float]]) -> set[int]:
    """The layers that gain on the GPU, and that are left since the host's time is the longer one."""
    gpu = sum(min(row[LOW], row[HALF]) for row in rows)
    gaining = [at for at, row in enumerate(rows) if row[LOW] < row[HALF] and row[_LAUNCHED]]
    gaining.sort(key=lambda at: (rows[at][HALF] - rows[at][LOW]) / rows[at][_LAUNCHED])
    host = HOST_HALF * sum(row[_LAUNCHED] for row in rows)
    host += (HOST_FP8 - HOST_HALF) * sum(rows[at][_LAUNCHED] for at in gaining)
    best, count = max(gpu, host), 0
    for left, at in enumerate(gaining, start=1):
        gpu += rows[at][HALF] - rows[at][LOW]
        host -= (HOST_FP8 - HOST_HALF) * rows[at][_LAUNCHED]
        if max(gpu, host) < best:
            best, count = max(gpu, host), left
    return set(gaining[:count])


class SpeedFilter:
    """Watches the layers of a converted model, and leaves layers in half precision. Holds no module of the model.

    Args:
        model: converted.
        half_backend: runs GEMMs in half precision; None leaves them to torch.
        weights: of the converted layers. Those of layers that are left are quantized no more.
        low_bit: whether the weights are stored in low bits, so that layers in half precision keep a half form of them.
    """

    def __init__(
        self, model: nn.Module, half_backend: Backend | None, weights: WeightStates, low_bit: bool = False
    ) -> None:
        self._half_backend, self._weights, self._low_bit = half_backend, weights, low_bit
        self._readers = [ref(own) for m in model.modules() for own in m.__dict__.values() if isinstance(own, Reader)]
        self._plans = {
            plan.name: (ref(module), weight, plan)
            for module in model.modules()
            for weight, plan in gemm_plans(module).items()
            if plan.recipe is not None
        }
        self.calls: Calls | None = None

    def offered(self) -> set[str]:
        """The layers whose last output gradient was handed over, or announced, by the module that computes it."""
        return {name for name, (_, _, plan) in self._plans.items() if plan.operands["grad_output"].offered}

    def watch(self, wanted: bool) -> None:
        """Note the calls of all layers from now on, or no more."""
        self.calls = Calls() if wanted else None
        for _, _, plan in self._plans.values():
            plan.calls = self.calls

    def leave(self, names: Mapping[str, Any]) -> None:
        """Run the GEMMs of these layers in half precision, and those of all others in FP8."""
        changed = False
        self._weights.leave_out(names)
        for name, (held, weight, plan) in self._plans.items():
            module = held()
            if module is None:  # the model has lost the layer
                continue
            now = gemm_plans(module)[weight]
            if name not in names:
                if now is plan:
                    continue
                replace_plan(module, weight, plan)
            elif now is plan:
                backend = self._half_backend or plan.backend
                other = GemmPlan(backend, plan.half, name=name, observers=plan.observers)
                other.by_torch, other.keeps_weight = self._half_backend is None, plan.keeps_weight
                if self._low_bit:
                    other.weight = self._weights.keep_half(name, module, weight)
                replace_plan(module, weight, other)
            else:
                continue
            changed = True
        for own in self._readers if changed else ():
            reader = own()
            if reader is not None:  # which of the layers that read one tensor quantizes it may have changed
                reader.forget()
