"""What the losses of Megatron-core's layouts are held against."""

import pytest
import torch

from benchmarks.fused_llama import fused_llama
from benchmarks.megatron_parity import write
from benchmarks.record import read
from nemo_lowprec.models import CausalLM

LEVEL = "bf16_with_fp8_mixed"


def test_a_llama_with_fused_matrices_computes_the_same():
    ours = CausalLM("llama_tiny", vocab_size=128, init_seed=3, config={"tie_word_embeddings": False})
    ours.configure_model()
    llama = ours.model.eval()
    fused = fused_llama(llama).eval()
    ids = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(0))
    ours, theirs = llama(input_ids=ids), fused(input_ids=ids)
    torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-4, atol=1e-5)
    assert ours.logits.std() > 0.1
    names = [name for name, _ in fused.named_parameters()]
    assert any("qkv_proj" in name for name in names) and any("gate_up_proj" in name for name in names)


def run(layout, losses, seed=0):
    return {"level": LEVEL, "layout": layout, "init_seed": seed, "val_loss": 1.0, "skipped": [], "train_loss": losses}


def test_distances_are_from_the_runs_of_the_same_seed_also_of_earlier_parts(tmp_path):
    out = tmp_path / "parity.jsonl"
    write(out, [run("transformers", [3.0] * 20), run("transformers", [9.0] * 20, seed=1)], 20)
    write(out, [run("TP1", [3.0] * 10 + [3.25] * 10), run("TP1", [8.0] * 20, seed=2)], 20)
    figures = {(f["layout"], f["init_seed"]): f for f in read(out)[1]}
    assert figures["TP1", 0]["furthest"] == pytest.approx(0.25)
    assert "furthest" not in figures["TP1", 2] and "furthest_from_fused" not in figures["TP1", 0]
    write(out, [run("transformers", [2.0] * 20)], 20)
    origins, found = read(out)
    figures = {(f["layout"], f["init_seed"]): f for f in found}
    assert len(found) == 4 and len(origins) == 3
    assert figures["TP1", 0]["furthest"] == pytest.approx(1.25)
