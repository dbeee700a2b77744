"""Muon with FP32 or low-bit momentum, over whole and sharded matrices, and with AdamW for all other parameters.

Sources: torch.optim.Muon (the update and the arguments); "Muon is Scalable for LLM Training", arXiv:2502.16982 (the
AdamW beside it, and a rate that fits both).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.newton_schulz import orthogonalize_, rate_factor
from nemo_lowprec.optim.reference import Rule, StepInputs, Update
from nemo_lowprec.optim.storage import MUON, StateFormat, StateFormats
from nemo_lowprec.optim.whole_matrices import WholeMatrices, exchange_group

_ELEMENTS = 2**27  # of the matrices that are between the two halves of a step at a time, 2 bytes each


def is_muon(group: dict[str, Any]) -> bool:
    """Whether a group's parameters are orthogonalized; AdamW steps the other groups' parameters."""
    return bool(group.get("use_muon", "momentum" in group))


class MuonStates(LowBitStates):
    """What ``Muon`` and the user's ``torch.optim.Muon`` have in common."""

    def rule(self, group: dict[str, Any]) -> Rule:
        return "momentum" if is_muon(group) else "adam"

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if is_muon(group) else ("exp_avg", "exp_avg_sq")

    def stored_as(self, name: str) -> str:
        return MUON if name == "momentum_buffer" else name

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_matrices(group)

    def _step_all(self, updates: list[Update], inputs: StepInputs) -> None:
        if inputs.rule != "momentum":
            return super()._step_all(updates, inputs)
        alike = defaultdict(list)
        for update in updates:
            alike[_whole(update).shape[-2:], exchange_group(update.whole)].append(update)
        for (shape, processes), members in alike.items():
            group = {**inputs.group, "rate_factor": rate_factor(inputs.group, shape)}
            second = replace(inputs, group=group, grad_scale=None, rule="direct")
            for some in _chunks(members):
                self._step_matrices(WholeMatrices(some, shape, processes), inputs, second)

    def _step_matrices(self, matrices: WholeMatrices, first: StepInputs, second: StepInputs) -> None:
        """One step of matrices of one shape: momentum, Newton–Schulz, update."""
        if matrices.halves:
            self._apply([half for half, _ in matrices.halves], first)
        orthogonalize_(matrices.gather(), first.group)
        matrices.scatter()
        if matrices.halves:
            self._apply([half for _, half in matrices.halves], second)


def _whole(update: Update) -> Tensor:
    return update.param if update.whole is None else update.whole


def _chunks(updates: list[Update]) -> Iterator[list[Update]]:
    """``updates`` in parts of at most ``_ELEMENTS``, or of a single parameter."""
    part: list[Update] = []
    size = 0
    for update in updates:
        count = _whole(update).numel()
        if part and size + count > _ELEMENTS:
            yield part
            part, size = [], 0
        part.append(update)
        size += count
    yield part


def check_matrices(group: dict[str, Any]) -> None:
    """Raise ValueError where a Muon group holds a parameter that is no matrix and no stack of matrices."""
    for param in group["params"] if is_muon(group) else ():
        if param.dim() not in (2, 3):
            raise ValueError(
                f"A Muon group holds a parameter of shape {tuple(param.shape)}, and Muon takes matrices [out, in] or "
                "stacks of matrices [experts, out, in]: put it into a group with use_muon=False, which AdamW steps, as "
                "nemo_lowprec.models.muon_groups(model) does."
            )


class TorchMuon(MuonStates, torch.optim.Muon):  # type: ignore[override, misc]
    """What a user's ``torch.optim.Muon`` becomes at a level with low-bit states."""


class Muon(MuonStates):
    """One optimizer of Muon for matrices and of AdamW for everything else.

    A group with ``use_muon=True`` (the default) takes matrices [out, in] and stacks of matrices [experts, out, in]; its
    step is torch's Muon. A group with ``use_muon=False`` takes any parameters; its step is torch's AdamW.
    ``nemo_lowprec.models.muon_groups(model)`` makes both of a model's parameters. At the MS-AMP levels momenta and
    moments take the formats of the row.

    Newton–Schulz runs in BF16, on matrices of one shape together. Of matrices that FSDP2 has sharded, each process
    orthogonalizes its part of the matrices as a whole: one all-to-all there and one back, of 2 bytes an element.

    Args:
        params: parameters or groups, as torch's optimizers take them.
        lr: learning rate of Muon's groups.
        weight_decay: of Muon's groups, decoupled.
        momentum: the momentum is an average with this decay.
        nesterov: orthogonalize the average of momentum and gradient in place of the momentum.
        ns_coefficients, ns_steps, eps: of Newton–Schulz, as in torch's Muon.
        adjust_lr_fn: ``original`` or None multiplies the rate by sqrt(max(1, out / in)); ``match_rms_adamw`` by
            0.2 * sqrt(max(out, in)), which makes AdamW's rates fit.
        adamw_lr: learning rate of AdamW's groups; None for ``lr``.
        adamw_betas, adamw_eps, adamw_weight_decay: of AdamW's groups.
        exp_avg_dtype: format of momenta and first moments: ``fp32``, ``bf16``, ``fp16`` or ``fp8``, as in ``Adam``
            here.
        exp_avg_sq_dtype: format of AdamW's second moments.
        master_weight_dtype, stochastic_rounding, seed: as in ``Adam`` here.

    Raises:
        ValueError: a number out of range, a format that does not exist, a parameter in a Muon group that is no matrix,
            or a complex parameter.
        RuntimeError: at ``step``, a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
        exp_avg_dtype: StateFormat = "fp32",
        exp_avg_sq_dtype: StateFormat = "fp32",
        master_weight_dtype: Literal["fp16", "fp32"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        formats = StateFormats(exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, stochastic_rounding, seed)
        at_least_0 = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adamw_lr": adamw_lr or 0.0,
            "adamw_weight_decay": adamw_weight_decay,
        }  # fmt: skip
        for name, value in at_least_0.items():
            if not value >= 0.0:
                raise ValueError(f"{name}={value!r} must be at least 0.")
        if not all(0.0 <= beta < 1.0 for beta in adamw_betas):
            raise ValueError(f"adamw_betas={adamw_betas!r} must be at least 0 and less than 1.")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} must be None, 'original' or 'match_rms_adamw'.")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={ns_coefficients!r} must be three numbers.")
        if not 0 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps!r} must be at least 0 and less than 100.")
        self._of_adamw = {
            "lr": lr if adamw_lr is None else adamw_lr, "betas": adamw_betas, "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
        }  # fmt: skip
        defaults = {
            "use_muon": True, "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._setup(formats)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not param_group.get("use_muon", True):
            param_group = {**self._of_adamw, **param_group}
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_of_adamw": self._of_adamw}
