"""Checks the fields of a transformers config before a model is built from the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le, Lt, MinLen

from nemo_lowprec.arguments import AtLeast0, check_value
from nemo_lowprec.extras import needs_extras
from nemo_lowprec.lines import one_line

_MAX_LAYERS = 10_000
_Number = Annotated[float, Ge(0), Le(1e12), "a finite number from 0 to 1e+12"]  # the largest is the base of RoPE
_Dropout = Annotated[float, Ge(0), Lt(1), "a number from 0 to below 1"]
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_DROPOUTS = ("dropout", "pdrop", "drop")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def check_architecture(model_type: str, fields: Mapping[str, Any], prefix: str = "config.") -> None:
    """Check names and values of a config's fields, and that heads and sizes fit together.

    Args:
        model_type: transformers' name of the architecture.
        fields: fields of the config class by name.
        prefix: prefix of the names in messages.

    Raises:
        ValueError: an unknown architecture or field, a value that a field does not take, or sizes that do not fit
            together.
    """
    with needs_extras("A model of the recipes"):
        from transformers import CONFIG_MAPPING, PreTrainedConfig

    try:
        kind = CONFIG_MAPPING[model_type]
    except KeyError:
        raise ValueError(f"transformers knows no model_type {model_type!r}.") from None
    known = _names(kind) - _names(PreTrainedConfig)
    for name, value in fields.items():
        if name not in known:
            raise ValueError(
                f"{prefix}{name}: a {kind.__name__} has no such field. It has: {', '.join(sorted(known))}."
            )
        _check_range(prefix + name, name, value)
    try:
        # Without special tokens: transformers warns where the architecture's own tokens lie outside the vocabulary.
        made = kind(**{**dict.fromkeys(_TOKEN_IDS), **fields})
    except Exception as error:  # transformers' checks raise exceptions of several libraries
        raise ValueError(f"{prefix.rstrip('.')} does not make a {kind.__name__}: {one_line(error)}") from error
    heads, groups = (getattr(made, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ValueError(
            f"{prefix}num_key_value_heads={groups} must divide the {heads} attention heads (num_attention_heads)."
        )
    _check_activation(made, prefix)


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)


def _check_range(label: str, name: str, value: Any) -> None:
    """Check a value that transformers accepts, and of which no model can be made."""
    if isinstance(value, bool) or value is None:
        return
    if name in _TOKEN_IDS:
        check_value(label, value, AtLeast0 | Annotated[list[AtLeast0], MinLen(1), "a list of them"])
        return
    if isinstance(value, int) and not name.endswith(("dropout", "pdrop", "_range")):
        check_value(label, value, Annotated[int, Ge(1), Le(_MAX_LAYERS if name in _LAYERS else 2**31 - 1)])
    if isinstance(value, float):
        check_value(label, value, _Number)
    if isinstance(value, int | float) and name.endswith(_DROPOUTS):
        check_value(label, value, _Dropout)


def _check_activation(made: Any, prefix: str) -> None:
    from transformers.activations import ACT2CLS

    for name in ("hidden_act", "activation_function", "hidden_activation"):
        value = getattr(made, name, None)
        if value is not None and value not in ACT2CLS:
            raise ValueError(f"{prefix}{name}={value!r} must be one of: {', '.join(sorted(ACT2CLS))}.")
    rope, size = getattr(made, "rope_parameters", None), getattr(made, "head_dim", None)
    if isinstance(rope, dict) and isinstance(size, int) and size % 2 and rope.get("partial_rotary_factor", 1) == 1:
        raise ValueError(f"{prefix}head_dim={size} must be even: RoPE rotates pairs.")
    if isinstance(rope, dict) and "rope_type" in rope:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kinds = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if rope["rope_type"] not in kinds:
            raise ValueError(
                f"{prefix}rope_parameters.rope_type={rope['rope_type']!r} must be one of: {', '.join(kinds)}."
            )
