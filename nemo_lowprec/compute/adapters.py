"""Adapters of Hugging Face's PEFT, and the layers that adapters wrap. PEFT is not imported here.

A tuner layer of PEFT holds the wrapped layer as ``base_layer``, and small matrices of rank 8 to 64 beside it. FP8
cannot pay for the small ones. The base layer is frozen: its weight may be stored in FP8.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from nemo_lowprec.compute.class_swap import is_swapped
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.quantized_tensor import MASTER

ADAPTER = "an adapter of PEFT"

_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_hooks: list[Any] = []


def plain_name(name: str) -> str:
    """The name that a layer has without PEFT's wrappers around it: ``lm_head`` for ``lm_head.base_layer``."""
    return _WRAPPED.sub("", name)


def peft_class(module: str, name: str) -> Any:
    """A class of PEFT; where PEFT is not loaded, no class, so that nothing is an instance of it."""
    return getattr(sys.modules.get(module), name, ())


def adapters_of(model: nn.Module) -> set[int]:
    """The ids of all modules in ``model`` that belong to adapters of PEFT."""
    tuner, wrapper = (
        peft_class("peft.tuners.tuners_utils", "BaseTunerLayer"),
        peft_class("peft.peft_model", "PeftModel"),
    )
    found: set[int] = set()
    base: set[int] = set()
    for module in model.modules():
        if isinstance(module, tuner):
            for name, child in module.named_children():
                (base if name == "base_layer" else found).update(map(id, child.modules()))
        elif isinstance(module, wrapper):
            found.update(id(m) for m in getattr(module, "prompt_encoder", nn.Module()).modules())
    return found - base


def base_layers_of(model: nn.Module) -> set[int]:
    """The ids of the modules that PEFT's tuner layers wrap, also where a tuner layer wraps another tuner layer."""
    tuner = peft_class("peft.tuners.tuners_utils", "BaseTunerLayer")
    return {id(module.base_layer) for module in model.modules() if isinstance(module, tuner)}


def unwrapped(module: Any) -> list[Any]:
    """``module``, and the layers that it stands for where it is a wrapper of PEFT."""
    inner = [getattr(module, "base_layer", None), getattr(module, "original_module", None)]
    copies = getattr(module, "modules_to_save", None)
    inner += copies.values() if isinstance(copies, nn.ModuleDict) else []
    return [module, *(layer for one in inner if isinstance(one, nn.Module) for layer in unwrapped(one))]


def refuse_late_adapters() -> None:
    """Raise a ValueError, in this process and from now on, where PEFT wraps a layer of a converted model.

    The names of the layer's parameters would change, by which a run finds its weights; and the weight would keep its
    master and its state, though it is frozen.
    """
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_refuse))


def _refuse(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if (
        name != "base_layer"
        or child is None
        or not isinstance(parent, peft_class("peft.tuners.tuners_utils", "BaseTunerLayer"))
    ):
        return
    own = child._parameters.values()
    if is_swapped(child) or any(isinstance(p, QuantizedTensor) or hasattr(p, MASTER) for p in own if p is not None):
        raise ValueError(
            f"PEFT would wrap {type(child).__name__} in {type(parent).__name__}, and the model is converted already: "
            "add adapters on names of a converted model before it is converted, that is before trainer.fit() or "
            "initialize()."
        )
