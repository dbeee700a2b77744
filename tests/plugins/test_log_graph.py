"""``TensorBoardLogger(log_graph=True)`` logs the graph at every level."""

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from support import CASES, Net, loader, plugin, trainer


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_model(case, tmp_path):
    pytest.importorskip("tensorboard")
    model = Net()
    model.example_input_array = torch.randn(4, 32)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    fit = trainer(plugin(case), logger=logger, max_steps=2)
    fit.fit(model, loader())
    events = next(tmp_path.rglob("events.out.tfevents.*")).read_bytes()
    assert b"Net/LowPrecisionLinear[mid]" in events and b"aten::mm" in events
