"""Checkpoints in Megatron-core's distributed form: a folder that opens at other parallel sizes and at other levels.

Weights and optimizer states are saved under Megatron's own keys; each process writes its shards. Masters and moments
are saved as FP32 values, so that any level reads them. ``meta.pt`` holds the states of loops, data and callbacks, and
the amax histories of delayed scaling: Transformer Engine saves histories as a pickle, and refuses to open this pickle
since 2.18.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from nemo_lowprec.checkpoint.dcp_folder import check_folder
from nemo_lowprec.checkpoint.sharded_folder import META, begin_folder, is_folder, on_first, probe
from nemo_lowprec.checkpoint.torch_zip import load as load_file
from nemo_lowprec.comm import by_rank, raise_together
from nemo_lowprec.compat.megatron import written_by_this_process
from nemo_lowprec.compute import te_layers
from nemo_lowprec.formats import FP16
from nemo_lowprec.megatron.chunks import unwrapped

if TYPE_CHECKING:
    from nemo_lowprec.megatron.engine import MegatronEngine

_HISTORIES, _UNIT, _RNG = "fp8_histories", "fp8_gradient_unit", "megatron_rng"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


def save(checkpoint: dict[str, Any], path: Path, engine: MegatronEngine, form: str) -> None:
    """Write a checkpoint that Lightning has dumped; a collective. The folder is in place when the function returns.

    The weights and optimizer states are those of ``engine``; ``checkpoint`` gives the rest. ``form`` is
    ``fully_reshardable`` or ``dp_reshardable``.
    """
    sharded = _sharded(engine, form, with_optimizer="optimizer_states" in checkpoint)
    force_all_tensors_to_non_fp8(sharded)
    rest = {k: v for k, v in checkpoint.items() if k != "state_dict"}
    if "optimizer_states" in rest:
        rest["optimizer_states"] = []  # Lightning checks that the key is there
    rest[_HISTORIES], rest[_UNIT] = _histories(engine), engine.guard.unit
    rest[_RNG] = by_rank(tensor_parallel.get_cuda_rng_tracker().get_states())  # for dropout

    def write(part: Path, group: dist.ProcessGroup | None) -> None:
        # The first process writes some files alone; on a full disk the other processes would wait for it.
        on_first(lambda: probe(part))
        with written_by_this_process():
            dist_checkpointing.save(sharded, str(part))
        dist.barrier()

    begin_folder(path, rest, write)()


def load(path: Path, engine: MegatronEngine, form: str) -> dict[str, Any]:
    """Load a checkpoint's weights and optimizer states into ``engine``. Returns the rest, for Lightning to restore.

    Raises:
        ValueError: ``path`` is no complete checkpoint of MegatronStrategy, is damaged, or holds another model, values
            beyond FP16 for FP16 weights, or objects that may run code.
    """
    if not is_folder(path):
        raise ValueError(f"{path} is not a complete checkpoint of MegatronStrategy.")
    check_folder(path)  # Megatron-core opens pickles, and compares no checksums
    rest: dict[str, Any] = load_file(path / META)
    optimizer = engine.optimizer
    wants_optimizer = optimizer is not None and "optimizer_states" in rest
    loaded = dist_checkpointing.load(_sharded(engine, form, wants_optimizer, is_loading=True), str(path))
    for name, part in _parts(engine):
        missing = [k for k in part.load_state_dict(loaded[name], strict=False).missing_keys if not _is_extra(k)]
        if missing:
            raise ValueError(f"{path} has no values for {', '.join(missing[:3])}.")
    _load_histories(engine, rest.pop(_HISTORIES, {}))
    engine.guard.unit = rest.pop(_UNIT, None)
    if len(states := rest.pop(_RNG, [])) == dist.get_world_size() and states[dist.get_rank()]:
        tensor_parallel.get_cuda_rng_tracker().set_states(states[dist.get_rank()])
    if optimizer is not None:
        if wants_optimizer:
            optimizer.load(loaded["optimizer"])
        else:
            optimizer.reload_masters()
        optimizer.refresh()
    _check_range(path, engine)
    return {**rest, "state_dict": {}}


@torch.no_grad()
def _check_range(path: Path, engine: MegatronEngine) -> None:
    """Raise ValueError on all processes where a loaded value is infinite in an FP16 weight of one process."""
    named = [pair for _, part in _parts(engine) for pair in part.named_parameters()]
    beyond = (name for name, param in named if param.dtype == torch.float16 and bool(torch.isinf(param).any()))
    errors = (
        ValueError(
            f"{path}: {name} has values beyond {FP16.max:.0f}, the largest of FP16, in which this level keeps its "
            "weights. Use a bf16 level."
        )
        for name in beyond
    )
    raise_together(next(errors, None))


def _parts(engine: MegatronEngine) -> list[tuple[str, nn.Module]]:
    """(key in the sharded state, module) of each part of the model on this process."""
    chunks = [unwrapped(chunk) for chunk in engine.chunks]
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _is_extra(key: str) -> bool:
    return key.endswith("_extra_state")


def _sharded(engine: MegatronEngine, form: str, with_optimizer: bool, is_loading: bool = False) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": form,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    state: dict[str, Any] = {}
    for name, part in _parts(engine):
        if engine.is_pipelined:
            found = part.sharded_state_dict(metadata=dict(metadata))  # type: ignore[operator]
        else:
            found = make_sharded_tensors_for_checkpoint(part.state_dict(keep_vars=True), "")
        state[name] = {key: value for key, value in found.items() if not _is_extra(key)}
    if with_optimizer:
        assert engine.optimizer is not None
        state["optimizer"] = engine.optimizer.sharded_state(dict(state), is_loading, metadata)
    return state


# Amax histories: one table for converted layers; for Transformer Engine's layers, by name in the whole model.


_OWN = {"fp8": "own", "speed": "speed"}  # of the column's state, in the saved one


def _histories(engine: MegatronEngine) -> dict[str, Any]:
    if not engine.is_pipelined:
        own = engine.columns.computation.state_dict()
        return {key: own[name] for name, key in _OWN.items() if name in own}
    mine: dict[str, Any] = {}
    for _, part in _parts(engine):
        for name, state in te_layers.te_state_dict(part).items():
            mine[_in_whole(name, part)] = state
    stages = by_rank(mine, parallel_state.get_pipeline_model_parallel_group())
    return {"te": {name: state for stage in stages for name, state in stage.items()}}


def _load_histories(engine: MegatronEngine, saved: dict[str, Any]) -> None:
    if not engine.is_pipelined:
        engine.columns.computation.load_state_dict({name: saved[key] for name, key in _OWN.items() if key in saved})
        return
    for _, part in _parts(engine):
        names = {_in_whole(name, part): name for name, _ in part.named_modules()}
        here = {names[whole]: state for whole, state in saved.get("te", {}).items() if whole in names}
        te_layers.load_te_state_dict(part, here)


def _in_whole(name: str, part: nn.Module) -> str:
    """A module's name with its layer's number in the whole model: a stage counts its own layers from 0."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    before, index, after = found.groups()
    number = getattr(part.get_submodule(f"{before}{index}"), "layer_number", None)
    return name if number is None else f"{before}{number - 1}{after}"
