"""Plans of models that Megatron-core builds, on a machine that cannot build them."""

from dataclasses import replace

import pytest
import torch

from nemo_lowprec.formats.block_scale_128 import BLOCK
from nemo_lowprec.models import CausalLM, MegatronGPT
from nemo_lowprec.report import plan_training
from tests.support import plugin, plugin_on

SAMPLE = {"micro_batch_size": 1, "seq_length": 8192}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
ROWS, HIDDEN, VOCAB, LAYERS = 8192, 8192, 128_256, 80


def planned(case="bf16_mixed", nodes=4, gpus=8, model=None, **options):
    precision = plugin_on("auto", case)  # Transformer Engine's layers, which no machine is asked for
    return plan_training(model or MegatronGPT("llama3_70b"), precision, nodes, gpus, **{**SAMPLE, **options})


def size(plan, name):
    return plan.column(name).bytes


def sent(plan, kind):
    return sum(t.bytes for t in plan.traffic if t.kind == kind)


def test_all_processes_together_hold_the_model():
    whole = planned(gpus=1, nodes=1)
    assert whole.parameters == 70_553_706_496 == size(whole, "Weight") // 2
    # Matrices are cut, vectors are not.
    vectors = 2 * (2 * LAYERS + 1) * HIDDEN
    cut = planned(gpus=8, nodes=1, **{TP: 8})
    assert 8 * (size(cut, "Weight") - vectors) == size(whole, "Weight") - vectors
    # Both ends of a pipeline have a table, and the last the norm.
    first = planned(gpus=4, nodes=1, micro_batches=8, **{PP: 4})
    assert first.stage == "stage 1 of 4"
    assert size(first, "Weight") == 2 * VOCAB * HIDDEN + (size(whole, "Weight") - 4 * VOCAB * HIDDEN - 2 * HIDDEN) // 4


@pytest.mark.parametrize("options", [{}, {CP: 2}, {TP: 4, CP: 2}])
def test_masters_and_states_are_cut_over_data_and_context(options):
    got = planned(**options)
    cut = 32 // options.get(TP, 1)
    held = size(got, "Weight") // 2
    assert size(got, "Weight gradient") == 4 * held
    assert size(got, "Master weight") == pytest.approx(4 * held / cut, rel=1e-4)
    assert size(got, "Optimizer states") == pytest.approx(8 * held / cut, rel=1e-4)


def test_formats_of_the_level():
    o3, fp8 = planned("msamp_o3+fp16", **{TP: 4}), planned("bf16_with_fp8_mixed+fp8_params", **{TP: 4})
    table = VOCAB * HIDDEN // 4
    converted = (o3.parameters - 8 * table) // 4  # vectors are a thousandth
    assert size(o3, "Weight") == pytest.approx(converted + 2 * 2 * table, rel=2e-3)
    assert size(o3, "Weight gradient") == pytest.approx((converted + 2 * table) * (1 + 1 / BLOCK), rel=2e-3)
    assert o3.column("Weight gradient").formats == "fp32+fp8"
    assert size(o3, "Master weight") == pytest.approx(2 * converted / 8 * (1 + 1 / 2 / BLOCK), rel=5e-3)
    assert size(fp8, "Weights for GEMMs") == pytest.approx(converted, rel=1e-3)
    plain = planned("bf16_with_fp8_mixed", **{TP: 4})
    assert size(plain, "Weights for GEMMs") == 2 * size(fp8, "Weights for GEMMs")
    assert size(plain, "Activations") < size(planned(**{TP: 4}), "Activations")


def test_sizes_cut_activations():
    whole, tensor = planned(), planned(**{TP: 4})
    sequence, context = planned(**{TP: 4}, sequence_parallel=True), planned(**{CP: 2})
    assert size(context, "Activations") == size(whole, "Activations") // 2
    assert size(sequence, "Activations") == pytest.approx(size(whole, "Activations") / 4, rel=1e-6)
    assert size(sequence, "Activations") < size(tensor, "Activations") < size(whole, "Activations")
    # Without sequence parallelism both sides of each norm are whole.
    norms = LAYERS * 4 * ROWS * HIDDEN * 2 + 2 * ROWS * HIDDEN * 2
    assert size(tensor, "Activations") - norms == pytest.approx((size(whole, "Activations") - norms) / 4, rel=1e-6)


def test_a_first_stage_holds_a_micro_batch_of_every_stage():
    one = {**SAMPLE, PP: 4, "gpus": 4, "nodes": 1}
    few, more, many = (planned(**one, micro_batches=count) for count in (2, 4, 16))
    assert size(more, "Activations") == size(many, "Activations") == 2 * size(few, "Activations")
    loss = ROWS * (VOCAB * 4 + 2 * HIDDEN * 2)
    assert size(more, "Activations") == size(planned(), "Activations") - loss
    parts = planned(**one, micro_batches=16, virtual_pipeline_model_parallel_size=5)
    # 2 x 3 warm-up parts, four for each further part, and the one at work: of four layers each.
    assert size(parts, "Activations") == size(many, "Activations") * (6 + 16 + 1) * 4 // 80


def test_one_micro_batch_makes_the_last_stage_the_largest():
    got = planned(nodes=1, gpus=4, micro_batches=1, **{PP: 4})
    assert got.stage == "stage 4 of 4" and "fp32" in got.column("Activations").formats


def test_recomputation():
    model = MegatronGPT("llama3_70b", activation_checkpointing=True)
    got, without = planned(model=model), planned()
    loss = ROWS * (VOCAB * 4 + 2 * HIDDEN * 2)
    assert got.recomputes and size(got, "Activations") == LAYERS * ROWS * HIDDEN * 2 + loss
    assert got.other_choice == (size(without, "Activations"), without.total)
    assert without.other_choice == (size(got, "Activations"), got.total)
    assert planned(both_choices=False) == replace(without, other_choice=None)
    four = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}
    fewer = planned(model=MegatronGPT("llama3_70b", transformer=four))
    assert size(fewer, "Activations") == LAYERS // 4 * ROWS * HIDDEN * 2 + loss
    half = {**four, "recompute_method": "block", "recompute_num_layers": 40}
    mixed = planned(model=MegatronGPT("llama3_70b", transformer=half))
    assert 2 * size(mixed, "Activations") == size(got, "Activations") + size(without, "Activations")


def test_what_is_sent():
    got = planned(micro_batches=4, **{TP: 4})
    held = size(got, "Weight") // 2
    assert sent(got, "reduce_scatter, DP") == pytest.approx(4 * held * 7 / 8, rel=1e-4)
    assert sent(got, "all_gather, DP") == pytest.approx(2 * held * 7 / 8, rel=1e-4)
    # Two in forward and two in backward of each layer; the embedding's, and the head's.
    assert sent(got, "all_reduce, TP") == (4 * LAYERS + 2) * 4 * ROWS * HIDDEN * 2 * 2 * 3 // 4
    fp8 = planned("msamp_o2+fp16", **{TP: 4})
    assert sent(fp8, "all_to_all, DP") == pytest.approx(held * (1 + 1 / BLOCK) * 7 / 8, rel=1e-3)
    ring = planned(**{CP: 2})
    keys = ROWS // 2 * 2 * 8 * 128 * 2
    assert sent(ring, "send, CP") == LAYERS * 4 * keys  # there, back, and the gradients twice
    pipeline = planned(nodes=1, micro_batches=4, **{PP: 8})
    assert sent(pipeline, "send, PP") == 4 * ROWS * HIDDEN * 2
    assert planned(nodes=1, gpus=1).traffic == ()


def test_without_a_sample_activations_are_left_out():
    got = planned(micro_batch_size=None, seq_length=None)
    assert "Activations" not in [c.name for c in got.columns] and "micro_batch_size and seq_length" in got.caption()


class Chunks(torch.nn.Module):
    def build_chunk(self, fields, pre_process, post_process, vp_stage):
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"expert_model_parallel_size": 2}, ValueError, "No plan for experts"),
        ({TP: 3, "gpus": 3}, ValueError, "num_attention_heads=64 does not divide among tensor_model_parallel_size=3"),
        ({TP: 16}, ValueError, "num_query_groups=8 does not divide"),
        ({TP: 64}, ValueError, "takes 64 processes, which does not divide the 32"),
        ({PP: 3, "gpus": 3}, ValueError, "80 layers do not divide into 3 parts"),
        ({"seq_length": 8191, CP: 2}, ValueError, "Samples of 8191 tokens do not divide"),
        ({"strategy": "lowprec_sharded"}, ValueError, "trained with strategy='lowprec_megatron', and not with"),
        ({"accelerator": "cpu"}, ValueError, "Megatron-core trains on GPUs"),
        ({"shard_size": 8}, TypeError, "lowprec_megatron has no option 'shard_size'"),
        ({"case": "msamp_o2"}, ValueError, "half='fp16'"),
        ({"model": MegatronGPT("llama3_70b", transformer={"moe_layer_freq": 2})}, ValueError, "'moe_layer_freq': ...}"),
        (
            {"model": MegatronGPT("llama3_70b", transformer={
                "recompute_granularity": "selective", "recompute_modules": ["mlp"]})},
            ValueError, "recompute_modules=.'mlp'. is not planned",
        ),
        ({"model": Chunks()}, ValueError, "No plan for Chunks on Megatron-core: only MegatronGPT has one"),
    ],
)  # fmt: skip
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        planned(**arguments)


def test_a_model_that_megatron_core_does_not_build():
    with pytest.raises(ValueError, match="Plan that one, or a MegatronGPT"):
        plan_training(CausalLM("llama_tiny", vocab_size=512), plugin("bf16_mixed"), 1, 2, "lowprec_megatron")
