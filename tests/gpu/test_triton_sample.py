"""The kernel that reads parts of many tensors: the same elements and values as by torch's operations."""

import pytest
import torch

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.floats import E2M5, E5M3
from nemo_lowprec.kernels import loader
from nemo_lowprec.report.monitor.sampled import Sampler
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, GradientTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = [(64, 256), (300, 4096), (7, 100), (2, 20000), (5000,), (3,), (16, 3, 5, 5), (130, 130), (4, 0)]
FORMATS = {
    "fp32": lambda x: x,
    "bf16": lambda x: x.bfloat16(),
    "fp16": lambda x: Fp16Weight.from_float(x, torch.bfloat16),
    "fp8": lambda x: Fp8Weight.from_float(x, E4M3, torch.bfloat16),
    "gradient": GradientTensor.from_float,
    "e4m3": lambda x: BlockScaledTensor.from_float(x, E4M3),
    "blocks of fp16": lambda x: BlockScaledTensor.from_float(x, FP16),
    "e5m3": lambda x: BlockScaledTensor.from_float(x.abs(), E5M3),
    "e2m5": lambda x: BlockScaledTensor.from_float(x, E2M5),
}


def tensors(name, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [FORMATS[name](torch.randn(shape, device="cuda", generator=generator)) for shape in SHAPES]


def both(given, monkeypatch):
    sampler = Sampler([tensor.shape for tensor in given if tensor is not None], torch.device("cuda"))
    found = [sampler.read(given) for _ in range(2)][1]  # launched again
    with monkeypatch.context() as patch:
        patch.setattr("nemo_lowprec.report.monitor.sampled.sample_kernels", lambda: None)
        return found, sampler.read(given)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_that_torch_reads(name, monkeypatch):
    assert loader.sample_kernels() is not None
    found, wanted = both(tensors(name), monkeypatch)
    assert torch.equal(found, wanted) and found.abs().sum() > 0


def test_several_formats_and_a_factor(monkeypatch):
    given = [tensors(name, seed)[i] for seed, (i, name) in enumerate(zip(range(len(SHAPES)), FORMATS, strict=True))]
    given[4].mul_(3.0)  # the gradient's factor
    found, wanted = both(given, monkeypatch)
    assert torch.equal(found, wanted)
    assert torch.equal(found[4, :1000], given[4].dequantize()[:1000])


def test_tensors_that_are_not_contiguous_are_read_by_torch(monkeypatch):
    given = [torch.randn(40, 64, device="cuda").t(), torch.randn(30, 64, device="cuda")]
    found, wanted = both(given, monkeypatch)
    assert torch.equal(found, wanted) and torch.equal(found[0, :2560], given[0].reshape(-1))
