"""What a Trainer's loggers get of the monitor."""

import csv
import sys

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator

from nemo_lowprec.report.monitor import PrecisionMonitor
from tests.support import Net, loader, plugin, trainer

STEPS, EVERY = 8, 3
SAMPLED = [2, 3, 6]
METRICS = ("sqnr", "underflow", "saturation")
NAMES = {
    *(f"monitor/sqnr_min/{kind}" for kind in ("input", "weight", "grad_output")),
    *(f"monitor/{metric}_max/{kind}" for metric in METRICS[1:] for kind in ("input", "weight", "grad_output")),
    "monitor/lost_max", "monitor/weight_sqnr_min",
}  # fmt: skip


class TakesImages(Logger):
    """A logger with Lightning's ``log_image``, as that of Weights & Biases."""

    name, version = "images", 0

    def __init__(self):
        super().__init__()
        self.images, self.metrics = [], {}

    def log_metrics(self, metrics, step=None):
        self.metrics.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_image(self, key, images, step=None, **kwargs):
        self.images += [(step, key, image.size) for image in images]


def fit(folder, *loggers):
    options = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": 4, "check_val_every_n_epoch": None}
    run = trainer(plugin("bf16_with_fp8_mixed"), PrecisionMonitor(EVERY, folder), logger=list(loggers), **options)
    run.fit(Net(), loader(), loader())


def test_tensorboard_and_csv_get_the_worst_numbers_at_the_sampled_steps(tmp_path):
    fit(tmp_path, TensorBoardLogger(tmp_path, "tb", ""), CSVLogger(tmp_path, "csv", ""))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = {name for name in events.Tags()[SCALARS] if name.startswith("monitor/")}
    assert found == NAMES
    for name in NAMES - {"monitor/lost_max", "monitor/weight_sqnr_min"}:
        assert [event.step for event in events.Scalars(name)] == SAMPLED
    assert all(25 < event.value < 40 for event in events.Scalars("monitor/sqnr_min/input"))
    with open(tmp_path / "csv" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("monitor/sqnr_min/input")]
    assert [int(row["step"]) for row in rows] == SAMPLED
    assert rows[0].keys() >= NAMES


def test_tensorboard_gets_heatmaps_after_validations_and_at_the_end(tmp_path):
    fit(tmp_path, TensorBoardLogger(tmp_path, "tb", ""))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert set(events.Tags()[IMAGES]) == {f"monitor/{metric}" for metric in METRICS}
    for metric in METRICS:
        images = events.Images(f"monitor/{metric}")
        assert [image.step for image in images] == [4, 8]  # the training ends with a validation
        assert all(image.encoded_image_string.startswith(b"\x89PNG") and image.width > 300 for image in images)


def test_a_logger_with_log_image_gets_the_same(tmp_path):
    logger = TakesImages()
    fit(tmp_path, logger)
    assert [(step, key) for step, key, _ in logger.images] == [(s, f"monitor/{m}") for s in (4, 8) for m in METRICS]
    assert [step for step, found in logger.metrics.items() if "monitor/sqnr_min/input" in found] == SAMPLED


def test_without_pillow_there_are_scalars_and_no_images(tmp_path, monkeypatch):
    logger = TakesImages()
    monkeypatch.setitem(sys.modules, "PIL", None)
    fit(tmp_path, logger)
    assert logger.images == [] and "monitor/sqnr_min/input" in logger.metrics[2]
