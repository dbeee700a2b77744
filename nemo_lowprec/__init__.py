"""Low-precision training for PyTorch Lightning and NeMo.

Every level of the precision chart is a function of this package that returns a Lightning precision plugin::

    from nemo_lowprec import bf16_with_fp8_mixed
    Trainer(plugins=bf16_with_fp8_mixed(fp8_margin=1))
"""

from typing import Any

from nemo_lowprec.chart import ALIASES, CHART, PrecisionLevel, get_level
from nemo_lowprec.lazy import lazily

__all__ = [
    "CHART",
    "Audit",
    "LowPrecision",
    "PrecisionLevel",
    "PrecisionMonitor",
    "__version__",
    "advise",
    "assert_level",
    "clip_grad_norm_",
    "get_level",
    "initialize",
    "monitor",
    "prepare",
    "shard_blocks",
    *CHART,
    *ALIASES,
]


_HOMES = {
    "Audit": "report.audit",
    "PrecisionMonitor": "report.monitor.callback",
    "advise": "report.advice.advise",
    "assert_level": "report.assertion",
    "clip_grad_norm_": "grads",
    "initialize": "msamp",
    "monitor": "report.monitor.plain",
    "prepare": "loops",
    "shard_blocks": "strategies.fabric",
}
_find, _ = lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in CHART or name in ALIASES or name == "LowPrecision":
        import nemo_lowprec.strategies  # noqa: F401  (registers their names with Lightning)
        from nemo_lowprec.plugins import ALIASED, LEVELS, LowPrecision

        return LowPrecision if name == "LowPrecision" else (LEVELS | ALIASED)[name]
    return _find(name)


def _version() -> str:
    """The version of the installed package, which setuptools-scm has read from the tags of git."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nemo-lowprec")
    except PackageNotFoundError:  # a folder of sources that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
