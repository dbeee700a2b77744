"""The benchmark of Muon, Lion and SGD: who is measured, on tensors of a size that takes no time."""

import torch

from benchmarks import muon
from benchmarks.optimizer_step import shapes
from benchmarks.record import Record, read


def test_every_contestant_steps_with_its_formats(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.optimizer_step.STEPS", 1)
    monkeypatch.setattr("benchmarks.optimizer_step.WARMUP", 1)
    path = tmp_path / "muon.jsonl"
    muon.measure_time(Record(path), shapes(1, 32, 16), 1)
    found = {f["name"]: f["state_bytes_per_param"] for f in read(path)[1]}
    assert list(found) == list(muon.contestants())
    assert all(size < 3.5 if "O2" in name else size >= 4 for name, size in found.items())


def test_torchs_two_optimizers_share_the_parameters():
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes(1, 16, 8)]
    (both,) = (c.make(params) for name, c in muon.contestants().items() if name == muon.BASELINE)
    held = [p for group in both.param_groups for p in group["params"]]
    assert {*map(id, held)} == {*map(id, params)} and len(held) == len(params)
    for param in params:
        param.grad = torch.ones_like(param)
    before = [p.detach().clone() for p in params]
    both.step()
    assert all(not torch.equal(p, q) for p, q in zip(params, before, strict=True))
