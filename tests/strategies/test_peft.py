"""Adapters of PEFT on two processes: whole models with a base in FP8, and shards."""

import pytest
import torch

from tests.adapted_models import TOKENS, Adapted, base_layers
from tests.processes import on_processes
from tests.support import plugin, replay, trainer

CASES = ["te_fp8", "msamp_o2", "bf16_mixed", "bf16_with_fp8_mixed"]
WHOLE = ["ddp", "lowprec_ddp"]
RUNS = [(case, name, torch.bfloat16) for case in CASES for name in ("lowprec_ddp", "lowprec_sharded")]
RUNS += [("bf16_with_fp8_mixed", "ddp", torch.bfloat16), ("bf16_with_fp8_mixed", "lowprec_sharded", torch.float32)]


class Watched(Adapted):
    """Notes how the base is stored, and whether it has gradients, at the last step."""

    def on_before_zero_grad(self, optimizer):
        self.storage = {
            (type(layer.weight).__name__, str(layer.weight.dtype), layer.weight.grad is None)
            for layer in base_layers(self).values()
        }


def run(rank, case, name, dtype, **options):
    module = Watched(dtype=dtype)
    fit = trainer(
        plugin(case, **options), max_steps=4, devices=2, strategy=name, use_distributed_sampler=False
    )  # fmt: skip
    fit.fit(module, replay(TOKENS[rank::2]))
    state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in module.state_dict().items()}
    return {"losses": module.losses, "storage": module.storage, "state": {n: v.float() for n, v in state.items()}}


def every_run(rank):
    found = {(case, name, str(dtype)): run(rank, case, name, dtype) for case, name, dtype in RUNS}
    try:
        run(rank, "bf16_with_fp8_mixed", "lowprec_sharded", torch.bfloat16, frozen="fp8")
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("peft"), every_run)


@pytest.mark.parametrize(("case", "name", "dtype"), RUNS)
def test_adapters_learn_alike_on_both_processes(two, case, name, dtype):
    first, second = (rank[case, name, str(dtype)] for rank in two)
    assert first["state"].keys() == second["state"].keys()
    assert all(torch.equal(first["state"][n], second["state"][n]) for n in first["state"])
    assert first["losses"][-1] < first["losses"][0]
    in_fp8 = name in WHOLE and case != "bf16_mixed"
    assert all((kind == "Fp8Weight") == in_fp8 and no_grad for kind, _, no_grad in first["storage"])
    if name == "lowprec_sharded":
        assert {stored for _, stored, _ in first["storage"]} == {str(dtype)} or case == "msamp_o2"
    # Beside a model that each process holds whole.
    whole = two[0][case, "lowprec_ddp", str(torch.bfloat16)]
    assert first["losses"][-1] == pytest.approx(whole["losses"][-1], abs=0.1)


def test_shards_in_fp8_are_refused(two):
    for rank in two:
        assert rank["refused"].startswith("frozen='fp8': FSDP2 shards frozen weights as they come")
