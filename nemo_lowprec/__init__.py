"""Low-precision training for PyTorch Lightning and NeMo.

Every level of the precision chart is a function of this package that returns a Lightning precision plugin::

    from nemo_lowprec import bf16_with_fp8_mixed
    Trainer(plugins=bf16_with_fp8_mixed(fp8_margin=1))
"""

from typing import Any

from nemo_lowprec.chart import CHART, PrecisionLevel, get_level

__version__ = "0.1.0"

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
    *CHART,
]


def __getattr__(name: str) -> Any:
    # Lightning takes seconds to import; the chart alone should not.
    if name in CHART or name == "LowPrecision":
        import nemo_lowprec.strategies  # noqa: F401  (registers their names with Lightning)
        from nemo_lowprec.plugins import LEVELS, LowPrecision

        return LEVELS[name] if name in CHART else LowPrecision
    if name == "initialize":
        from nemo_lowprec.msamp import initialize

        return initialize
    if name == "prepare":
        from nemo_lowprec.loops import prepare

        return prepare
    if name in ("PrecisionMonitor", "monitor"):
        from nemo_lowprec.report import monitor as room

        return getattr(room, name)
    if name == "clip_grad_norm_":
        from nemo_lowprec.grads import clip_grad_norm_

        return clip_grad_norm_
    if name in ("Audit", "advise", "assert_level"):
        from nemo_lowprec import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
