"""Messages of other libraries that tell a user of our commands nothing, and that would make a newcomer worry.

The commands of ``nemo-lowprec`` and ``pretrain`` leave them out while they run. Nothing else does: what a user's own
program shows is the program's choice. A message is left out by its text and its source, so that a new one is seen.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["LOGGED", "WARNED", "Noise", "quiet"]


class Noise(NamedTuple):
    """One message.

    Attributes:
        source: module that warns, as its file is named; or logger.
        text: regular expression for the beginning of the message.
        why: it is of no use.
    """

    source: str
    text: str
    why: str


WARNED = (
    Noise(
        "lightning.pytorch.utilities._pytree",
        re.escape("`isinstance(treespec, LeafSpec)` is deprecated"),
        "Lightning 2.6 calls torch 2.11 or later by an old name. Theirs to change; nothing differs.",
    ),
    Noise(
        "lightning.pytorch.trainer.connectors.logger_connector.result",
        r"It is recommended to use `self\.log\('(val|test)/(loss|perplexity)', \.\.\., sync_dist=True\)`",
        "CausalLM has summed both over all processes, exactly; sync_dist would average equal numbers.",
    ),
    Noise(
        "lightning.pytorch.callbacks.model_checkpoint",
        "The dirpath has changed from ",
        "A resumed run of ours writes to a folder of its own, and its best checkpoint is the best of that run.",
    ),
    Noise(
        "megatron.core",
        r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to ",
        "Megatron-core warns when it is imported, whatever it is imported for; training on it checks what it needs.",
    ),
)

LOGGED = (
    Noise("lightning.pytorch.utilities.rank_zero", "💡 Tip: ", "An advertisement of another product."),
    Noise("lightning.pytorch.utilities.rank_zero", "TPU available: False", "No level runs on one."),
    Noise(
        "lightning.pytorch.utilities.rank_zero",
        re.escape("`Trainer.fit` stopped: `max_steps="),
        "The end that was asked for. The steps are in the result.",
    ),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Leave the messages above out; warnings and logs are as before when the context ends."""
    logs = [(logging.getLogger(noise.source), _Filter(noise.text)) for noise in LOGGED]
    for logger, leave_out in logs:
        logger.addFilter(leave_out)
    try:
        with warnings.catch_warnings():
            for noise in WARNED:
                warnings.filterwarnings("ignore", noise.text, module=re.escape(noise.source))
            yield
    finally:
        for logger, leave_out in logs:
            logger.removeFilter(leave_out)


class _Filter(logging.Filter):
    """Drops the records whose message begins with a regular expression."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = re.compile(text)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._text.match(record.getMessage())
