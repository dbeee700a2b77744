"""What is said where Megatron-core cannot run, and what ``MegatronStrategy`` refuses before it runs."""

import sys
from types import ModuleType

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging

from nemo_lowprec.chart import CHART
from nemo_lowprec.megatron.requirements import check_device
from nemo_lowprec.strategies import MegatronStrategy
from tests.support import Net, loader, plugin


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs an NVIDIA GPU with CUDA.*use lowprec_sharded or lowprec_ddp"):
        MegatronStrategy()


def test_without_megatron_core(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(RuntimeError, match=r"needs Megatron-core: pip install 'nemo-lowprec\[megatron\]'"):
        MegatronStrategy()


def test_a_module_of_the_users_own_named_megatron(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    with pytest.raises(RuntimeError, match=r"needs Megatron-core: pip install 'nemo-lowprec\[megatron\]'"):
        MegatronStrategy()


def test_without_transformer_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(
        RuntimeError, match=r"needs Transformer Engine .*pip install --no-build-isolation 'nemo-lowprec\[te\]'"
    ):
        MegatronStrategy()


FP8 = {name for name, level in CHART.items() if level.scaling in ("delayed", "current", "rowwise")}
BLOCKS = {"bf16_with_fp8_subchannel_scaling_mixed"}
BLACKWELL = {"bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"}


@pytest.mark.parametrize(
    ("capability", "refused"),
    [
        ((8, 0), FP8 | BLOCKS | BLACKWELL),
        ((8, 9), BLOCKS | BLACKWELL),
        ((9, 0), BLACKWELL),
        ((10, 0), set()),
        ((12, 0), {"bf16_with_mxfp8_mixed"}),
    ],
)
def test_levels_that_a_gpu_cannot_run(capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for name, level in CHART.items():
        if name not in refused:
            check_device(level)
            continue
        with pytest.raises(ValueError, match=f"{name} needs .*this one has {capability[0]}.{capability[1]}. Use bf16"):
            check_device(level)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
        ({"context_parallel_size": 0}, "context_parallel_size=0 must be"),
        ({"checkpoint_form": "zarr"}, "checkpoint_form='zarr' must be 'fully_reshardable' or 'dp_reshardable'"),
        ({"bucket_size": 0}, "bucket_size=0 must be a positive number"),
        ({"bucket_size": True}, "bucket_size=True must be a positive number"),
    ],
)
def test_a_bad_argument_is_said_first(arguments, message):
    with pytest.raises(ValueError, match=message):
        MegatronStrategy(**arguments)


def test_options_are_lightnings_and_not_torchs(monkeypatch):
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)
    assert MegatronStrategy(process_group_backend="nccl").process_group_backend == "nccl"
    with pytest.raises(TypeError, match="MegatronStrategy has no find_unused_parameters"):
        MegatronStrategy(find_unused_parameters=True)


class Untouched(Net):
    """Says where a Trainer has gone on to build it."""

    def prepare_data(self):
        raise AssertionError("the data were prepared")

    setup = configure_model = configure_optimizers = prepare_data


class ByHand(Untouched):
    automatic_optimization = False


REFUSED = {
    "level": (lambda: plugin("msamp_o2"), {}, Untouched, r"msamp_o2 keeps FP16 weights.*Use msamp_o2\(half='fp16'\)"),
    "own layers": (lambda: plugin("msamp_o3+fp16"), {}, Untouched, "msamp_o3 stores weights in FP8.*Use msamp_o2"),
    "fp8_params": (lambda: plugin("bf16_with_fp8_mixed+fp8_params"), {}, Untouched, "without fp8_params"),
    "none": (lambda: None, {}, Untouched, "MegatronStrategy needs a level of nemo_lowprec"),
    "manual": (lambda: plugin("bf16_mixed"), {}, ByHand, "set automatic_optimization = True"),
    "clipping": (
        lambda: plugin("bf16_mixed"), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, Untouched,
        "Megatron-core clips by norm",
    ),
    "averaging": (
        lambda: plugin("bf16_mixed"), {"callbacks": [StochasticWeightAveraging(1e-2)]}, Untouched, "each process steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_said_before_anything_is_built(name, monkeypatch):
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)  # of this machine
    precision, options, model, message = REFUSED[name]
    fit = pl.Trainer(
        accelerator="cpu", devices=1, strategy=MegatronStrategy(), plugins=precision(), logger=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fit.fit(model(), loader())


def test_another_optimizer_is_refused_with_the_way_out():
    from nemo_lowprec.megatron.optimizer import check_optimizer

    sgd = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"returned SGD, .*AdamW at every level.*strategy='lowprec_sharded'"):
        check_optimizer([sgd])
    assert check_optimizer([adamw := torch.optim.AdamW(sgd.param_groups[0]["params"])]) is adamw
