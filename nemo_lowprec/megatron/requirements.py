"""What Megatron-core needs of a machine, said in a sentence before anything is built."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nemo_lowprec.chart import PrecisionLevel

_INSTALL = "pip install 'nemo-lowprec[te]'"
_NO_MEGATRON = "MegatronStrategy needs Megatron-core: pip install megatron-core ({})."


def check_megatron() -> None:
    """Raise RuntimeError where Megatron-core cannot train on this machine: no package, no GPU, no Transformer Engine.

    Transformer Engine is imported here, before anything else has touched the GPU: it fails once cuDNN is loaded.
    Megatron-core is imported last: it takes seconds, and warns of what it does without.
    """
    if not _is_installed("megatron.core"):
        raise RuntimeError(_NO_MEGATRON.format("there is no module megatron.core"))
    if not torch.cuda.is_available():
        raise RuntimeError(
            "MegatronStrategy needs an NVIDIA GPU with CUDA, and torch finds none here. Without one, use "
            "lowprec_sharded or lowprec_ddp, and CausalLM in the place of MegatronGPT."
        )
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"MegatronStrategy needs Transformer Engine for Megatron-core's layers: {_INSTALL} ({error})."
        ) from error
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise RuntimeError(_NO_MEGATRON.format(error)) from error


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def check_device(level: PrecisionLevel) -> None:
    """Raise ValueError where this GPU cannot run the GEMMs of ``level``."""
    major, minor = torch.cuda.get_device_capability()
    needed = {"delayed": 8.9, "current": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}
    nearest = {"mxfp8": "bf16_with_fp8_current_scaling_mixed", "nvfp4": "bf16_with_fp8_current_scaling_mixed"}
    if level.scaling is None or float(f"{major}.{minor}") >= needed[level.scaling]:
        return
    raise ValueError(
        f"{level.name} needs a GPU of compute capability {needed[level.scaling]}, and this one has {major}.{minor}. "
        f"Use {nearest.get(level.scaling, 'bf16_mixed')} here."
    )
