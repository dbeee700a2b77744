"""Exports a checkpoint's weights as safetensors in one dtype, as a folder that ``transformers`` loads.

Optimizer states, scales, random states and the position in the data are not exported.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.chart import CHART, PrecisionLevel
from nemo_lowprec.checkpoint.dcp_folder import write_checksums
from nemo_lowprec.checkpoint.writing import sync_file, writing
from nemo_lowprec.extras import needs_extras
from nemo_lowprec.lines import abbreviate, pair_lines
from nemo_lowprec.models.cast import Cast
from nemo_lowprec.models.causal_lm import CausalLM
from nemo_lowprec.models.saved_weights import SavedWeights, open_checkpoint
from nemo_lowprec.plugins.precision import LowPrecision

_PREFIX = "model."  # of the transformers model in a CausalLM
_OWN = {"preset", "model_type", "config", "vocab_size"}  # the hyperparameters of a CausalLM's architecture
_MAX_SHARD_SIZE = "50GB"  # of one file; transformers' default, and the limit of its hub


@dataclass(frozen=True)
class ExportResult:
    """The written folder, and the source of its weights.

    Attributes:
        path: the folder.
        architecture: class of transformers that loads the folder; None for weights of another LightningModule.
        level: precision level of the run; None where the checkpoint names no level.
        source: the column of the level that the weights come from: master weights, or weights without a master.
        stored: dtypes of the weights in the checkpoint.
        dtype: dtype of the weights in the folder.
        parameters: number of elements written, with buffers; tied elements count once.
        bytes: size of the safetensors files.
        max_relative_error: largest relative error of rounding to ``dtype``; 0.0 where nothing was rounded.
        underflows: nonzero elements that rounding made zero, not counted in the error.
        not_finite: elements that are infinite or NaN, in the checkpoint as in the folder.
        tokenizer: whether the folder has a tokenizer.
    """

    path: str
    architecture: str | None
    level: str | None
    source: str
    stored: tuple[str, ...]
    dtype: str
    parameters: int
    bytes: int
    max_relative_error: float
    underflows: int
    not_finite: int
    tokenizer: bool

    def print_table(self) -> None:
        """Prints the result for people."""
        error = f"{self.max_relative_error:.3g} of the value"
        rows = {
            "Level": self.level or "-",
            "Source": self.source,
            "In the checkpoint": ", ".join(self.stored),
            "Written as": self.dtype.upper(),
            "Loads with": f"transformers, {self.architecture}" if self.architecture else
            "safetensors, under the module's own names: it is no CausalLM, and transformers does not know it",
            "Parameters": f"{self.parameters:,}",
            "Bytes": f"{self.bytes:,}",
            "Largest rounding error": error if self.max_relative_error else "none",
            "Rounded to zero": f"{self.underflows:,} elements" if self.underflows else None,
            "Infinite or NaN": f"{self.not_finite:,} elements, as in the checkpoint" if self.not_finite else None,
            "Tokenizer": ("written" if self.tokenizer else "none: --tokenizer writes it, too")
            if self.architecture else None,
        }  # fmt: skip
        pairs = [("Folder", self.path), *((name, value) for name, value in rows.items() if value is not None)]
        print("\n".join(["Export", *pair_lines(pairs)]))


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, dtype: str = "bf16", tokenizer: str | Path | None = None
) -> ExportResult:
    """Writes the weights of a checkpoint as safetensors in ``dtype``, to be used outside of training.

    ``AutoModelForCausalLM.from_pretrained(out)`` loads the weights of a ``CausalLM``. The weights of any other
    LightningModule become a ``model.safetensors`` under the module's own names. The metadata of the files name the
    level, the source and the dtype; ``checksums.json`` has the CRC-32 of each file, because safetensors has none. The
    export runs in one process without a GPU and holds the weights in memory once, in ``dtype``. The folder appears when
    all files are written; a killed run leaves ``.NAME.*.part`` beside the folder, which may be deleted.

    Args:
        checkpoint: a Lightning file, or the folder that ``lowprec_sharded`` or ``MegatronStrategy`` writes.
        out: folder to write, which is new or empty.
        dtype: ``bf16``, ``fp16`` or ``fp32``, of all floating-point weights.
        tokenizer: a ``tokenizer.json``, or a folder with this file, of ``prepare-data`` or of a transformers model.

    Raises:
        ValueError: a bad value; a checkpoint that is incomplete or does not fit its own architecture; a weight beyond
            the largest value of ``dtype``; ``out`` exists and is not empty; a tokenizer that does not fit the model.
        NotWrittenError: a full disk, or a folder that may not be written to.
    """
    cast, target = Cast(dtype), Path(os.path.abspath(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{out} exists and is not empty: pass a new folder.")
    saved = open_checkpoint(Path(checkpoint))
    hparams = saved.rest.get("hyper_parameters")
    model = _model_of(hparams) if isinstance(hparams, Mapping) and hparams.keys() >= _OWN else None
    if model is None and tokenizer is not None:
        raise ValueError(f"{checkpoint} is of no CausalLM, and a tokenizer beside it has no use: leave it out.")
    plugin = saved.rest.get(LowPrecision.__qualname__)
    level = CHART.get(plugin.get("level", "")) if isinstance(plugin, dict) else None
    source = source_of(level)
    metadata = {"level": level.name if level else "unknown", "source": source, "dtype": dtype}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with writing(out, "; nothing is left of it."):
            part.mkdir(parents=True)
            if tokenizer is not None:
                _write_tokenizer(part, model, tokenizer)
            written = _write_bare(part, saved, cast) if model is None else _write_transformers(part, model, saved, cast)
            files = sorted(part.glob("*.safetensors"))
            for file in files:
                _add_metadata(file, {f"nemo_lowprec.{key}": value for key, value in metadata.items()})
            size = sum(file.stat().st_size for file in files)
            write_checksums(part, [file.name for file in files])
            _sync(part)
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ExportResult(
        path=str(out),
        architecture=type(model).__name__ if model is not None else None,
        level=level.name if level else None,
        source=source,
        stored=tuple(sorted(cast.found, key=cast.found.__getitem__, reverse=True)),
        dtype=dtype,
        parameters=written,
        bytes=size,
        max_relative_error=cast.max_relative_error,
        underflows=cast.underflows,
        not_finite=cast.not_finite,
        tokenizer=tokenizer is not None,
    )


# The checkpoint


def source_of(level: PrecisionLevel | None) -> str:
    """The column of the level that the saved weights come from (see ``weights/saved_form.py``)."""
    if level is None:
        return "weights of the checkpoint, which names no level: plain Lightning's, or saved with save_weights_only"
    vectors = f"; norms, biases and other vectors {level.vectors.upper()}" if level.vectors else ""
    if level.master_weight is None:
        return f"weights ({level.weight.upper()}), the only copy{vectors}"
    # At the MS-AMP levels only weights of converted layers have a master.
    rest = f"; other matrices are {level.rest.upper()}, the only copy" if level.is_low_bit else ""
    return f"master weights ({level.master_weight.upper()}){rest}{vectors}"


def _model_of(hparams: Mapping[str, Any]) -> Any:
    """The transformers model of a CausalLM, on the meta device: shapes and names without values."""
    arguments = {k: v for k, v in hparams.items() if k in inspect.signature(CausalLM).parameters}
    module = CausalLM(**{**arguments, "activation_checkpointing": False})
    with torch.device("meta"):
        module.configure_model()
    model: Any = module.model
    # The cache is off in training, and generation without the cache is slow.
    use_cache = dict(hparams["config"] or {}).get("use_cache", True)
    model.config.use_cache = model.generation_config.use_cache = use_cache
    return model


# Writing


def _write_transformers(part: Path, model: Any, saved: SavedWeights, cast: Cast) -> int:
    """Config, weights and index as transformers writes them; returns the number of elements."""
    from transformers.utils import logging

    # Names in the checkpoint, with a number that is equal for tied tensors.
    tied = {name: id(tensor) for name, tensor in model.state_dict(prefix=_PREFIX, keep_vars=True).items()}
    _check_names(model, saved, tied)
    first: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    # The second name of a tied tensor is only compared, so that its elements are not counted twice.
    again = Cast(cast.name)
    for name, tensor in saved.read(name for name in tied if name in saved.tensors):
        one = first.setdefault(tied[name], name)
        if one == name:
            kept[name] = cast(name, tensor)
        elif not _same_bits(again(name, tensor), kept[one]):
            raise ValueError(f"{saved.path} holds other values for {name} than for {one}, which are tied.")
    count = sum(tensor.numel() for tensor in kept.values())
    # transformers recognises tied weights by their shared storage.
    weights = {name.removeprefix(_PREFIX): kept[first[number]] for name, number in tied.items()}
    kept.clear()  # transformers frees a weight that is written
    model.to(cast.dtype)
    with ExitStack() as after:
        if logging.is_progress_bar_enabled() and not sys.stderr.isatty():  # a log would get control characters
            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        model.save_pretrained(part, state_dict=weights, max_shard_size=_MAX_SHARD_SIZE)
    return count


def _check_names(model: nn.Module, saved: SavedWeights, tied: dict[str, int]) -> None:
    unexpected = [name for name in saved.tensors if name not in tied]
    if unexpected:
        raise ValueError(
            f"{saved.path} holds {abbreviate(unexpected)}, which a {type(model).__name__} does not have: its "
            "hyperparameters say CausalLM, but it is another module."
        )
    there = {number for name, number in tied.items() if name in saved.tensors}
    missing = [name for name, number in tied.items() if number not in there]
    if missing:
        raise ValueError(f"{saved.path} lacks {abbreviate(missing)} of its {type(model).__name__}.")
    for name, tensor in model.state_dict(prefix=_PREFIX).items():
        found = saved.tensors.get(name)
        if found is not None and found.shape != tensor.shape:
            raise ValueError(
                f"{name} is {tuple(found.shape)} in {saved.path} and {tuple(tensor.shape)} in the "
                f"{type(model).__name__} of its hyperparameters."
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _write_bare(part: Path, saved: SavedWeights, cast: Cast) -> int:
    with needs_extras("export_checkpoint"):
        from safetensors.torch import save_file
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in saved.read(saved.tensors):
        value = cast(name, tensor)
        # safetensors has no shared storage: a tied weight is written under each of its names.
        weights[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def _write_tokenizer(part: Path, model: Any, path: str | Path) -> None:
    from nemo_lowprec.data.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(Path(path))
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"The tokenizer of {path} has {len(tokenizer)} ids, more than the model's {model.config.vocab_size}: it is "
            "not the one that the model was trained with."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(model.config, name, None) is None:
            value = getattr(tokenizer, name)
            setattr(model.config, name, value)
            setattr(model.generation_config, name, value)
    tokenizer.save_pretrained(part)


def _add_metadata(path: Path, entries: dict[str, str]) -> None:
    """Add entries to the metadata of a safetensors file, because ``save_pretrained`` takes no metadata."""
    new = path.with_name(f".{path.name}")
    with path.open("rb") as source, new.open("wb") as sink:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        header["__metadata__"] = {**header.get("__metadata__", {}), **entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # keeps the tensors after the header aligned
        sink.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, sink, 1 << 24)
    new.replace(path)


def _sync(folder: Path) -> None:
    """Flush all files to the disk before the folder is renamed."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
