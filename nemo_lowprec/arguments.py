"""Checks of arguments against their annotations and ranges, for Python, nemo_run and Hydra alike.

The annotations of a function give the types of its arguments; ``RANGES`` gives the values, by the name of an argument.
A number must be finite, and a boolean is no integer.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

if TYPE_CHECKING:  # imported with the first check: pydantic takes a third as long as all of a level's own files
    from pydantic import ConfigDict, TypeAdapter

P = ParamSpec("P")
R = TypeVar("R")

_RULES: ConfigDict = {"strict": True, "arbitrary_types_allowed": True, "allow_inf_nan": False}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {}  # by the representation of the annotation


def _not_blank(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


def _names_a_file(path: str) -> bool:
    return _not_blank(path) and all(len(part.encode("utf-8", "surrogateescape")) <= 255 for part in path.split("/"))


def _loggers(value: Any) -> bool:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return False
    return not isinstance(value, list | tuple) or all(map(_loggers, value))


Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # the range of NumPy's and Lightning's seeds
AtLeast0 = Annotated[int, Ge(0)]
AtLeast1 = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Text = Annotated[str, Predicate(_not_blank), "text that is not empty"]
AnyPath = Annotated[str, Predicate(_names_a_file), "a path"] | Path
_Beta = Annotated[float, Ge(0), Lt(1)]

RANGES: dict[str, Any] = {
    # data
    "data_dir": AnyPath,
    "source": AnyPath,
    "train_prefix": AnyPath,
    "validation_prefix": AnyPath,
    "text_field": Text,
    "vocab_size": Annotated[int, Ge(1), Le(2**24)],  # the largest tokenizers in use have 2**18 ids
    "seq_length": AtLeast1,
    "micro_batch_size": AtLeast1,
    "num_workers": Annotated[int, Ge(0), Le(256)],  # each worker is a process
    "seed": Seed,
    "validation_fraction": Annotated[float, Gt(0), Lt(1)],
    "validation_samples": AtLeast1,
    "max_bytes": AtLeast1,
    "tokenizer_bytes": AtLeast1,
    # model
    "weights": Text,
    "lr": Annotated[float, Gt(0), Le(1e4)],
    "min_lr": NotNegative,
    "weight_decay": Annotated[float, Ge(0), Le(1e4)],
    "betas": Annotated[tuple[_Beta, _Beta], "two numbers from 0 to below 1"],
    "eps": Annotated[float, Ge(0), Le(1)],  # a large eps makes every FP32 step zero
    "warmup_steps": AtLeast0,
    "schedule_steps": AtLeast1,
    "attn_implementation": Text,
    "init_seed": Seed,
    # strategies
    "bucket_cap_mb": Annotated[float, Gt(0), "a positive number"],
    "bucket_size": Annotated[int, Gt(0), "a positive number of parameters"],
    "shard_size": Annotated[int, Gt(0), "a positive number of processes"],
    "process_group_backend": Literal["gloo", "nccl", "ucc", "mpi", "cpu:gloo,cuda:nccl"],
    "tensor_model_parallel_size": AtLeast1,
    "pipeline_model_parallel_size": AtLeast1,
    "virtual_pipeline_model_parallel_size": AtLeast1,
    "context_parallel_size": AtLeast1,
    "expert_model_parallel_size": AtLeast1,
    # Trainer, checkpoints and loggers, where Lightning itself checks nothing
    "accumulate_grad_batches": AtLeast1,
    "gradient_clip_val": NotNegative,
    "devices": Annotated[int, Ge(-1), Le(1024)] | str | list[AtLeast0],
    "num_nodes": Annotated[int, Ge(1), Le(2**16)],
    "log_every_n_steps": AtLeast0,
    "every_n_steps": AtLeast1,
    "min_steps": AtLeast0,
    "min_epochs": AtLeast0,
    "max_time": str | timedelta | Annotated[dict[str, int], MinLen(1), "a mapping such as {hours: 2}"],
    "check_val_every_n_epoch": AtLeast1,
    "val_check_interval": AtLeast1
    | Annotated[float, Gt(0), Le(1)]
    | str
    | timedelta
    | Annotated[dict[str, int], MinLen(1), "a mapping such as {hours: 2}"],
    "logger": Annotated[Any, Predicate(_loggers), "a logger, a list of loggers, True or False"],
    "num_sanity_val_steps": Annotated[int, Ge(-1)],
    "default_root_dir": AnyPath,
    "dirpath": AnyPath,
    "filename": Text,
    "save_dir": AnyPath,
    "flush_logs_every_n_steps": AtLeast1,
}


def checked(function: Callable[P, R], also: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Decorate a function or a constructor, so that its arguments are checked before the call.

    Args:
        function: its annotated arguments are checked.
        also: the function that gets the ``**keywords`` of ``function``; the annotations of ``also`` check them.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own TypeError
        check_arguments(function, given)
        if also is not None:
            check_arguments(also, kwargs)
        return function(*args, **kwargs)

    return call


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], prefix: str = "") -> None:
    """Check the values of a function's annotated arguments.

    Args:
        function: a function or a class.
        given: values by the names of arguments; unknown names are ignored.
        prefix: prefix of the names in messages, such as ``"model."``.

    Raises:
        ValueError: an argument does not take its value; the message is one sentence about the first such argument.
    """
    kinds = _kinds_of(function)
    for name, value in given.items():
        if name in kinds:
            check_value(prefix + name, value, kinds[name])


def check_value(name: str, value: Any, kind: Any) -> None:
    """Check one value.

    Raises:
        ValueError: the value does not fit ``kind``, an annotation that may hold constraints of ``annotated_types``.
    """
    key = repr(kind)  # some annotations do not hash
    if key not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[key] = TypeAdapter(kind, config=_RULES)
    # Hydra and JSON have lists and no tuples.
    read = tuple(value) if isinstance(value, list) and _takes_tuple(kind) else value
    try:
        _ADAPTERS[key].validate_python(read)
    except ValueError:  # pydantic's ValidationError is one
        raise ValueError(f"{name}={_short(value)} must be {_words(kind)}.") from None


def _kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's arguments, narrowed by ``RANGES``."""
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except (NameError, TypeError):  # an annotation that is imported for type checking only
        return {}
    signature = inspect.signature(function)
    kinds = {}
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        gathers = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if gathers or isinstance(hint, str) or hint is parameter.empty:
            continue
        kind = RANGES.get(name, hint)
        kinds[name] = kind | None if type(None) in get_args(hint) else kind
    return kinds


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _takes_tuple(kind: Any) -> bool:
    plain = [get_args(m)[0] if get_origin(m) is Annotated else m for m in _members(kind)]
    return any((get_origin(m) or m) is tuple for m in plain)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_NAMES: dict[Any, str] = {
    type(None): "None",
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    timedelta: "a timedelta",
    Callable: "a function",
    **dict.fromkeys((dict, Mapping), "a mapping"),
    **dict.fromkeys((list, tuple, Sequence, Iterable), "a list"),
}


def _words(kind: Any) -> str:
    """``kind`` in words for a message, such as "an integer of at least 1"."""
    members = _members(kind)
    if len(members) > 1:
        words = dict.fromkeys(_words(m) for m in members)
        if "an integer" in words and "a finite number" in words:
            del words["an integer"]
        return " or ".join(words)
    origin = get_origin(kind)
    if origin is Literal:
        return "one of: " + ", ".join(str(choice) for choice in get_args(kind))
    if origin is Annotated:
        return _annotated(*get_args(kind))
    plain = origin or kind
    if plain in _NAMES:
        return _NAMES[plain]
    return f"a {plain.__name__}" if isinstance(plain, type) else "another value"


def _annotated(plain: Any, *limits: Any) -> str:
    for limit in limits:
        if isinstance(limit, str):
            return limit
    noun, finite = ("an integer", "") if plain is int else ("a number", ", finite")
    bounds = {type(limit).__name__: getattr(limit, type(limit).__name__.lower()) for limit in limits}
    if "Gt" in bounds and "Lt" in bounds:
        return f"{noun} that lies between {bounds['Gt']} and {bounds['Lt']}"
    if "Ge" in bounds and "Le" in bounds:
        high = bounds["Le"]
        return f"{noun} from {bounds['Ge']} to {'2**32 - 1' if high == 2**32 - 1 else high}"
    if "Gt" in bounds and "Le" in bounds:
        return f"{noun} greater than {bounds['Gt']} and at most {bounds['Le']:g}"
    if "Gt" in bounds:
        return f"{noun} greater than {bounds['Gt']}{finite}"
    return f"{noun} of at least {bounds['Ge']}{finite}"
