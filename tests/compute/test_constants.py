"""Integers made of constants are read without the GPU; what an input or a random number has entered is not known."""

import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaModel

from nemo_lowprec.compute.graphs import constants
from nemo_lowprec.compute.graphs.constants import KnownIntegers


def read(tensor, how=bool):
    """(value, whether it was known)"""
    known = constants._known(tensor)
    return how(tensor), known is not None


def test_what_is_made_of_constants_is_known():
    with KnownIntegers():
        places = (torch.arange(6, device="cpu") + 3).unsqueeze(0).expand(2, -1)
        assert read(places[:, 1:].sum(), int) == (2 * (4 + 5 + 6 + 7 + 8), True)
        assert read((places[:, -1] == 8).all()) == (True, True)
        assert read(torch.diff(places, prepend=places[:, :1] - 1, dim=-1).ne(1).cumsum(-1).any()) == (False, True)
        assert read(torch.full((2,), 5).max(), int)[0] == 5
        assert places.tolist() == [[3, 4, 5, 6, 7, 8]] * 2


def test_what_something_else_has_entered_is_not():
    given, weights = torch.ones(3, dtype=torch.int64), torch.randn(3)
    with KnownIntegers():
        ours = torch.arange(3)
        for other in (ours + given, torch.randint(5, (3,)) + ours, (weights > 0) & (ours > 0), torch.randperm(3)):
            assert not read(other.sum(), int)[1]
        assert read(ours.sum(), int) == (3, True)
        ours[0] = given[0]
        assert read(ours.sum(), int) == (4, False)
        written = torch.zeros(3, dtype=torch.int64)
        written.add_(given)
        assert read(written.sum(), int) == (3, False)
        assert not read(torch.arange(3.0).sum(), float)[1]  # a GPU may round otherwise
    assert read(torch.arange(3).sum(), int) == (3, False)


def test_transformers_asks_whether_sequences_are_packed():
    model = LlamaModel(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip
    tokens, asked = torch.arange(16).view(2, 8), []
    with KnownIntegers(), Asked(asked):
        model(input_ids=tokens)
    assert asked and all(asked)


class Asked(TorchFunctionMode):
    """Notes of each value that the host reads whether it is known."""

    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in constants._READS:
            self.asked.append(constants._known(args[0]) is not None)
        return func(*args, **(kwargs or {}))
