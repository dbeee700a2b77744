"""The file ``monitor.jsonl`` of a run: one JSON object a line, appended and flushed as it comes.

A line that a kill has cut short is the last one of its attempt, and ``runs.py`` leaves it out. A run that resumes in
the same folder goes on in the same file; nothing is overwritten. The records, named by their key ``record``:

``run``         the first one of an attempt: ``format``, ``start`` (steps taken before it), ``time``, ``seed`` (null
                where unknown), ``level``, ``options`` (as text), ``arguments`` (the same by name), ``declared`` (the
                chart's row, column to format), ``model``, ``parameters``, ``engine``, ``processes``, ``device``,
                ``versions``, ``command``, ``every_n_steps``, ``layers``: names to reasons by fate, as in
                ``Conversion`` (``low``, ``left``, ``half``, ``kept``, ``fused``)
``operands``    ``rows``: [layer, operand] for each row of the samples that follow
``params``      ``names``: for each row of the samples' parameters
``audit``       ``findings``, and ``total_bytes`` and ``places`` by column, as ``Audit`` finds them in one step
``steps``       ``loss``, one for each of the steps ``at``; and of the stretch of ``steps`` steps up to ``last`` its
                ``seconds`` and ``tokens`` (null where nobody counts them); ``peak_bytes`` of the GPU so far
``sample``      ``step``, ``operands`` and ``params`` (metric to one number for each row; null where there is none),
                ``wire``, ``grad_norm``, ``loss_scale``, ``skipped_steps``
``validation``  ``step`` and ``metrics``
``warning``     ``step``, ``layer``, ``operand``, ``text``: an operand beyond its bounds, see ``alarm.py``
``end``         ``step``: the run has ended in order
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "monitor.jsonl"
FORMAT = 1


class RunWriter:
    """Appends records to the file of a run.

    Args:
        folder: of the run; made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        torn = self.path.exists() and self.path.stat().st_size > 0 and not _ends_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, record: str, **values: Any) -> None:
        """Append one record, and hand it to the operating system."""
        self._file.write(json.dumps({"record": record, **values}, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
