"""Checkpoints of the MS-AMP levels go to any other level and back, rounded once to what the target stores."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import (
    FP16_HALF,
    MSAMP_LEVELS,
    Net,
    assert_same,
    is_low_bit,
    kept,
    kept_state,
    plugin,
    save_at,
    snapshot,
    stateful_loader,
    train,
)

FP32 = "an FP32 Trainer"
OTHERS = [FP32, "bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params", *MSAMP_LEVELS, *FP16_HALF]


class AtStart(Callback):
    """A snapshot before the first step."""

    def on_train_start(self, trainer, pl_module):
        self.state = snapshot(trainer, pl_module)


def fit(case, folder, steps, ckpt=None):
    """Train up to ``steps`` and save; returns the model, what was there at the start, and the file."""
    start, model = AtStart(), Net()
    precision = None if case == FP32 else plugin(case)
    train(model, precision, start, save_at(folder, steps), data=stateful_loader(), ckpt=ckpt, max_steps=steps)
    return model, start.state, folder / f"step={steps}.ckpt"


def check_arrival(case, start, path):
    """What is there before the first step is the file's content, as ``case`` stores it."""
    saved = torch.load(path, weights_only=True)
    assert_same(start["weights"], {n: kept(case, n, v.float()) for n, v in saved["state_dict"].items()})
    [optimizer], [states] = start["optimizers"], saved["optimizer_states"]
    assert optimizer["state"].keys() == states["state"].keys() and len(states["state"]) == 7
    for index, state in states["state"].items():
        want = {key: kept_state(case, key, value.float()) for key, value in state.items()}
        assert_same(optimizer["state"][index], want, f"{case} {index}")
    assert_same(optimizer["param_groups"][0]["betas"], states["param_groups"][0]["betas"])


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_checkpoint_goes_to_another_level_and_back(case, other, tmp_path):
    _, _, first = fit(case, tmp_path / "first", 1)
    there, start, second = fit(other, tmp_path / "second", 2, ckpt=first)
    check_arrival(other, start, first)
    _, start, _ = fit(case, tmp_path / "back", 3, ckpt=second)
    check_arrival(case, start, second)
    stayed, _, _ = fit(case, tmp_path / "stayed", 2, ckpt=first)
    # A level's own step of the loss: FP8 GEMMs beside FP32 ones differ by less than a 50th here.
    assert there.losses[0] == pytest.approx(stayed.losses[0], rel=0.02)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_checkpoint_takes_the_bytes_of_its_formats(case, tmp_path):
    _, _, path = fit(case, tmp_path, 1)
    saved = torch.load(path, weights_only=True)
    for name, value in saved["state_dict"].items():
        in_fp16 = value.dim() > 1 and (case != "msamp_o3" or name == "head.weight")
        assert value.dtype == (torch.float16 if in_fp16 else torch.float32)
        assert value.untyped_storage().nbytes() == value.nbytes  # nothing of the storage comes along
    for state in saved["optimizer_states"][0]["state"].values():
        low = case != "msamp_o1" and state["exp_avg"].dim() > 1
        assert type(state["exp_avg"]) is type(state["exp_avg_sq"]) is torch.Tensor
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (
            torch.bfloat16 if low else torch.float32,
            torch.float32,
        )


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_weights_beyond_fp16_in_a_checkpoint_are_refused(case, tmp_path):
    model = Net()
    path = fit(FP32, tmp_path, 1)[2]
    saved = torch.load(path, weights_only=True)
    saved["state_dict"]["head.weight"][0, 0] = 1e5
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"head\.weight .*beyond 65504"):
        train(model, case, data=stateful_loader(), ckpt=path, max_steps=2)
    assert not model.losses


def test_levels_know_which_they_are():
    assert [c for c in OTHERS if c != FP32 and is_low_bit(c)] == [*MSAMP_LEVELS, *FP16_HALF]
