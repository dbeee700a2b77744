"""An audit's look at Megatron-core's engine: gradient buffers, and this process's shards of masters and states.

The GEMMs of a model that Megatron-core builds are Transformer Engine's own, which announce nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nemo_lowprec.compat.transformer_engine import fp8_data
from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.report.look import Held, Look
from nemo_lowprec.report.parts import Parts, converted_weights, parts_of, states_of
from nemo_lowprec.report.tensor_storage import Bytes, Stored, as_stored, format_of
from nemo_lowprec.report.traffic import Sent

if TYPE_CHECKING:
    from nemo_lowprec.megatron.engine import MegatronEngine

_GEMMS = ("transformer_engine.pytorch.module.linear", "transformer_engine.pytorch.module.layernorm_linear")
_TE_FORMATS = {"Float8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}  # by the beginning of a class's name


class MegatronLook(Look):
    """Looks at the parts of ``module`` that ``engine`` trains."""

    places = {
        "Comm": "gradients sent between data-parallel processes",
        "Master weight": "this process's parts, after the step",
        "Weight gradient": "their buffers, before the step",
        "Optimizer states": "this process's parts, after the step",
    }

    def __init__(self, engine: MegatronEngine, module: nn.Module) -> None:
        from megatron.core import parallel_state

        self._engine = engine
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        super().__init__(engine, engine.settings.options, module)

    def begin(self) -> None:
        for name in _GEMMS if self._engine.is_pipelined else ():
            module = importlib.import_module(name)
            replace_attribute(self.stack, module, "general_gemm", partial(self._noting, module.general_gemm))

    def _noting(self, gemm: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """Transformer Engine's ``gemm``, and a note of the formats of its operands."""
        self.operands.update(map(_operand_format, (a, b)))
        return gemm(a, b, *args, **kwargs)

    def parts(self) -> Parts:
        engine, level = self._engine, self.level
        params = [p for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad]
        if not engine.is_pipelined:
            return parts_of(level, params, converted_weights(self.model, level, self.conversion))
        modules = [m for chunk in engine.chunks for m in chunk.modules()]
        of_te = [m.weight for m in modules if hasattr(m, "fuse_wgrad_accumulation") and hasattr(m, "weight")]
        return parts_of(level, params, of_te)

    def before_step(self) -> None:
        self.take_gradients(lambda param: param.main_grad)  # type: ignore[attr-defined]

    def held(self, params: Sequence[nn.Parameter]) -> Held:
        optimizer: Any = self._engine.optimizer
        shards, states = optimizer.masters(params), optimizer.states(params)
        return Held(
            Bytes(map(_weight, params)),
            Bytes(m for m in shards if not optimizer.is_weight(m)),
            [Bytes(tensors) for tensors in states_of(states)],
            sum(m.numel() for m in shards),
        )

    def sent_gradients(self) -> list[Sent] | None:
        if self._group.size() == 1:
            return None
        kinds = ("reduce_scatter", "all_to_all", "all_reduce")
        return [s for s in self.traffic.sent if s.group == self._group.group_name and s.kind in kinds]


def _weight(param: nn.Parameter) -> Any:
    data: Tensor | None = fp8_data(param)
    return as_stored(param) if data is None else Stored("fp8", data.nbytes + 4)


def _operand_format(tensor: Any) -> str:
    kind = type(tensor).__name__
    formats = (name for prefix, name in _TE_FORMATS.items() if kind.startswith(prefix))
    return next(formats, None) or format_of(tensor.dtype)
