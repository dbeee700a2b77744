"""What low precision does to a model while the model trains: statistics of layers, parameters and messages."""

from nemo_lowprec.report.monitor.callback import PrecisionMonitor, check_level
from nemo_lowprec.report.monitor.plain import PlainMonitor, monitor
from nemo_lowprec.report.monitor.runs import Run, Table, read_run

__all__ = ["PlainMonitor", "PrecisionMonitor", "Run", "Table", "check_level", "monitor", "read_run"]
