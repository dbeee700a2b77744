"""The precision chart: its rows, and beside them the arguments that a row takes.

``rows.py`` imports nothing of this package. The other files import the rows, ``arguments.py`` and ``lines.py`` only. So
a command line is checked before torch is imported, and every column can read its arguments from the chart.
"""

from nemo_lowprec.chart.rows import ALIASES, CHART, COLUMNS, NOT_SERVED, Alias, PrecisionLevel, get_level, preset_of

__all__ = ["ALIASES", "CHART", "COLUMNS", "NOT_SERVED", "Alias", "PrecisionLevel", "get_level", "preset_of"]
