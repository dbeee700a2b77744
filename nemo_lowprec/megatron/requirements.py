"""Checks that this machine has the packages and the GPU that Megatron-core needs, before anything is built."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compat.transformer_engine import import_te

_NO_MEGATRON = "MegatronStrategy needs Megatron-core: pip install 'nemo-lowprec[megatron]' ({})."


def check_megatron() -> None:
    """Raise RuntimeError where the machine has no Megatron-core, no GPU or no Transformer Engine.

    The import of Transformer Engine comes before anything else touches the GPU: it fails once cuDNN is loaded. The
    import of Megatron-core comes last: it takes seconds, and prints warnings about optional packages.
    """
    try:
        installed = find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # no package ``megatron``
        installed = False
    if not installed:
        raise RuntimeError(_NO_MEGATRON.format("there is no module megatron.core"))
    if not torch.cuda.is_available():
        raise RuntimeError(
            "MegatronStrategy needs an NVIDIA GPU with CUDA, and torch finds none here. Without one, use "
            "lowprec_sharded or lowprec_ddp, and CausalLM in the place of MegatronGPT."
        )
    check_transformer_engine(
        "MegatronStrategy needs Transformer Engine for Megatron-core's layers: "
        "pip install --no-build-isolation 'nemo-lowprec[te]'"
    )
    try:
        import megatron.core  # noqa: F401
        import psutil  # noqa: F401  (Megatron-core's checkpoints wait for ever without)
    except ImportError as error:
        raise RuntimeError(_NO_MEGATRON.format(error)) from error


def check_transformer_engine(sentence: str) -> None:
    """Raise RuntimeError with ``sentence`` and the cause where Transformer Engine cannot be imported."""
    try:
        import_te()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(f"{sentence} ({error}).") from error


def check_device(level: PrecisionLevel) -> None:
    """Raise ValueError where this GPU cannot run the GEMMs of ``level``."""
    major, minor = torch.cuda.get_device_capability()
    if level.scaling == "mxfp8" and major >= 12:
        raise ValueError(
            f"{level.name} needs a GPU for which Transformer Engine has MXFP8: of compute capability 10.0 to 11, and "
            f"this one has {major}.{minor}. Use bf16_with_fp8_current_scaling_mixed here."
        )
    needed = {"delayed": 8.9, "current": 8.9, "rowwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}
    nearest = dict.fromkeys(("mxfp8", "nvfp4"), "bf16_with_fp8_current_scaling_mixed")
    if level.scaling is None or float(f"{major}.{minor}") >= needed[level.scaling]:
        return
    raise ValueError(
        f"{level.name} needs a GPU of compute capability {needed[level.scaling]}, and this one has {major}.{minor}. "
        f"Use {nearest.get(level.scaling, 'bf16_mixed')} here."
    )
