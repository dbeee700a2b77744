"""Any module under Megatron-core's data parallelism: this package converts its layers, all else is Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_lowprec.comm import reduce_amax
from nemo_lowprec.compute import (
    check_attention,
    choose_backend,
    convert_layers,
    new_histories,
    new_weight_scales,
    prefer_attention,
    revert_layers,
)
from nemo_lowprec.engine import DTYPES
from nemo_lowprec.megatron.chunks import cast_parameters
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.options import Options

__all__ = ["ConvertedModule"]


class ConvertedModule:
    """The converted layers of a module, and the amax histories of their operands.

    Args:
        module: on ``device``; its layers and the dtypes of its parameters are changed in place.
        options: of the level.
        settings: of the level.
        device: the GPU.
        observers: the layers' operands, and amaxes that are sent, are announced to them.

    Raises:
        ValueError: the backend, or the attention kernels, cannot run on ``device``.
    """

    def __init__(
        self, module: nn.Module, options: Options, settings: MegatronSettings, device: torch.device,
        observers: Observers = NOBODY,
    ) -> None:  # fmt: skip
        level, recipe = settings.level, options.recipe
        check_attention(options.attention, device)
        backend = choose_backend(options.backend, recipe, device)
        self._module = module
        self._half = DTYPES[level.autocast]
        self.backend = backend
        self._first = True
        revert_layers(module)  # those of an earlier stage of the same Trainer
        self.histories = new_histories(recipe)
        self.weight_scales = new_weight_scales(recipe)
        fp32_wgrad = level.has_half_weights and level.weight_grad == "fp32"
        self.conversion = convert_layers(
            module, self._half, recipe, backend, None, options.layers, self.histories, fp32_wgrad, self.weight_scales,
            observers,
        )  # fmt: skip
        cast_parameters(module, settings)
        if fp32_wgrad:
            for param in module.parameters():
                if param.is_leaf and param.requires_grad:
                    param.grad_dtype = torch.float32
        if self.histories is not None:
            self.histories.to(device)
            self.histories.reduce_amax = partial(reduce_amax, group=dist.group.WORLD, observers=observers)
        if self.weight_scales is not None:
            self.weight_scales.settle(device)
        self._stack = ExitStack()
        self._stack.enter_context(prefer_attention(options.attention))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass in the level's half format."""
        with torch.autocast("cuda", dtype=self._half):
            yield

    def expect_gradients(self, factor: float) -> None:
        """Gradients come ``factor`` times as large as before."""
        if self.histories is not None:
            self.histories.rescale("grad_output", factor)

    def is_first(self) -> bool:
        """Whether this is the first backward pass since the last step."""
        first, self._first = self._first, False
        return first

    def nonfinite(self) -> Tensor | None:
        """Whether an amax of this step is not finite, on any process; None without delayed scaling."""
        if self.histories is None or self.weight_scales is None:
            return None
        return self.histories.nonfinite() | self.weight_scales.nonfinite()

    def after_step(self, stepped: bool) -> None:
        """Roll the amax histories, or leave those of a skipped step out."""
        self._first = True
        if self.histories is not None:
            (self.histories.update if stepped else self.histories.discard)()
        if self.weight_scales is not None and stepped:
            self.weight_scales.forget()  # the weights of other processes' parts may still be on their way

    def remove(self) -> None:
        """Give the module its own layers back."""
        self._stack.close()
        revert_layers(self._module)
