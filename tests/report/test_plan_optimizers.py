"""Plans of a CausalLM with each of its optimizers, against what an audit finds after a step."""

import pytest
import torch
from torch.utils.data import DataLoader

from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import Audit, plan_training
from tests.support import plugin, trainer

CONFIG = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}


class Model(CausalLM):
    def train_dataloader(self):
        ids = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 2, batch_size=None)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "sgd"])
@pytest.mark.parametrize(
    "options", [{}, {"states": "fp8+fp8"}, {"states": "fp8+fp8", "gradient_release": True}], ids=str
)
def test_states_are_planned_as_they_are_found(optimizer, options):
    model = Model("llama_tiny", config=CONFIG, vocab_size=128, optimizer=optimizer)
    audit = Audit()
    trainer(plugin("msamp_o2", **options), audit, max_steps=2).fit(model)
    fresh = Model("llama_tiny", config=CONFIG, vocab_size=128, optimizer=optimizer)
    fresh.configure_model()
    planned = {c.name: c for c in plan_training(fresh, plugin("msamp_o2", **options)).columns}
    found = audit.report.total_bytes
    for column in ("Weight", "Optimizer states"):
        assert planned[column].bytes == found[column]
    assert audit.report.agrees or "gradient_release" in options  # which leaves no gradient to look at
    kept = {(f.column, f.part): 0.0 for f in audit.report.findings}
    for f in audit.report.findings:
        kept[f.column, f.part] += f.bytes_per_param or 0.0
    held = sum(kept[c, "converted"] for c in ("Weight", "Master weight", "Weight gradient", "Optimizer states"))
    moments = 1 if optimizer != "adamw" else 2 if "states" in options else 3
    assert held == pytest.approx(2 + (0 if "gradient_release" in options else 1) + moments, rel=0.02)
