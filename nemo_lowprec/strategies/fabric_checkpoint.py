"""``fabric.save`` and ``fabric.load`` at a level: histories and loss scale beside the user's state, FSDP2's shards.

A file holds the user's state as Fabric writes it, and one entry more. ModelParallelStrategy writes a folder, as the
strategy ``lowprec_sharded`` of the Trainer does, or the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.checkpoint.sharded_folder import begin_sharded, in_full, is_folder, read_folder, restore
from nemo_lowprec.checkpoint.torch_zip import load
from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.compat.lightning import check_keys, saves_a_folder, states_of
from nemo_lowprec.plugins.checkpoint_io import AtomicFileIO, writing_together

OWN = "nemo_lowprec"  # key of the plugin's state, in a checkpoint


def save_sharded(strategy: Any, path: Path, state: dict[str, Any], filter: dict[str, Any] | None) -> None:
    """Write ``state``, in which one module is sharded, to a folder or a file at ``path``; called on all processes.

    Raises:
        ValueError: no module or several; or ``filter`` for a folder.
        NotWrittenError: on all processes; an earlier checkpoint is unchanged.
    """
    model, optimizers, rest = _sorted(state)
    states = states_of(strategy, state, filter)
    own = strategy.precision.state_of(state)
    if saves_a_folder(strategy):
        if filter:
            raise ValueError("A folder holds whole states. Leave filter out, or use save_distributed_checkpoint=False.")
        folder = {
            "state_dict": states[model],
            "optimizer_states": [states[name] for name in optimizers],
            "rest": {name: states[name] for name in rest},
            OWN: own,
        }
        begin_sharded(folder, path)()
        return
    whole = in_full({**states, OWN: own})
    with writing_together(strategy):
        if strategy.is_global_zero:
            AtomicFileIO().save_checkpoint(whole, path)


def load_sharded(strategy: Any, path: Path, state: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Load a folder or a file into the objects of ``state``; called on all processes.

    Returns:
        the entries of the checkpoint that ``state`` does not have.

    Raises:
        KeyError: with ``strict``, ``state`` has a key that the checkpoint does not have.
        ValueError: the checkpoint is damaged, or neither a folder nor a file.
        RuntimeError: the model and the checkpoint differ.
    """
    model, optimizers, rest = _sorted(state)
    module, steppers = state[model], [state[name] for name in optimizers]
    if strategy.is_global_zero:
        recover(path)
    strategy.barrier()
    if is_folder(path):
        found = read_folder(path, module, steppers)
        saved, own = found.pop("rest"), found[OWN]
    else:
        saved = load(path)
        check_keys([model, *optimizers], saved.keys(), strict=strict)
        own = saved.pop(OWN, None)
        found = {"state_dict": saved.pop(model), "optimizer_states": [saved.pop(name) for name in optimizers]}
    check_keys(rest, saved.keys(), strict=strict)
    restore(found, module, steppers, strict)
    loaded(strategy, state, own)
    for name in [name for name in rest if name in saved]:
        value = saved.pop(name)
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value
    return saved


def loaded(strategy: Strategy, state: Any, own: dict[str, Any] | None) -> None:
    """Give the plugin its state from a checkpoint, for the objects of ``state`` that were loaded.

    Args:
        own: None for a checkpoint without the plugin's state, whose histories start afresh.
    """
    for engine in strategy.precision.engines:  # type: ignore[attr-defined]
        engine.columns.weights.were_written()
    if own is not None:
        strategy.precision.load_state_of(state, own)  # type: ignore[attr-defined]


def _sorted(state: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """The keys of the module, of the optimizers and of everything else in ``state``."""
    models = [name for name, value in state.items() if isinstance(value, nn.Module)]
    optimizers = [name for name, value in state.items() if isinstance(value, Optimizer)]
    if len(models) != 1:
        raise ValueError(
            f"A checkpoint of ModelParallelStrategy holds one model, and this state has {len(models)}. Save each model "
            "to a path of its own."
        )
    return models[0], optimizers, [name for name in state if name not in (models[0], *optimizers)]
