"""Losses on gradients are averaged over processes as other losses are."""

import torch
from torch.utils.data import DataLoader, Subset

from nemo_lowprec.strategies import LowPrecisionDDPStrategy
from tests.plugins.test_double_backward import BOUND, Critic, relative_errors
from tests.processes import on_processes
from tests.support import Samples, level_of, plugin, train

SOME = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"]


def averaged(rank):
    found = {}
    data = DataLoader(Subset(Samples(), range(4 * rank, 4 * rank + 4)), 4)
    for case in SOME:
        options = {"loss_scale": 16.0} if level_of(case).has_loss_scale else {}
        for strategy in ("ddp", LowPrecisionDDPStrategy()):
            run = train(
                Critic(), plugin(case, **options), data=data, max_steps=1, devices=2, strategy=strategy,
                use_distributed_sampler=False,
            )  # fmt: skip
            name = strategy if isinstance(strategy, str) else "lowprec_ddp"
            found[f"{case} {name}"] = {n: torch.as_tensor(g).float() for n, g in run.grads[0].items()}
    return found


def test_a_penalty_on_gradients_is_averaged(tmp_path):
    samples, grads = Samples(), []
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        model = Critic()
        model.loss({"x": samples.x[part], "y": samples.y[part]}).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    want = {n: (grads[0][n] + grads[1][n]) / 2 for n in grads[0]}
    first, second = on_processes(2, tmp_path, averaged)
    for name, got in first.items():
        assert all(torch.equal(got[n], second[name][n]) for n in got), name
        assert max(relative_errors(got, want).values()) < BOUND[level_of(name.split()[0]).compute], name
