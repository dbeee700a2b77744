"""The record of a conversion: how each linear layer and norm of a model is computed, and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Conversion:
    """How each linear layer and norm of a model is computed.

    The input projections of ``nn.MultiheadAttention`` are no layers, and are listed by the names of their weights
    (``attn.in_proj_weight``).

    Attributes:
        low: names of layers whose GEMMs run below 16 bits.
        weights: names of their weights, as in ``named_parameters()``.
        patches: names of layers in ``low`` that are patch embeddings, convolutions whose kernels do not overlap.
        left: name to reason, for every layer in ``low`` whose GEMMs ``convert="auto"`` runs in half precision, or that
            the first step has not called.
        doubtful: name to class, for every layer in ``low`` of whose weight that class may read the values itself.
        half: names of linear layers whose GEMMs run in half precision on a backend or with FP32 weight gradients.
        norms: names of converted norms.
        kept: name to reason, for every linear layer and norm that was left alone.
        asked: names in ``kept`` of layers that the arguments for choosing layers leave out.
        fused: name to pattern, for every parent of converted layers that a pattern computes (``compute.patterns``).
        unfused: name to reason, for every other parent that a pattern has looked at.
        routers: names of the modules that choose the experts of a token, which compute in FP32.
        keeping: name to kind, for every module of which backward needs the inputs alone (``activations``).
    """

    low: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    half: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    fused: dict[str, str] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    keeping: dict[str, str] = field(default_factory=dict)
