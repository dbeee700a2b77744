"""Which layers and operands take the short way; ``tests/gpu/test_flat_linear.py`` has the passes."""

import torch
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand, is_whole
from nemo_lowprec.compute.flat_linear import is_flat
from nemo_lowprec.compute.operands import new_histories


def operand(row, col):
    scale_inv = torch.ones(1)
    parts = [None if data is None else Orientation(data, scale_inv, None) for data in (row, col)]
    return QuantizedOperand(*parts)


def matrix(rows=32, cols=48):
    return torch.zeros(rows, cols).to(torch.float8_e4m3fn)


def test_layers_of_other_backends_take_the_long_way():
    model, recipe = nn.Sequential(nn.Linear(32, 32)), Recipe("delayed")
    convert_layers(model, torch.bfloat16, recipe, ReferenceBackend(), None, LayerFilter(), new_histories(recipe))
    assert not is_flat(model[0].gemm_plan)


def test_operands_whose_addresses_say_where_the_matrix_is():
    assert is_whole(operand(matrix(), matrix()))
    assert not is_whole(None)
    assert not is_whole(operand(None, matrix())) and not is_whole(operand(matrix(), None))


def test_parts_of_an_operand_are_not_whole():
    """Rows of one orientation are columns of the other."""
    joint = operand(matrix(64, 48), matrix(48, 64))
    assert not any(is_whole(part) for part in joint.split([32, 32], 0))
    assert not any(is_whole(part) for part in operand(matrix(32, 96), matrix(96, 32)).split([48, 48], 1))


def test_an_operand_at_an_odd_address_is_not_whole():
    moved = torch.zeros(32 * 48 + 16, dtype=torch.uint8)[8 : 8 + 32 * 48].view(torch.float8_e4m3fn).view(32, 48)
    assert moved.is_contiguous()
    assert not is_whole(operand(moved, matrix()))
