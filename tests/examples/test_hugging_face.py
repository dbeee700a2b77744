"""The examples of Accelerate and of transformers' Trainer."""

import importlib.util
from pathlib import Path

import accelerate
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """The module of an example's name; the example may start an Accelerator."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    monkeypatch.setenv("WANDB_DISABLED", "true")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield load
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_vit_by_accelerate(example, capsys):
    accuracy = example("accelerate_vit").main("bf16_with_fp8_mixed", epochs=1)
    assert accuracy > 0.11  # of ten classes
    assert f"bf16_with_fp8_mixed: accuracy {accuracy:.3f}" in capsys.readouterr().out


def test_a_llama_by_the_trainer(example, tmp_path, capsys):
    torch.manual_seed(0)
    loss = example("transformers_llama").main("msamp_o2", str(tmp_path), steps=12)
    assert loss < 5.0  # log(256) is 5.5
    assert f"msamp_o2: loss {loss:.3f}" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["accelerate_vit", "transformers_llama"])
def test_an_example_fits_a_screen(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
