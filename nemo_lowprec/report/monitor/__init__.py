"""What low precision does to a model while the model trains: statistics of layers, parameters and messages."""

from nemo_lowprec.lazy import lazily

_HOMES = {
    "PlainMonitor": "plain",
    "PrecisionMonitor": "callback",
    "Run": "runs",
    "Table": "run_table",
    "monitor": "plain",
    "read_run": "runs",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
