"""Column Computation (GEMM) of one model: converted layers, their amaxes, and the context of a forward pass."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_lowprec.chart.options import Options
from nemo_lowprec.column import Column
from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.adapters import base_layers_of, refuse_late_adapters
from nemo_lowprec.compute.amaxes import AmaxState, TEAmaxes
from nemo_lowprec.compute.attention import check_attention, prefer_attention
from nemo_lowprec.compute.backends import Backend, choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.choice import CHOICE, UNTIMED, Choice
from nemo_lowprec.compute.class_swap import revert_layers
from nemo_lowprec.compute.compiled_ops import make_missing_weights
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.convert import convert_layers, gemm_plans, linear_weights, take_fp32_input_outside_autocast
from nemo_lowprec.compute.coverage import as_patterns, groups_of
from nemo_lowprec.compute.embedding import convert_embeddings
from nemo_lowprec.compute.experts.reading import compute_in_half
from nemo_lowprec.compute.filters import full_name
from nemo_lowprec.compute.first_step import FirstStep
from nemo_lowprec.compute.flat_linear import is_flat
from nemo_lowprec.compute.gemm_times import STORED, GemmTimes, stored_form, times_of
from nemo_lowprec.compute.graph_entry import GraphEntry, follow_parameters
from nemo_lowprec.compute.graphs import BlockGraphs
from nemo_lowprec.compute.group import LayerGroups
from nemo_lowprec.compute.half_layers import take_fp32_input, take_fp32_input_in_lstm
from nemo_lowprec.compute.keeping import find_gated, keep_less, may_keep_less
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.compute.layers_table import describe_layers
from nemo_lowprec.compute.learned import learned, restore
from nemo_lowprec.compute.lora import NAME as LORA
from nemo_lowprec.compute.lora import add_adapters
from nemo_lowprec.compute.own_parameters import show_own_parameters
from nemo_lowprec.compute.patterns import Match
from nemo_lowprec.compute.patterns.gated_mlp import GatedMLPs
from nemo_lowprec.compute.speed_filter import SpeedFilter, choose, costs
from nemo_lowprec.compute.wrappers import check_unwrapped
from nemo_lowprec.observers import NOBODY, Observers

log = logging.getLogger("nemo_lowprec")

_GROUPS, _LEARNED = "groups", "learned"  # in checkpoints
_KEPT_WEIGHTS = 2**31  # with weight_cache="auto", elements up to which quantized weights are kept: 4 GiB on a GPU


class Computation(Column):
    """The layers of one model.

    Args:
        options: the arguments of the level.
        half: dtype of activations, and of GEMMs that are not in FP8.
        amaxes: the state of the layers that this package converts, which outlives a conversion.
        half_weights: whether parameters are half, so that layers which are not converted must take FP32 input, too.
        fp32_wgrad: whether the weight gradients of half weights are FP32.
        opens_autocast: whether modules run under autocast where a loop has none.
        gathered_as: dtype in which FSDP2 gathers weights from shards; None for whole weights.
        frees_weights: whether gathered weights are freed between forward and backward.
        observers: are told of quantized operands.

    Attributes:
        amaxes: the states of all layers with FP8 operands, Transformer Engine's own included.
        conversion: how each layer is computed.
        when_decided: called once ``convert="auto"`` has decided, after a step or by a checkpoint.
        backend: runs the GEMMs; None before ``check``.
    """

    def __init__(
        self,
        options: Options,
        half: torch.dtype,
        amaxes: AmaxState,
        half_weights: bool = False,
        fp32_wgrad: bool = False,
        opens_autocast: bool = True,
        gathered_as: torch.dtype | None = None,
        frees_weights: bool = False,
        observers: Observers = NOBODY,
    ) -> None:
        self.options, self.half, self.own_amaxes, self.observers = options, half, amaxes, observers
        self.amaxes = [amaxes]
        self.conversion = Conversion()
        self.backend: Backend | None = None
        self._half_weights, self._fp32_wgrad, self._opens_autocast = half_weights, fp32_wgrad, opens_autocast
        self._gathered_as, self._frees_weights = gathered_as, frees_weights
        self._model: nn.Module | None = None
        self.device = torch.device("cpu")
        self._has_te_layers = False
        self._hooks = ExitStack()
        self._graphs: BlockGraphs | None = None
        self._filter: SpeedFilter | None = None
        self._joined: LayerGroups | None = None
        self._first: FirstStep | None = None
        self._not_called: dict[str, str] = {}
        self._settled = self._waits = self._training = self._looked_at_modes = False
        self.when_decided: Callable[[], None] | None = None

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        """Raise ValueError where the level, or the forced backend, cannot run on ``device``."""
        check_unwrapped(model)
        sharded = "with sharded weights, which FSDP2 gathers and frees"
        if self.options.graphs is True and (device.type != "cuda" or self._gathered_as is not None):
            where = "on a CPU" if device.type != "cuda" else sharded
            raise ValueError(f"graphs=True: there are no CUDA graphs {where}. Leave it out.")
        if self.options.weight_cache is True and self._gathered_as is not None:
            raise ValueError(f"weight_cache=True: no weights are kept {sharded}. Leave it out.")
        if self.options.activations is not None and not may_keep_less(model):
            raise ValueError(
                f"activations={self.options.activations!r}: {type(model).__name__} has no norm and no activation that "
                "is a module (nn.GELU in the place of F.gelu). Leave it out, or recompute whole blocks."
            )
        if self.options.frozen == "fp8" and self._gathered_as is not None:
            raise ValueError(
                f"frozen='fp8': FSDP2 shards frozen weights as they come, and {sharded.removeprefix('with ')}. Leave "
                "it out, and load the frozen weights in half precision; or use strategy='lowprec_ddp'."
            )
        self.device, self.backend = device, self.choose_backend(device)
        if self.options.recipe is not None and te_layers.has_te_layers(model):
            te_layers.te_recipe(self.options.recipe)  # refuses options that Transformer Engine's layers lack

    def choose_backend(self, device: torch.device) -> Backend:
        """The backend that runs the GEMMs on ``device``; ValueError where no backend can."""
        self.check_device(device)
        return choose_backend(self.options.backend, self.options.recipe, device)

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError where ``device`` has not the half format, or not the attention, of the level."""
        name = self.options.level.name
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} runs on NVIDIA GPUs and on CPUs, not on {device.type}.")
        if device.type == "cuda" and self.half == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            raise ValueError(f"{name} needs a GPU with BF16 (compute capability 8.0). Use an fp16 level here.")
        check_attention(self.options.attention, device)

    def install(self, model: nn.Module, training: bool) -> None:
        assert self.backend is not None
        self._model, self._training = model, training
        gated = find_gated(model) if self.options.activations is not None else {}
        # torch's half GEMMs on CPUs are up to 100 times slower than the reference backend, and round oftener.
        half_backend = ReferenceBackend() if self.device.type == "cpu" else None
        self.own_amaxes.weights.leave_out()
        self.conversion = convert_layers(
            model,
            self.half,
            self.options.recipe,
            self.backend,
            half_backend,
            self.options.layers,
            self.own_amaxes.histories,
            fp32_wgrad=self._fp32_wgrad,
            weights=self.own_amaxes.weights,
            observers=self.observers,
        )
        refuse_late_adapters()
        if self.options.recipe is not None:
            self.conversion.fused |= dict.fromkeys(add_adapters(model), LORA)
        for plan in (plan for module in model.modules() for plan in gemm_plans(module).values()):
            plan.inputs.parameters_stay = self._gathered_as is None
        if not (self._half_weights and self._opens_autocast):  # weights read as FP32
            compute_in_half(model)
        if self._half_weights or self.options.level.is_low_bit:
            convert_embeddings(model)
        if self.device.type == "cpu":
            take_fp32_input_in_lstm(model)
        if self._half_weights:
            take_fp32_input(model, self.device.type == "cpu")
            if self._opens_autocast:
                for handle in take_fp32_input_outside_autocast(model):
                    self._hooks.enter_context(handle)
        if self.options.activations is not None:
            self._keep_less(model, self.options.activations, gated)
        if self._half_weights or self.options.level.is_low_bit:
            show_own_parameters(model)  # whose classes have no names that the code above knows
        if self.options.recipe is not None and self.options.layers.is_auto:
            low_bit = self._stored() in ("fp16", "fp8")
            self._filter = SpeedFilter(model, half_backend, self.own_amaxes.weights, low_bit)
            self._waits = training and bool(self.conversion.low)
            if self._waits and self._times() is None and self.own_amaxes.choice is None:
                # Everything else is converted, on a machine with times later, too.
                self.own_amaxes.choice = Choice(dict.fromkeys(self.conversion.patches, UNTIMED))
        if training and self.conversion.doubtful:
            plans = {plan.name: plan for module in model.modules() for plan in gemm_plans(module).values()}
            self._first = FirstStep(self.conversion.doubtful, plans)
        self._has_te_layers = te_layers.has_te_layers(model)
        if self._has_te_layers:
            te_layers.empty_extra_state(model)
            self.amaxes.append(TEAmaxes(model))

    def _keep_less(self, model: nn.Module, wanted: str, gated: dict[str, Match]) -> None:
        assert self.backend is not None
        keeps = Keeps(self.backend, "fp8" in wanted, "recompute" in wanted)
        fused = self.conversion.fused
        own = {name: match for name, match in gated.items() if fused.get(name, GatedMLPs.name) == GatedMLPs.name}
        for module in model.modules():
            for plan in gemm_plans(module).values():
                plan.inputs.again = True
        self.conversion.keeping = keep_less(model, keeps, self.conversion.norms, own)

    @property
    def is_undecided(self) -> bool:
        """Whether ``convert="auto"`` decides after the next step."""
        return self._filter is not None and self._waits and self.own_amaxes.choice is None

    def _decide(self) -> None:
        """After a step: choose the layers that are too small to gain, on all processes alike."""
        assert self._filter is not None and self._filter.calls is not None
        times, recipe = self._times(), self.options.recipe
        assert times is not None and recipe is not None and self._model is not None
        names = self.conversion.low
        stored = self._stored()
        joins = self.backend is not None and self.backend.joins and recipe.scaling == "delayed"
        joins = joins and stored != "fp8" and self._gathered_as is None
        cost = costs(self._filter.calls, names, times, recipe, STORED[stored], self._filter.offered(), joins)
        if self.own_amaxes.reduce_amax is not None:
            cost = cost.to(self.device)
            self.own_amaxes.reduce_amax(cost)
            cost = cost.cpu()
        if not bool(cost.any()):
            return  # no layer has run
        groups = groups_of(self._model, self.conversion)
        kept = round(sum(group.products for group in groups if group.fate.kind == "half"))
        # With activations memory counts: a layer in half precision keeps more than an FP8 layer.
        by_host = self.device.type == "cuda" and self.no_graphs() is not None and self.options.activations is None
        half, patches = self.options.level.autocast.upper(), self.conversion.patches
        self._take(choose(cost, names, times, half, kept, by_host, patches))

    def _times(self) -> GemmTimes | None:
        """The GPU's times; None where nobody knows them, and where FP8 is only emulated."""
        emulates = self.device.type == "cuda" and type(self.backend) is ReferenceBackend
        return None if emulates else times_of(self.device)

    def _stored(self) -> str:
        """How the weights of the converted layers are stored, as ``STORED`` has it."""
        if self._most_are_frozen():
            return "fp8"
        form = stored_form(self.options.level, self.options.recipe)
        return "half" if form == "fp32" and self._gathered_as == self.half else form

    def _most_are_frozen(self) -> bool:
        """Whether most elements of the converted weights are stored in FP8 since they are frozen."""
        if self._model is None or not self._training:
            return False
        params = map(self._model.get_parameter, self.frozen_in_fp8())
        frozen = sum(p.numel() for p in params if not p.requires_grad)
        return 2 * frozen > sum(weight.numel() for weight in self._converted_weights())

    def _take(self, choice: Choice) -> None:
        """Compute by ``choice`` from now on."""
        self.own_amaxes.choice = choice
        if self._settled:
            self.settle()
            if self.when_decided is not None:
                self.when_decided()

    def settle(self) -> None:
        self._settled = True
        if self._filter is not None:
            choice = self.own_amaxes.choice
            self.conversion.left = {} if choice is None else choice.among(self.conversion.low)
            self._filter.leave(self.conversion.left)
            self._filter.watch(self.is_undecided)
        if self._first is not None:
            self._first.watch()
        self.conversion.left |= self._not_called
        self._part()
        self.own_amaxes.weights.keeps = self._keeps_weights()
        self.own_amaxes.weights.keeps_frozen = self.options.weight_cache is True
        self.own_amaxes.settle(self.device, self._gathered_as)
        again = "recompute" in (self.options.activations or "") and not self.own_amaxes.weights.keeps
        for module in self._model.modules() if self._model is not None else ():
            for plan in gemm_plans(module).values():
                plan.keeps_weight = plan.keeps_weight and not self._frees_weights and not again
                plan.is_flat = is_flat(plan)
                plan.entry.renew()  # CUDA graphs that torch.compile has recorded read the tables of before
        self._restore_learned()
        self._join()
        self._capture_blocks()

    def _restore_learned(self) -> None:
        if self._model is not None and self.own_amaxes.learned:
            restore(self._model, self.own_amaxes.learned)

    def _join(self) -> None:
        """Let the layers compute as one that are known to, and learn of others."""
        modules = self._model.modules() if self._model is not None else ()
        plans = {plan.name: plan for module in modules for plan in gemm_plans(module).values() if plan.recipe}
        self._joined = LayerGroups(plans, self.own_amaxes.histories, self.own_amaxes.groups)

    def _part(self) -> None:
        """Let every layer compute by itself."""
        if self._joined is not None:
            self._joined.part()
            self._joined = None

    @property
    def overwrites_gradients(self) -> bool:
        """Whether a forward pass overwrites the last gradients, and copies each gradient that a parameter still has."""
        return self._graphs is not None and self._graphs.overwrites_gradients

    def _capture_blocks(self) -> None:
        """Let the model's blocks run as CUDA graphs, once they have run a few times."""
        if self._graphs is not None:
            self._graphs.remove()
        if self._model is None or self.is_undecided:
            return
        if obstacle := self.no_graphs():
            if self.device.type == "cuda":
                log.info("CUDA graphs: off, %s.", obstacle)
            return
        always, saves_memory = self.options.graphs is True, self.options.activations is not None
        self._graphs = BlockGraphs(
            self._model,
            self.device,
            lambda module: gemm_plans(module).values(),
            self.observers,
            always=always,
            saves_memory=saves_memory and not always,
        )

    def no_graphs(self) -> str | None:
        """Why nothing of the model runs as a CUDA graph; None where that is tried once the model has run."""
        if self.device.type != "cuda":
            return "there is no GPU"
        if self._gathered_as is not None:
            return "as FSDP2 gathers the weights anew for each pass"
        if self.options.graphs is False:
            return "as graphs=False"
        if self.options.graphs == "auto" and dist.is_initialized() and dist.get_world_size() > 1:
            return "as there are several processes; graphs=True turns them on"
        return None

    def _keeps_weights(self) -> bool:
        """Whether the layers keep their quantized weights from step to step: 2 bytes a parameter."""
        wanted = self.options.weight_cache
        if self._gathered_as is not None:
            return False  # FSDP2 gathers, and frees, the weights for each pass
        if wanted != "auto":
            return bool(wanted)
        if self.options.activations is not None:  # memory counts
            return False
        return sum(weight.numel() for weight in self._converted_weights()) <= _KEPT_WEIGHTS

    def frozen_in_fp8(self) -> list[str]:
        """The names of the weights that are stored in FP8 where they are frozen.

        A weight that a layer reads in half precision, too, is none of them: a GEMM in half precision would lose bits.
        """
        recipe, model = self.options.recipe, self._model
        if recipe is None or model is None or self.options.frozen == "half" or self._gathered_as is not None:
            return []
        if any(recipe.override_linear_precision[:2]):
            return []
        if self.options.frozen == "auto" and not base_layers_of(model):
            return []
        modules = dict(model.named_modules())
        low, others = set(self.conversion.weights), set()
        for path, module in modules.items():
            others |= {id(p) for name, p in module._parameters.items() if full_name(path, name) not in low}
        # A patch embedding reads raw data, and is often left in half precision.
        kept = self.conversion.patches if self.options.frozen == "auto" else []
        items = zip(self.conversion.low, self.conversion.weights, strict=True)
        return [name for item, name in items if item not in kept and id(model.get_parameter(name)) not in others]

    def _converted_weights(self) -> Iterator[nn.Parameter]:
        for weights in map(linear_weights, [self._model] if self._model is not None else []):
            yield from (weights[name] for name in self.conversion.weights if name in weights)

    def before_forward(self) -> None:
        if GraphEntry.used:
            follow_parameters()
        # A CUDA graph of torch.compile reads the quantized weights that are kept, and makes none.
        if GraphEntry.recorded:
            make_missing_weights()
            self.own_amaxes.weights.refresh()

    def follow_gathered(self, params: list[Tensor]) -> None:
        """Show compiled graphs the layers whose parameters FSDP2 has gathered for the first time."""
        if GraphEntry.used:
            follow_parameters()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward pass: autocast to the half dtype, and FP8 in the user's Transformer Engine layers."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=self.half))
            stack.enter_context(prefer_attention(self.options.attention))
            if self._has_te_layers:
                stack.enter_context(te_layers.te_context(self.options.recipe, self.half))
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward pass, in which activation checkpointing repeats forward passes by the same kernels."""
        with torch.autocast(self.device.type, enabled=False), prefer_attention(self.options.attention):
            yield

    def describe(self) -> tuple[str, str | None] | None:
        """(table of layers and matrices, warning or None); None for a level that converts no layer to FP8."""
        recipe = self.options.recipe
        if recipe is None or self._model is None or self.backend is None:
            return None
        how = f"{recipe.scaling}, {self.backend.name}"
        choice = self.own_amaxes.choice if self._filter is not None else None
        note = "layers that are too small to gain are left after the first step" if self.is_undecided else ""
        note, problem = (note, None) if choice is None else (choice.expected, choice.problem)
        return describe_layers(
            self._model, self.conversion, self.options.level, how, self.options.activations, note, problem
        )

    @property
    def waits(self) -> bool:
        return any(amaxes.waits for amaxes in self.amaxes)

    def after_step(self, skipped: bool | Tensor) -> None:
        if self._joined is not None:
            self._joined.end_step()
        for amaxes in self.amaxes:
            amaxes.after_step(skipped)
        if self._first is not None:
            self._end_first_step(self._first)
        if self.is_undecided:
            self._decide()
        if not self._looked_at_modes:
            self._look_at_modes()

    def _look_at_modes(self) -> None:
        """After the first step warn of trained layers in evaluation mode, whose amaxes nobody records."""
        self._looked_at_modes = True
        if self.own_amaxes.histories is None or self._model is None:
            return
        evaluating = [
            plan.name
            for module in self._model.modules() if not module.training
            for weight, plan in gemm_plans(module).items()
            if plan.recipe is not None and module.get_parameter(weight).requires_grad
        ]  # fmt: skip
        if evaluating:
            warnings.warn(
                f"{self.options.level.name}: {len(evaluating)} of the converted layers were trained in evaluation "
                "mode, in which delayed scaling records no amax and layers are not computed together: "
                f"{', '.join(as_patterns(evaluating))}. transformers' from_pretrained returns models in this mode. "
                "Call model.train() before the training.",
                stacklevel=2,
            )

    def _end_first_step(self, first: FirstStep) -> None:
        """Warn of layers in the table that nobody has called."""
        self._first, found = None, first.end()
        self._not_called = {n: f"{holder} reads its weight without calling it" for n, holder in found.items()}
        self.conversion.left |= self._not_called
        if found:
            holders = ", ".join(sorted(set(found.values())))
            warnings.warn(
                f"{self.options.level.name}: {len(found)} of the converted layers compute in half precision, as "
                f"{holders} reads their weights without calling them: {', '.join(as_patterns(list(found)))}.",
                stacklevel=2,
            )

    def take_back(self) -> None:
        for amaxes in self.amaxes:
            amaxes.take_back()

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for amaxes in self.amaxes for name, value in amaxes.state_dict().items()}
        choice = self.own_amaxes.choice
        if self.own_amaxes.groups:
            state[_GROUPS] = [list(names) for names in self.own_amaxes.groups]
        facts = learned(self._model) if self._model is not None else {}
        if facts:
            state[_LEARNED] = facts
        return state if choice is None else {**state, CHOICE: choice.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for amaxes in self.amaxes:
            amaxes.load_state_dict(state)
        if CHOICE in state and self.options.layers.is_auto:
            choice = Choice(**state[CHOICE])
            if choice != self.own_amaxes.choice:
                self._take(choice)
        self.own_amaxes.groups[:] = [tuple(names) for names in state.get(_GROUPS, [])]
        self.own_amaxes.learned = dict(state.get(_LEARNED, {}))
        if self._settled:
            self._part()
            self._restore_learned()
            self._join()

    def remove(self) -> None:
        if self._graphs is not None:
            self._graphs.remove()
        self._part()
        self._graphs = self._filter = self._first = self.when_decided = None
        self._not_called = {}
        self._settled = False
        self._hooks.close()
        if self._model is not None:
            revert_layers(self._model)
        self._model = None
        self.amaxes = [self.own_amaxes]
        self.own_amaxes.leave()
