"""Transformer Engine: its import, and its quantized tensors."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Arguments of a level, with their defaults, that DelayedScaling no longer has: the recipes of Transformer Engine 2.20
# ignore unknown arguments.
_IGNORED = {"interval": 1, "override_linear_precision": (False, False, False)}
# A library comes after those that it needs.
_CUDNN = ("graph", "ops", "engines_runtime_compiled", "engines_precompiled", "heuristic", "cnn", "adv")


def import_te(name: str = "transformer_engine.pytorch") -> Any:
    """The module ``name`` of Transformer Engine, imported beside torch's own cuDNN.

    Transformer Engine prefers the cuDNN of the system. Where torch has brought a newer one, torch would run with parts
    of both: its attention then finds no cuDNN kernel and takes a slower one, or the import fails. So torch's cuDNN is
    loaded first, unless CUDNN_HOME or CUDNN_PATH names another one.
    """
    home = _cudnn_of_torch()
    if "transformer_engine" in sys.modules or home is None or os.environ.keys() & {"CUDNN_HOME", "CUDNN_PATH"}:
        return importlib.import_module(name)
    for part in _CUDNN:
        for library in sorted((home / "lib").glob(f"libcudnn_{part}.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["CUDNN_HOME"] = str(home)
    try:
        return importlib.import_module(name)
    finally:
        del os.environ["CUDNN_HOME"]


def _cudnn_of_torch() -> Path | None:
    """Where the package lies that torch's wheels take cuDNN from; None without it."""
    try:
        spec = find_spec("nvidia.cudnn")
    except ImportError:
        return None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def ignored_arguments(options: Mapping[str, Any]) -> list[str]:
    """A sentence for each argument of a level that has an effect here and that Transformer Engine's recipes ignore."""
    return [
        f"{name}={options[name]!r} has an effect here. Transformer Engine 2.20 ignores this argument: leave it out to "
        "train as there."
        for name, default in _IGNORED.items()
        if options.get(name, default) != default
    ]


def quantizer_of(weight: Any) -> Any:
    """The quantizer that writes ``weight``."""
    return weight._get_quantizer()


def without_amax(quantizer: Any) -> Any:
    """A copy of ``quantizer`` that leaves the amaxes alone from which delayed scaling takes its next scale."""
    copy = quantizer.copy()
    amax = getattr(copy, "amax", None)  # none of a quantizer of blocks
    if amax is not None:
        copy.amax = torch.zeros_like(amax)
    return copy


def fp8_data(weight: Any) -> Tensor | None:
    """The FP8 bits of a weight with a scale per tensor, uint8; None for blockwise scales or a transpose alone."""
    data: Tensor | None = getattr(weight, "_data", None)
    return data


def fp8_dtype(weight: Any) -> Any:
    """Transformer Engine's name of the FP8 format of ``weight``."""
    return weight._fp8_dtype


def scale_inv(weight: Any) -> Tensor:
    """FP32 [1]: value = FP8 * scale_inv."""
    scale: Tensor = weight._scale_inv
    return scale
