"""Sizes that a model does not divide among are named before it is built."""

import pytest

from nemo_lowprec.megatron import ParallelLayout
from nemo_lowprec.models.megatron_gpt import check_sizes
from nemo_lowprec.models.megatron_llama import GptArchitecture

ARCHITECTURE = GptArchitecture({"num_layers": 12}, {})


@pytest.mark.parametrize(
    ("layout", "sequence", "said"),
    [
        (ParallelLayout(pipeline=5), None, "12 layers do not divide into 5 parts"),
        (ParallelLayout(pipeline=4, virtual_pipeline=2), 64, "12 layers do not divide into 8 parts"),
        (ParallelLayout(context=2), 66, "66 tokens do not divide into 4 parts"),
        (ParallelLayout(tensor=4, context=2, sequence_parallel=True), 24, "24 tokens do not divide into 16 parts"),
    ],
)
def test_what_does_not_divide_is_named(layout, sequence, said):
    with pytest.raises(ValueError, match=said):
        check_sizes(ARCHITECTURE, layout.fields(), sequence)


@pytest.mark.parametrize(
    ("layout", "sequence"),
    [
        (ParallelLayout(), 1),
        (ParallelLayout(context=3), None),
        (ParallelLayout(pipeline=2, virtual_pipeline=3, context=2), 64),
        (ParallelLayout(tensor=4, sequence_parallel=True), 4),
    ],
)
def test_what_divides_passes(layout, sequence):
    check_sizes(ARCHITECTURE, layout.fields(), sequence)


def test_an_uneven_pipeline_of_the_users_own_passes():
    check_sizes(ARCHITECTURE, {**ParallelLayout(pipeline=5).fields(), "num_layers_in_first_pipeline_stage": 4}, None)


def test_experts_that_do_not_divide_are_named():
    fields = ParallelLayout(expert=4).fields()
    with pytest.raises(ValueError, match="num_moe_experts=6 do not divide among expert_model_parallel_size=4"):
        check_sizes(ARCHITECTURE, {**fields, "num_moe_experts": 6}, None)
    check_sizes(ARCHITECTURE, {**fields, "num_moe_experts": 8}, None)
