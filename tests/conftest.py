"""Settings of all tests."""

import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for ``support``
torch.set_num_threads(1)  # two threads spend most of their time waiting for each other at these sizes
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
