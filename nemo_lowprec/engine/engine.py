"""The engine: one level's columns put together, for any training loop.

It converts the model, gives the optimizer its masters, and owns what surrounds a step: scale the loss, unscale,
skip where a gradient is not finite, step, refresh the copies, roll the amax histories. The Lightning plugin calls it
from Lightning's hooks and adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.comm import Fp8ShardBucket, GradientReducer, any_rank_, broadcast_weights, reduce_amax
from nemo_lowprec.compute import (
    Backend,
    Conversion,
    ReferenceBackend,
    WeightScales,
    check_attention,
    check_unwrapped,
    choose_backend,
    convert_layers,
    describe_layers,
    gemm_plans,
    new_histories,
    new_weight_scales,
    prefer_attention,
    revert_layers,
    take_fp32_input,
    take_fp32_input_outside_autocast,
    te_layers,
)
from nemo_lowprec.engine.late_optimizers import watch_for_optimizers
from nemo_lowprec.formats import DelayedScaling
from nemo_lowprec.grads import FoundInf, Fp8Gradients, LossScale, clip_grad_norm_, find_nonfinite, unscale_
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import LowBitStates, StateFormats, adopt, check_adoptable, release
from nemo_lowprec.options import LayerFilter, LossScaleConfig, LowBitOptions, Recipe
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard
from nemo_lowprec.tensors.weak_hooks import weakly
from nemo_lowprec.weights import LowBitWeights, MasterWeights, ShardedWeights, TrainedWeights, check_memory

__all__ = ["DTYPES", "Engine", "Sharding", "needs_closure"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ENGINE = "_lowprec_engine"


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _writes(params: list[Tensor]) -> list[tuple[int, int, int]] | None:
    """Changes when a gradient is written or replaced; None with stored ones, which know whether they are finite."""
    grads = [(p.grad, local_shard(p.grad)) for p in params if p.grad is not None]
    if any(isinstance(local, QuantizedTensor) for _, local in grads):
        return None
    return [(id(grad), grad._version, local._version) for grad, local in grads]


def _follow(optimizer: Optimizer, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put the parameters that the model has now in the places of those that it had."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` evaluates the loss itself, several times a step (LBFGS)."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


@dataclass(frozen=True)
class Sharding:
    """The processes among which a model is sharded.

    Attributes:
        world: all that train together.
        shards: those that hold one copy of the model among them.
        replicas: those that hold the same shards; None where there is one copy of the model.
        frees_weights: whether gathered weights are freed between forward and backward.
    """

    world: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None
    frees_weights: bool = True


class Engine:
    """A row of the chart at work on one model.

    Args:
        level: the row.
        recipe: its FP8 arguments; None for a level without FP8.
        loss_scale: its loss scaling; None for a level without.
        layers: which layers are converted.
        backend: ``auto``, ``te``, ``torch`` or ``reference``.
        low_bit: how weights are updated, at a level with low-bit states.
        reads_as: dtype that weights stored in FP16 read as; None for the level's half dtype.
        attention: ``auto``, or ``cudnn`` for cuDNN's kernels in ``scaled_dot_product_attention`` where they can.
    """

    def __init__(
        self,
        level: PrecisionLevel,
        recipe: Recipe | None = None,
        loss_scale: LossScaleConfig | None = None,
        layers: LayerFilter | None = None,
        backend: str = "auto",
        low_bit: LowBitOptions | None = None,
        reads_as: torch.dtype | None = None,
        attention: str = "auto",
    ) -> None:
        self.level = level
        self.observers = Observers()
        self.recipe = recipe
        self.half = DTYPES[level.autocast]
        self.layers = layers or LayerFilter()
        self.backend_name = backend
        self.backend: Backend | None = None
        self.loss_scale = LossScale(loss_scale) if loss_scale is not None else None
        self.histories: DelayedScaling | None = None
        self.weight_scales: WeightScales | None = None
        self.low_bit = low_bit or LowBitOptions()
        self.reads_as = reads_as or self.half
        self.attention = attention
        self._attention_kernels = ExitStack()
        self.masters: MasterWeights | None = None
        self.stored: LowBitWeights | None = None
        self.trained: TrainedWeights | None = None
        self.gradients: Fp8Gradients | None = None
        self.sharding: Sharding | None = None
        self.shards: ShardedWeights | None = None
        self.reducer: GradientReducer | None = None
        self.conversion = Conversion()
        self.model: nn.Module | None = None
        self.device = torch.device("cpu")
        self.skipped: WeakSet[Optimizer] = WeakSet()
        self.when_adopted: Callable[[Optimizer], None] | None = None
        self.when_gathered: Callable[[list[Tensor]], None] | None = None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._released: set[int] = set()
        self._handles: list[Any] = []
        self._found_inf: WeakKeyDictionary[Optimizer, FoundInf] = WeakKeyDictionary()
        self._unscaled: WeakKeyDictionary[Optimizer, tuple[Tensor, Any]] = WeakKeyDictionary()
        self._norms: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._saturated: Tensor | None = None
        self._has_te_layers = False
        self._share_flag: Callable[[Tensor], None] | None = None
        self._reduced: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self  # a copy of the model is another model, and not this engine's

    def __reduce__(self) -> Any:
        # For launchers that hand a plugin to other processes: what belongs to a model stays behind.
        loss_scale = self.loss_scale.config if self.loss_scale is not None else None
        options = (self.low_bit, self.reads_as, self.attention)
        return Engine, (self.level, self.recipe, loss_scale, self.layers, self.backend_name, *options)

    # The model

    @staticmethod
    def of(model: nn.Module) -> Engine | None:
        """The engine that converted ``model`` (or what it is a copy of); None for a plain one."""
        return model.__dict__.get(_ENGINE)

    def convert(self, model: nn.Module, device: torch.device, training: bool = True) -> None:
        """Convert ``model`` in place for ``device``; nothing where this engine did already.

        A model that another engine converted is given back its own layers and FP32 parameters first. One that is not
        for ``training`` gets its very values back at ``revert``.

        Raises:
            ValueError: the level, or the forced backend, cannot run on ``device``, or cannot store a parameter.
        """
        other = self.of(model)
        if other is not None and other.model is not model:  # a deep copy: its parameters are its own
            revert_layers(model)
            other = None
        if other is self and device == self.device:
            return
        check_unwrapped(model)
        backend = self._backend_on(device)
        if other is not None:
            other.revert()
        self._check_weights(model, training)
        if model is not self.model:
            self.revert()
            self.histories = new_histories(self.recipe)
            self.weight_scales = new_weight_scales(self.recipe)
            self.loss_scale = LossScale(self.loss_scale.config) if self.loss_scale is not None else None
        self.backend, self.device, self.model = backend, device, model
        self.conversion = convert_layers(
            model,
            self.half,
            self.recipe,
            backend,
            # torch's half GEMMs on CPUs are up to 100 times slower than these, and round oftener.
            ReferenceBackend() if device.type == "cpu" else None,
            self.layers,
            self.histories,
            fp32_wgrad=self.level.has_half_weights and self.level.weight_grad == "fp32",
            weight_scales=self.weight_scales,
            observers=self.observers,
        )
        if self.level.has_half_weights:
            take_fp32_input(model, device.type == "cpu")
            if self.reads_as != torch.float32:  # else the loop decides on autocast
                self._handles += take_fp32_input_outside_autocast(model)
        if self.sharding is not None:
            pass  # weights are stored when they are sharded, which ``settle`` finds done
        elif self.level.is_low_bit:
            fp8 = self.conversion.weights if self.level.weight == "fp8" else []
            margin = self.recipe.fp8_margin if self.recipe is not None else 0
            self.stored = LowBitWeights(self.reads_as, fp8, margin, keep=not training)
            self.stored.install(model)
            release_one = weakly(self._step_at_once) if self.low_bit.gradient_release else None
            self.gradients = Fp8Gradients(release_one, observers=self.observers)
        elif self.level.has_half_weights:
            self.masters = MasterWeights(self.half, grad_fp32=self.level.weight_grad == "fp32", training=training)
            self.masters.measures = self.weight_scales is not None
            self.masters.install(model)
            if self.recipe is not None and self.recipe.fp8_params:
                self.masters.store_in_fp8(self.conversion.weights, self.recipe.fp8_margin)
        elif training:
            self.trained = TrainedWeights(model)
        self._has_te_layers = te_layers.has_te_layers(model)
        if self._has_te_layers:
            if self.recipe is not None:
                te_layers.te_recipe(self.recipe)  # refuses here what those layers cannot do
            te_layers.empty_extra_state(model)
        model.__dict__[_ENGINE] = self
        # For as long as the model is converted, and not around each forward: activation checkpointing runs the
        # forward again during backward, and must find the same kernels.
        self._attention_kernels.enter_context(prefer_attention(self.attention))
        watch_for_optimizers(self)

    def describe_layers(self) -> tuple[str, str | None] | None:
        """The table of layers and matrices, and what to warn of; None for a level that converts no layer to FP8."""
        if self.recipe is None or self.model is None or self.backend is None:
            return None
        how = f"{self.recipe.scaling}, {self.backend.name}"
        return describe_layers(self.model, self.conversion, self.level, how)

    def _backend_on(self, device: torch.device) -> Backend:
        self._check_device(device)
        check_attention(self.attention, device)
        return choose_backend(self.backend_name, self.recipe, device)

    def _check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{self.level.name} runs on NVIDIA GPUs and on CPUs, not on {device.type}.")
        if device.type == "cuda" and self.half == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            raise ValueError(
                f"{self.level.name} needs a GPU with BF16 (compute capability 8.0). Use an fp16 level here."
            )

    def _check_weights(self, model: nn.Module, training: bool) -> None:
        if self.level.is_low_bit:
            LowBitWeights(self.reads_as).check(model)
        if training and (self.level.has_half_weights or self.sharding is not None):
            check_memory(model)
        if self.loss_scale is None or self.level.has_half_weights:
            return
        for name, param in model.named_parameters():
            if param.dtype == torch.float16 and param.requires_grad:
                raise ValueError(
                    f"{self.level.name} trains FP32 weights, and {name} is FP16: its step would lose small updates. "
                    "Use fp16_mixed, which has FP32 masters, or model.float()."
                )

    def revert(self) -> None:
        """Give the model its own layers and FP32 parameters back, and adopted optimizers their class.

        Histories and loss scale stay for the next time.
        """
        if self.model is None or self.model.__dict__.pop(_ENGINE, None) is not self:
            return
        self._attention_kernels.close()
        if self.reducer is not None:
            self.reducer.remove()
            self.reducer = None
        self._share_flag = None
        if self.histories is not None:
            self.histories.reduce_amax = None
        if self.gradients is not None:
            self.gradients.remove()
            self.gradients = None
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for weights in (self.stored, self.masters):
            if weights is not None:
                replaced |= weights.remove()
        for optimizer in list(self._optimizers):
            _follow(optimizer, replaced)
            if self.stored is not None:
                release(optimizer)
                self._optimizers.discard(optimizer)
        if self.shards is not None:
            for optimizer in list(self._optimizers):
                release(optimizer)
            self.shards.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._released.clear()
        self.stored = self.masters = self.trained = self.shards = None
        revert_layers(self.model)
        if self.weight_scales is not None:
            self.weight_scales.leave()
            self.weight_scales.reduce_amax = None

    def settle(self) -> None:
        """Follow the model to its device, once it is there."""
        if self.histories is not None:
            self.histories.to(self.device)
        if self.weight_scales is not None:
            self.weight_scales.settle(self.device)
        if self.masters is not None:
            self.masters.settle()
        if self.stored is not None:
            self.stored.settle()
            self.cover_gradients()
        if self.sharding is not None:
            self._settle_shards(self.sharding)

    def _settle_shards(self, sharding: Sharding) -> None:
        """Store the shards, and reduce gradients onto them that FSDP2 does not."""
        assert self.model is not None
        level, recipe = self.level, self.recipe
        fp8_params = recipe is not None and recipe.fp8_params
        self.shards = ShardedWeights(
            level.is_low_bit,
            self.reads_as if level.is_low_bit else self.half,
            self.conversion.weights if level.weight == "fp8" or fp8_params else [],
            recipe.fp8_margin if recipe is not None else 0,
            DTYPES[level.weight_grad] if level.has_half_weights and not level.is_low_bit else None,
            partial(reduce_amax, group=sharding.world, observers=self.observers),
            self._meet_gathered,
        )
        self.shards.settle(self.model)
        for module in self.model.modules():
            for plan in gemm_plans(module).values():
                plan.keeps_weight = not sharding.frees_weights
        self.share_amaxes(sharding.world)
        if self.weight_scales is not None:
            gathered_as = torch.float16 if level.is_low_bit else self.half if level.has_half_weights else torch.float32
            self.weight_scales.settle(self.device, gathered_as)
            self.weight_scales.reduce_amax = partial(reduce_amax, group=sharding.world, observers=self.observers)
        if level.is_low_bit:
            self.gradients = Fp8Gradients(apart=True, observers=self.observers)

    def _meet_gathered(self, params: list[Tensor]) -> None:
        if self.gradients is not None and self.shards is not None:
            self.gradients.cover(p for p in params if self.shards.is_matrix(p))
        if self.when_gathered is not None:
            self.when_gathered(params)

    def unreduced_gradients(self) -> dict[int, Tensor]:
        """Gradients of whole parameters that wait to be reduced onto shards, by the ids of the sharded parameters."""
        if self.shards is None:
            return {}
        apart = (self.gradients.apart if self.gradients is not None else None) or {}
        matrices = {id(sharded): apart[id(whole)] for whole, sharded in self.shards.matrices() if id(whole) in apart}
        return {**self.shards.unreduced(), **matrices}

    def _fit_shard_reducer(self) -> None:
        """Reduce the gradients of the matrices that were gathered by now."""
        assert self.shards is not None and self.gradients is not None and self.sharding is not None
        self.shards.meet_all()
        pairs = self.shards.matrices()
        if self.reducer is not None and self._reduced == [id(whole) for whole, _ in pairs]:
            return
        if self.reducer is not None:
            self.reducer.remove()
        self._reduced = [id(whole) for whole, _ in pairs]
        shard_of = {id(whole): sharded for whole, sharded in pairs}
        sharding, kept = self.sharding, self.gradients.apart
        assert kept is not None
        self.reducer = GradientReducer(
            [whole for whole, _ in pairs],
            sharding.world,
            lambda _: torch.float8_e4m3fn,
            shards=lambda params: Fp8ShardBucket(
                params, sharding.shards, kept, [shard_of[id(p)] for p in params], sharding.replicas, self.observers
            ),
            observers=self.observers,
        )

    def cover_gradients(self) -> None:
        """Store the gradients of the matrices that take one by now (with gradient release: of all parameters)."""
        if self.gradients is None or self.stored is None or self.model is None:
            return
        self.gradients.cover(self.stored.matrices() if self.gradients.release is None else self.model.parameters())

    # The optimizer

    def attach(self, optimizer: Optimizer) -> None:
        """Give ``optimizer`` its masters, or its low-bit states.

        Raises:
            ValueError: it evaluates the loss itself, and the level scales the loss; or it has no low-bit form, and
                the level needs one.
        """
        if self.loss_scale is not None and needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss inside its step, which FP16 loss scaling cannot "
                f"unscale. Use a bf16 level instead of {self.level.name}, or another optimizer."
            )
        if optimizer in self._optimizers:
            return
        if self.level.is_low_bit:
            first, second = self.level.optimizer_states
            options = self.low_bit
            formats = StateFormats(
                first,  # type: ignore[arg-type]
                second,  # type: ignore[arg-type]
                stochastic_rounding=options.stochastic_rounding,
                seed=options.rounding_seed,
            )
            adopt(optimizer, formats, options.gradient_release)
            self._handles.append(optimizer.register_step_post_hook(self._forget_released))
        self._optimizers.add(optimizer)
        if self.masters is not None:
            self.masters.attach(optimizer)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` was attached."""
        return optimizer in self._optimizers

    def adopt_late(self, optimizer: Optimizer) -> None:
        """Attach an optimizer that is about to take its first step, and was made without this engine's knowledge.

        Raises:
            ValueError: see ``attach``.
        """
        self.attach(optimizer)
        if self.when_adopted is not None:
            self.when_adopted(optimizer)

    @property
    def is_at_work(self) -> bool:
        """Whether the model is converted by this engine now."""
        return self.model is not None and self.of(self.model) is self

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise what ``attach`` would, and change nothing."""
        if self.level.is_low_bit and optimizer not in self._optimizers:
            check_adoptable(optimizer)

    # Several processes

    def check_averaging(self) -> None:
        """Raise ValueError where gradients cannot be averaged over processes."""
        if self.low_bit.gradient_release:
            raise ValueError("gradient_release=True steps before gradients are averaged over processes. Leave it out.")

    def share_amaxes(self, group: dist.ProcessGroup | None) -> None:
        """Scale by the amaxes of all processes of ``group``, and skip a step on all where one is to be skipped on any.

        TE's own layers share only whether their amaxes are finite.
        """
        self._share_flag = partial(any_rank_, group=group, observers=self.observers)
        if self.histories is not None:
            self.histories.reduce_amax = partial(reduce_amax, group=group, observers=self.observers)

    def average_over(self, group: dist.ProcessGroup | None, bucket_bytes: int | None = None) -> GradientReducer:
        """Average gradients over the processes of ``group`` (see ``averaging``), and scale by all their amaxes.

        Args:
            bucket_bytes: size of a bucket on the wire; None for the default.

        Raises:
            ValueError: with ``gradient_release``, whose steps come too early.
        """
        self.check_averaging()
        assert self.model is not None
        if self.reducer is None or self.reducer.group is not group:
            if self.reducer is not None:
                self.reducer.remove()
            self.reducer = GradientReducer(
                self.model.parameters(), group, self.wire_dtype, bucket_bytes, observers=self.observers
            )
            self.share_amaxes(group)
        return self.reducer

    def broadcast(self, buffers: bool = False) -> bool:
        """Give every process of the group the weights of its first one; whether this one's were others.

        Args:
            buffers: whether it gives them its buffers, too.
        """
        assert self.reducer is not None and self.model is not None
        self.forget_weight_scales()
        tensors = [*self.model.parameters(), *(self.model.buffers() if buffers else ())]
        changed = broadcast_weights(tensors, self.reducer.group, self.observers)
        for weights in (self.masters, self.stored):
            if weights is not None:
                weights.note_frozen()  # nobody has written them by hand
        return changed

    def wire_dtype(self, param: Tensor) -> torch.dtype:
        """Dtype of a parameter's gradient on the wire."""
        if self.stored is not None:
            return torch.float8_e4m3fn if self.stored.is_matrix(param) else torch.float32
        if param.dtype == torch.float16 and self.level.comm == "fp16":
            return torch.float16
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    @contextmanager
    def averaging(self, wanted: bool = True) -> Iterator[None]:
        """A backward pass whose gradients are averaged, where ``average_over`` was called and it is ``wanted``."""
        if self.shards is not None and self.level.is_low_bit and wanted:
            self._fit_shard_reducer()
        if self.reducer is None or not wanted:
            yield
            return
        self.reducer.begin()
        try:
            yield
        except BaseException:
            self.reducer.abandon()
            raise
        self.reducer.finish()

    def _forget_released(self, optimizer: Optimizer, *_: Any) -> None:
        self._released -= {id(param) for param in _params(optimizer)}

    def _step_at_once(self, param: Tensor) -> None:
        """Gradient release: step one parameter and drop its gradient.

        Raises:
            RuntimeError: a second gradient before ``step``.
        """
        if id(param) in self._released:
            raise RuntimeError(
                "gradient_release=True has stepped this parameter already, and a second gradient came before the "
                "optimizer's step: leave it out with several backward passes a step, or with reentrant checkpointing "
                "of a layer that is used twice."
            )
        for optimizer in self._optimizers:
            if optimizer.step_param(param):  # type: ignore[attr-defined]
                self._released.add(id(param))
                param.grad = None

    # A step

    @contextmanager
    def forward_context(self):
        """Autocast to the level's half dtype, and FP8 for Transformer Engine layers of the user's own."""
        self.before_forward()
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=self.half))
            if self._has_te_layers:
                stack.enter_context(te_layers.te_context(self.recipe, self.half))
            yield

    def before_forward(self) -> None:
        """Follow what happened to the parameters since the last step: some may be frozen no more, or written."""
        if self.shards is not None:
            self.shards.check_unfrozen()
            if self.shards.were_written():
                self.weights_were_written()
        for weights in (self.masters, self.stored, self.trained):
            if weights is not None:
                weights.before_forward()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        if self.masters is not None:
            self.masters.before_backward()
        self.cover_gradients()
        self._found_inf.clear()
        self._unscaled.clear()
        if self.loss_scale is None:
            return loss
        before, scale = self.loss_scale.used, self.loss_scale.begin()
        self._expect_gradients(scale / before)
        return loss * scale

    def _expect_gradients(self, factor: float) -> None:
        """Gradients come ``factor`` times as large: delayed scales would saturate those that have doubled."""
        if factor == 1:
            return
        if self.histories is not None:
            self.histories.rescale("grad_output", factor)
        if self._has_te_layers and self.model is not None:
            te_layers.rescale_gradients(self.model, factor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients true gradients, once a backward pass."""
        if self.loss_scale is None or optimizer in self._unscaled or optimizer in self._found_inf:
            return
        params = _params(optimizer)
        found = unscale_(params, self.loss_scale.used, self.device)
        self._unscaled[optimizer] = found, _writes(params)  # callbacks may write gradients until the step

    def clip(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the optimizer's true gradients down to ``max_norm``. The norm tells, too, whether they are finite."""
        self.unscale(optimizer)
        norm = self._norms[optimizer] = clip_grad_norm_(_params(optimizer), max_norm)
        found, _ = self._unscaled.pop(optimizer, (None, None))
        if self.loss_scale is None or found is not None:
            infinite = (~norm.isfinite()).float().to(self.device)
            self._note(optimizer, infinite if found is None else torch.maximum(infinite, found))

    def norm_of(self, optimizer: Optimizer, needed: bool = True) -> Tensor | None:
        """The L2 norm of the optimizer's true gradients, as ``clip`` found it before this step.

        Args:
            needed: whether it is taken now where nobody has clipped; a collective where gradients are sharded.

        Returns:
            FP32 scalar; None where it is not known, or gradient release has dropped the gradients.
        """
        norm = self._norms.pop(optimizer, None)
        if norm is None and needed and not self.low_bit.gradient_release:
            self.unscale(optimizer)
            norm = clip_grad_norm_(_params(optimizer), 0.0)
        return norm

    def look(self, optimizer: Optimizer) -> None:
        """Find out whether the optimizer's gradients are finite, where ``clip`` has not."""
        self.unscale(optimizer)
        # With gradient release it is too late.
        if optimizer in self._found_inf or self.low_bit.gradient_release:
            return
        params = _params(optimizer)
        found, writes = self._unscaled.pop(optimizer, (None, None))
        if found is None:
            found = find_nonfinite(params, self.device)
        elif writes is None or writes != _writes(params):
            found = torch.maximum(found, find_nonfinite(params, self.device))
        self._note(optimizer, found)

    def _note(self, optimizer: Optimizer, found: Tensor) -> None:
        """Keep whether the optimizer's gradients are finite, for ``step``.

        Args:
            found: 1 where one is not finite on this process, else 0: an FP32 scalar.
        """
        # The loss scale announces backward passes. Their amaxes are looked at once: a step makes room for the next.
        looked = self.loss_scale is not None and len(self._found_inf) > 0
        self._found_inf[optimizer] = FoundInf(self.found_anywhere(found, looked))

    def found_anywhere(self, found: Tensor, looked: bool = False) -> Tensor:
        """Whether a gradient or an operand of an FP8 GEMM is not finite on any process that trains this model.

        FP8 casts saturate, so an infinity that met an FP8 GEMM on its way shows in that operand's amax only. One
        all-reduce carries the amaxes and all flags; a callback may have written gradients after they were averaged.

        Args:
            found: 1 where a gradient is not finite on this process, else 0: an FP32 scalar on the device.
            looked: whether the amaxes of this backward pass were looked at for another optimizer.

        Returns:
            1 or 0, the same on every process: an FP32 scalar on the device.
        """
        flags = found.float().reshape(1)
        if looked:
            if self._share_flag is not None:
                self._share_flag(flags)
            return flags[0] if self._saturated is None else torch.maximum(flags[0], self._saturated)
        others = []
        if self._has_te_layers and self.model is not None:
            here = te_layers.nonfinite_amaxes(self.model)
            others.append(flags.new_zeros(1) if here is None else here.to(flags).reshape(1))
        if self.weight_scales is not None:
            others.append(self.weight_scales.nonfinite().to(flags).reshape(1))
        flags = torch.cat([flags, *others])
        saturated = []
        if self.histories is not None:
            saturated.append(self.histories.nonfinite(flags).to(flags).reshape(1))
        elif self._share_flag is not None:
            self._share_flag(flags)
        saturated.append(flags[1:])
        known = torch.cat(saturated)
        self._saturated = known.max() if known.numel() else None
        return flags[0] if self._saturated is None else torch.maximum(flags[0], self._saturated)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step on the masters, refresh the copies and roll the amax histories.

        Skipped whole where a gradient is not finite on any process: ``skipped`` then has the optimizer.
        """
        self.look(optimizer)
        result = self._step(optimizer, self._found_inf.get(optimizer), **kwargs)
        if self.loss_scale is None:  # the next gradients may come from a backward pass that is not announced
            self._found_inf.pop(optimizer, None)
        return result

    def _step(self, optimizer: Optimizer, found: FoundInf | None, **kwargs: Any) -> Any:
        result = None
        differ = self.masters.samples_differ(optimizer) if self.masters is not None else None
        written = None if differ is None else FoundInf(differ.float())
        skips_by_itself = found is not None and self._skips_by_itself(optimizer)
        if found is None or skips_by_itself or not found:
            with ExitStack() as stack:
                # manual optimization steps inside training_step
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
                if found is not None and skips_by_itself:
                    stack.enter_context(found.handed_to(optimizer))
                result = optimizer.step(**kwargs)
        overflow = bool(found)
        if written:
            assert self.masters is not None
            self.masters.refuse_written()
        if self.loss_scale is not None and found is not None:
            self.loss_scale.learn(overflow)
        if overflow:
            self.skipped.add(optimizer)
            if self.histories is not None:
                self.histories.discard()
            if self._has_te_layers and self.model is not None:
                te_layers.forget_nonfinite_amaxes(self.model)
            return None
        self.skipped.discard(optimizer)
        if self.shards is not None:
            self.shards.renew_scales()
        self.end_step()
        return result

    def forget_weight_scales(self) -> None:
        """Measure each weight when its layer runs next, and keep the amax histories: they are of these weights."""
        if self.weight_scales is not None:
            self.weight_scales.forget()

    def weights_were_written(self) -> None:
        """Somebody else than a step has written sharded weights: scale by what there is now, on all processes."""
        if self.shards is not None:
            self.shards.renew_scales()
        if self.weight_scales is not None:
            self.weight_scales.restart()

    def end_step(self) -> None:
        """After a step: roll the amax histories, and scale the weights by what they are now."""
        if self.histories is not None:
            self.histories.update()
        if self.weight_scales is not None:
            with torch.autocast(self.device.type, enabled=False):  # manual optimization steps inside training_step
                self.weight_scales.renew()

    def _skips_by_itself(self, optimizer: Optimizer) -> bool:
        """Whether the kernels of ``optimizer`` read ``found_inf``: the host need not wait before the step."""
        # Of torch's own, fused SGD skips and leaves its momentum uninitialized; all expect a found_inf that is
        # sharded as the parameters are.
        own = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and self.shards is None
        return (own or isinstance(optimizer, LowBitStates)) and getattr(optimizer, "_step_supports_amp_scaling", False)

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The same for an optimizer that evaluates the loss itself: each evaluation sees the masters' latest values."""
        masters = self.masters

        def evaluate() -> Any:
            if masters is not None:
                masters.swap_out(optimizer)
                masters.refresh(_params(optimizer))
            self.forget_weight_scales()
            try:
                with self.forward_context():
                    return closure()
            finally:
                if masters is not None:
                    masters.swap_in(optimizer)

        return self._step(optimizer, None, closure=evaluate, **kwargs)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Scales, histories and the loss scale as plain values; weights belong to the model's own state_dict."""
        state: dict[str, Any] = {"level": self.level.name}
        if self.histories is not None:
            state["fp8"] = self.histories.state_dict()
        if self._has_te_layers and self.model is not None:
            state["te"] = te_layers.te_state_dict(self.model)
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, of this or of another level: what it does not hold starts afresh."""
        if self.histories is not None and "fp8" in state:
            self.histories.load_state_dict(state["fp8"])
            self.forget_weight_scales()
        if self._has_te_layers and self.model is not None and "te" in state:
            te_layers.load_te_state_dict(self.model, state["te"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])
        if {"fp8", "te"} & state.keys():
            saved = state.get("loss_scale", {})
            before = float(saved.get("used", saved.get("scale", 1.0)))
            self._expect_gradients((self.loss_scale.used if self.loss_scale is not None else 1.0) / before)
