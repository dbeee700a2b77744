"""GPUs, driver, libraries and packages of this machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

# Distributions, with the sentence for each that is not installed. The first two are always there.
_PACKAGES = {
    "torch": "",
    "lightning": "",
    "transformers": "models and recipes: pip install 'nemo-lowprec[recipes]'",
    "transformer-engine": "the te backend, Megatron-core: pip install --no-build-isolation 'nemo-lowprec[te]'",
    "triton": "the fused kernels: pip install triton",
    "megatron-core": "strategy=lowprec_megatron: pip install 'nemo-lowprec[megatron]'",
    "nemo-run": "recipes: pip install 'nemo-lowprec[recipes]'",
    "peft": "adapters: pip install peft",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees.

    Attributes:
        name: as NVIDIA has it.
        capability: compute capability, such as ``9.0``; FP8 GEMMs need 8.9.
        bytes: of its memory.
    """

    name: str
    capability: str
    bytes: int


@dataclass(frozen=True)
class Machine:
    """Hardware and software of this machine.

    Attributes:
        gpus: that torch sees.
        driver: version of NVIDIA's driver; None without nvidia-smi or a GPU.
        cuda, cudnn, nccl: versions in torch; None where torch was built without, or finds no GPU.
        packages: version by distribution; None for one that is not installed.
        missing: what each package that is not installed is for, and how to install it.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda: str | None
    cudnn: str | None
    nccl: str | None
    packages: dict[str, str | None]
    missing: dict[str, str]


def look_at_machine() -> Machine:
    """Look at this machine; loads cuDNN, so that Transformer Engine has to be imported before."""
    has_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    packages = {name: _version(name) for name in _PACKAGES}
    return Machine(
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())) if has_gpu else (),
        driver=_driver(),
        cuda=torch.version.cuda,
        cudnn=_dotted(torch.backends.cudnn.version()) if has_gpu else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_gpu else None,
        packages=packages,
        missing={name: _PACKAGES[name] for name, found in packages.items() if found is None},
    )


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, f"{found.major}.{found.minor}", found.total_memory)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _dotted(number: int | None) -> str | None:
    """cuDNN's version, of one number such as 91002, as 9.10.2."""
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:  # a GPU that does not answer
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None
