"""``fully_shard`` beside ``initialize`` trained in FP32 without a word, or crashed: it is refused with the way out."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import nemo_lowprec
from nemo_lowprec.compute import is_converted
from tests.processes import on_processes

LEVELS = ["O1", "O2", "O3"]


def attempt(level, when, what):
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    cut = model if what == "all" else model[1]
    if when == "before":
        fully_shard(cut)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        nemo_lowprec.initialize(model, optimizer, opt_level=level)
        if when == "after":
            fully_shard(cut)
        model(torch.randn(4, 32))
    except ValueError as error:
        return {"says": str(error), "converted": is_converted(model)}
    return {"says": ""}


def every(rank):
    return {
        (level, when, what): attempt(level, when, what)
        for level in LEVELS for when in ("before", "after") for what in ("all", "a part")
    }  # fmt: skip


def test_a_sharded_model_is_refused_before_a_step(tmp_path):
    for found in on_processes(2, tmp_path, every):
        assert len(found) == 12
        for (_, when, _), refused in found.items():
            assert "sharded (by fully_shard)" in refused["says"] and "strategy='lowprec_sharded'" in refused["says"]
            assert refused["converted"] == (when == "after")
