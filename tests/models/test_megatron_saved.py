"""A checkpoint as Megatron-core lays it out becomes a transformers model, without Megatron-core and without a GPU."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from nemo_lowprec.models import CausalLM, export_checkpoint
from nemo_lowprec.models.megatron_llama import gpt_architecture
from nemo_lowprec.models.megatron_weights import from_transformers
from nemo_lowprec.models.saved_weights import is_of_megatron

ARGUMENTS = {
    "preset": "llama_tiny", "model_type": None, "config": {"num_hidden_layers": 3, "tie_word_embeddings": False},
    "vocab_size": 256,
}  # fmt: skip


def stacked(state, layers):
    """All layers' parameters as one tensor each, as Megatron-core saves them."""
    found = {}
    for name, tensor in state.items():
        before, _, after = name.partition("decoder.layers.")
        if not after:
            found[name] = tensor
        elif after.startswith("0."):
            found[f"decoder.layers.{after[2:]}"] = torch.stack(
                [state[f"{before}decoder.layers.{i}.{after[2:]}"] for i in range(layers)]
            )
    return found


@pytest.fixture
def saved(tmp_path):
    """The transformers model, and a folder of its weights in BF16 and, for those with a master, in FP32."""
    module = CausalLM(**ARGUMENTS)
    module.configure_model()
    architecture = gpt_architecture(module.transformers_config())
    full = stacked(from_transformers(module.model.state_dict(), architecture), 3)
    tensors = {name: tensor.bfloat16() for name, tensor in full.items()}
    tensors |= {f"optimizer.state.param.{name}": tensor for name, tensor in full.items()}
    tensors |= {f"optimizer.state.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in full.items()}
    folder = tmp_path / "saved"
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"hyper_parameters": {**ARGUMENTS, "weights": None, "transformer": {}}}, folder / "meta.pt")
    return module.model, folder


def test_masters_become_a_transformers_model(saved, tmp_path):
    model, folder = saved
    assert is_of_megatron(folder)
    result = export_checkpoint(folder, tmp_path / "out", dtype="fp32")
    assert result.stored == ("FP32",) and result.max_relative_error == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


def test_a_folder_of_fewer_layers_is_refused(saved, tmp_path):
    _, folder = saved
    config = {**ARGUMENTS["config"], "num_hidden_layers": 4}
    torch.save({"hyper_parameters": {**ARGUMENTS, "config": config}}, folder / "meta.pt")
    with pytest.raises(ValueError, match="is of 3 layers, and the architecture has 4"):
        export_checkpoint(folder, tmp_path / "out")
