"""Marks on tensors: by identity, gone with the tensor, and no obstacle to ``torch.utils.swap_tensors``."""

import copy

import torch
from torch import nn

from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.weights.swap import swap


def test_a_new_tensor_with_the_id_of_one_that_is_gone_is_not_marked():
    marks = Marks("seen")
    for _ in range(50):
        param = nn.Parameter(torch.zeros(2))
        assert param not in marks
        marks.add(param)
        assert param in marks


def test_marks_survive_a_swap_and_not_a_copy():
    marks, param = Marks("seen"), nn.Parameter(torch.zeros(2))
    marks.add(param, torch.bfloat16)
    swap(param, nn.Parameter(torch.ones(3)))
    assert marks.get(param) is torch.bfloat16 and param not in Marks("seen")
    assert copy.deepcopy(param) not in marks


def test_a_mark_that_is_taken_off_leaves_no_attribute():
    marks, param = Marks("seen"), nn.Parameter(torch.zeros(2))
    marks.add(param)
    marks.discard(param)
    assert param not in marks and not param.__dict__
