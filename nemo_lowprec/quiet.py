"""Hides messages of other libraries that tell a user of this package's commands nothing and worry a newcomer.

Only the commands of ``nemo-lowprec`` and ``pretrain`` hide messages, while they run; a user's own program shows all
messages. A message is hidden by its text and its source, so that a new message is seen. Warnings of this package are
shown without their line of code.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nemo_lowprec.lines import text_lines


class Noise(NamedTuple):
    """One hidden message.

    Attributes:
        source: the module that warns, or the logger.
        text: regular expression for the beginning of the message.
        why: the reason why the message does not help.
    """

    source: str
    text: str
    why: str


WARNED = (
    Noise(
        "lightning.pytorch.utilities._pytree",
        re.escape("`isinstance(treespec, LeafSpec)` is deprecated"),
        "Lightning 2.6 calls torch 2.11 or later by an old name, to the same effect.",
    ),
    Noise(
        "lightning.pytorch.trainer.connectors.logger_connector.result",
        r"It is recommended to use `self\.log\('(val|test)/(loss|perplexity)', \.\.\., sync_dist=True\)`",
        "CausalLM has summed both over all processes, exactly; sync_dist would average equal numbers.",
    ),
    Noise(
        "lightning.pytorch.callbacks.model_checkpoint",
        "The dirpath has changed from ",
        "A resumed run writes to a folder of its own, and its best checkpoint is the best of that run.",
    ),
    Noise(
        "lightning.pytorch.trainer.connectors.data_connector",
        "The '(val|test)_dataloader' does not have many workers",
        "Validation reads token ids from a file in memory; processes that read ahead would cost more than they save.",
    ),
    Noise(
        "megatron.core",
        r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to ",
        "Megatron-core warns at every import; MegatronStrategy checks the packages that training needs.",
    ),
)

_RANK_ZERO = "lightning.pytorch.utilities.rank_zero"
LOGGED = (
    Noise(_RANK_ZERO, "💡 Tip: ", "An advertisement of another product."),
    Noise(_RANK_ZERO, "TPU available: False", "No level runs on a TPU."),
    Noise(
        _RANK_ZERO,
        r"You are using a CUDA device \(.*\) that has Tensor Cores",
        "Advice for FP32 GEMMs. The GEMMs of a level run in FP8 or half precision, on Tensor Cores.",
    ),
    Noise(_RANK_ZERO, re.escape("`Trainer.fit` stopped: `max_steps="), "The end that the user asked for."),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the messages above and show this package's warnings as sentences, while the context lasts."""
    of_others = warnings.formatwarning

    def form(message: Warning | str, category: type[Warning], filename: str, *place: Any, **options: Any) -> str:
        if Path(filename).is_relative_to(Path(__file__).parent):
            return "\n".join(text_lines(f"Warning: {message}", hanging=2)) + "\n"
        return of_others(message, category, filename, *place, **options)

    def is_shown(record: logging.LogRecord) -> bool:
        return not any(re.match(noise.text, record.getMessage()) for noise in LOGGED)

    # With pytorch_lightning imported as well, both packages log under the name of the package imported last.
    loggers = [
        logging.getLogger(f"{package}.utilities.rank_zero") for package in ("lightning.pytorch", "pytorch_lightning")
    ]
    for logger in loggers:
        logger.addFilter(is_shown)
    try:
        with warnings.catch_warnings():
            for noise in WARNED:
                warnings.filterwarnings("ignore", noise.text, module=re.escape(noise.source))
            warnings.formatwarning = form
            yield
    finally:
        warnings.formatwarning = of_others
        for logger in loggers:
            logger.removeFilter(is_shown)
