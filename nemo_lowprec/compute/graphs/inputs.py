"""The arguments and results of a block, as tensors and a structure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import is_plain, tree_flatten

CONSTANTS = bool | int | float | str | None | torch.dtype | torch.device


class Unfit(Exception):
    """A block's pass cannot be captured; the message says why."""


def flatten(arguments: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dicts (and of transformers' outputs), and the structure around them."""
    return tree_flatten(arguments)


def key_of(leaves: list[Any], structure: Any) -> Hashable:
    """A key that is equal for calls which one graph can serve.

    Raises:
        Unfit: an argument is neither a tensor nor a plain constant.
    """
    return structure, tuple([_key_of(leaf) for leaf in leaves]), _autocast()


def _key_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        if not (is_plain(leaf) or type(leaf) is torch.nn.Parameter) or not leaf.is_cuda:
            raise Unfit(f"an argument is a {type(leaf).__name__} on {leaf.device.type}")
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.stride(), leaf.device
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    raise Unfit(f"an argument is {described(leaf)}")


def described(leaf: Any) -> str:
    """The class of an object that no graph takes, and what the user can do about it."""
    name = type(leaf).__name__
    return f"a {name}, which config.use_cache=False leaves out" if name.endswith("Cache") else f"a {name}"


def _autocast() -> Hashable:
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
