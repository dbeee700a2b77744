"""Settings of all tests."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # for ``support``
torch.set_num_threads(1)  # two threads spend most of their time waiting for each other at these sizes
if not torch.cuda.is_available():
    # torch keeps each seed, with the stack of its caller, for a GPU that may come: milliseconds and memory each time.
    torch.manual_seed = torch.default_generator.manual_seed
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_collected() -> None:
    """A garbage collection looks at the objects of this file alone, and not at all that was imported before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A file leaves no process group, in which the tests of the next file would train."""
    yield
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    """A test leaves no rank in the environment: Lightning's launcher does, and Accelerate would wait for the others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of 60 short files, small enough that a run of a few steps takes a second."""
    from nemo_lowprec.data import prepare_data

    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        words = " ".join(f"word{(i * 7 + j * j) % 31}" for j in range(150))
        (folder / f"{i:02}.txt").write_text(f"Chapter {i}. {words}\n")
    out = folder.parent / f"{folder.name}_prepared"
    prepare_data(out, source=folder, vocab_size=400, validation_fraction=0.2)
    return out


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Undoes what Hydra does to the logging of the whole process, for tests that call a command in theirs."""
    loggers = [logging.getLogger(name) for name in (None, "lightning.pytorch", "megatron")]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    # Hydra's dictConfig closes every handler there is, and absl's (fiddle brings it) closes its stream with it unless
    # that is the real stderr: under pytest it would be the file that pytest captures to.
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        absl.get_absl_handler().python_handler.stream = sys.__stderr__
    yield
    for logger, (level, logger.propagate, logger.handlers[:]) in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def single_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read one tensor compute by themselves, as in compiled code."""
    from nemo_lowprec.compute.group import LayerGroups

    monkeypatch.setattr(LayerGroups, "_can", lambda *_: False)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile knows no graph of another test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
