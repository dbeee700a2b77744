"""A checkpoint of any level and form is inspected: what is printed of it is what it holds."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import nn

from benchmarks.cpu_for_cuda import CpuForCuda
from nemo_lowprec import CHART
from nemo_lowprec.checkpoint.sharded_folder import META
from nemo_lowprec.report import inspect_checkpoint
from tests.checkpoint.damage import HARMS, copied, flip, sprung
from tests.megatron.test_damaged import at_work
from tests.megatron.test_optimizer import FORMS, build
from tests.megatron.test_optimizer import train as train_megatron
from tests.processes import on_processes
from tests.strategies.test_sharded import Blocks
from tests.strategies.test_sharded_checkpoints import run, saved
from tests.support import CASES, FP16_HALF, Net, level_of, plugin, save_at, stateful_loader, train, trainer

STEP = 2
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def checkpoint(place):
    """Of a level, saved while it trains."""

    def of(case):
        path = place / case / f"step={STEP}.ckpt"
        if not path.exists():
            train(Net(), case, save_at(path.parent, STEP), max_steps=STEP)
        return path

    return of


def printed(found, all_rows=False):
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(found.table(all_rows))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    return text


def column(found, name, part=""):
    (one,) = (c for c in found.columns if (c.column, c.part) == (name, part))
    return one


@pytest.mark.parametrize("case", [*CASES, *FP16_HALF])
def test_every_level(checkpoint, case):
    path, row = checkpoint(case), level_of(case)
    found, whole = inspect_checkpoint(path), torch.load(path, weights_only=True)
    assert (found.level, found.step, found.form) == (row.name, STEP, "a file")
    weights = list(whole["state_dict"].values())
    states = [state["exp_avg"] for state in whole["optimizer_states"][0]["state"].values()]
    for name, part, tensors in (("Weight", "", weights), ("Optimizer states", "exp_avg", states)):
        one = column(found, name, part)
        assert one.elements == sum(t.numel() for t in tensors) and one.bytes == sum(t.nbytes for t in tensors)
        assert set(one.formats.split("+")) == {NAMES[t.dtype] for t in tensors}
    assert column(found, "Optimizer states", "exp_avg").in_training == row.optimizer_states[0].upper()
    assert column(found, "Optimizer states", "exp_avg_sq").in_training == row.optimizer_states[1].upper()
    assert sum(c.bytes for c in found.columns) == found.bytes == path.stat().st_size
    assert bool(found.histories) == (row.scaling == "delayed")
    assert ("half" in found.options) == case.endswith("+fp16")
    assert ("loss_scale" in whole["LowPrecision"]) == bool(found.loss_scale)
    text = printed(found)
    assert f"{row.name}(" in text and ("Amaxes of input" in text) == bool(found.histories)
    assert ("No amax histories" in text) == (row.scaling != "delayed")
    assert json.loads(json.dumps(found.to_json()))["histories"] == [
        {**vars(h), "amaxes": list(h.amaxes)} for h in found.histories
    ]


def test_histories_are_the_plugin_s(checkpoint):
    path = checkpoint("te_fp8")
    found, state = inspect_checkpoint(path), torch.load(path, weights_only=True)["LowPrecision"]["fp8"]
    assert [f"{h.layer}.{h.operand}" for h in found.histories] == list(state["operands"])
    for history in found.histories:
        own = state["operands"][f"{history.layer}.{history.operand}"]
        assert list(history.amaxes) == own["amax_history"][-STEP:].tolist() and min(history.amaxes) > 0
        assert history.scale == float(own["scale"])
    assert found.options == {"fp8_amax_history_len": 1024, "fp8_margin": 0, "fp8": "hybrid"}


@pytest.mark.parametrize(
    "options", [{"fp8_margin": 3, "fp8": "e4m3", "fp8_amax_history_len": 4}, {"fp8_margin": 7, "fp8": "hybrid"}]
)
def test_histories_show_options(tmp_path, options):
    fit = trainer(plugin("te_fp8", **options), save_at(tmp_path, 6), max_steps=6)
    fit.fit(Net(), stateful_loader(count=32))
    found = inspect_checkpoint(tmp_path / "step=6.ckpt")
    assert options.items() <= found.options.items()
    assert {len(h.amaxes) for h in found.histories} == {min(6, options.get("fp8_amax_history_len", 1024))}


class Tied(Net):
    """With two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(128, 128, bias=False)
        self.again.weight = self.mid.weight


def test_tied_weights_count_once_and_unfinished_gradients_are_told(tmp_path):
    path, model = tmp_path / "middle.ckpt", Tied()

    def between(outputs, batch, index):
        if index == 2:  # the first micro-batch of the second step
            model.trainer.save_checkpoint(path)

    model.on_train_batch_end = between
    fit = trainer(plugin("bf16_with_fp8_mixed"), max_steps=2, accumulate_grad_batches=2)
    fit.fit(model, stateful_loader())
    found = inspect_checkpoint(path)
    count = sum(p.numel() for p in model.parameters())
    assert column(found, "Weight").elements == count == column(found, "Weight gradient").elements
    assert column(found, "Weight gradient").in_training == "FP32"


def test_a_checkpoint_from_before_the_first_step(tmp_path):
    model, path = Net(), tmp_path / "first.ckpt"
    model.on_train_start = lambda: model.trainer.save_checkpoint(path)
    train(model, "te_fp8", max_steps=1)
    found = inspect_checkpoint(path)
    assert not found.histories and found.step == 0
    assert "No amax histories: te_fp8 has none here, as no layer has run in FP8." in printed(found)


def test_a_checkpoint_of_plain_lightning_has_no_level(tmp_path):
    train(Net(), None, save_at(tmp_path, 1), max_steps=1)
    found = inspect_checkpoint(tmp_path / "step=1.ckpt")
    assert found.level is None and not found.histories and column(found, "Weight").in_training == ""
    assert "none: plain Lightning's" in printed(found)


def test_states_of_an_optimizer_that_nests_them_otherwise_and_a_foreign_plugin(tmp_path):
    path = tmp_path / "x.ckpt"
    states = [{"inner": [{"exp_avg": torch.zeros(4)}, {"factor": torch.zeros(3)}], "lr": 1.0}]
    saved = {"state_dict": {"w": torch.zeros(5)}, "optimizer_states": states, "LowPrecision": 3, "hyper_parameters": 1}
    torch.save(saved, path)
    found = inspect_checkpoint(path)
    moments = [column(found, "Optimizer states", part).elements for part in ("exp_avg", "other")]
    assert found.level is None and moments == [4, 3] and column(found, "Weight").elements == 5


# Damage


@pytest.mark.parametrize("harm", [name for name in HARMS if "tensor" not in name])
def test_one_sentence_names_the_file(checkpoint, tmp_path, harm):
    path = copied(checkpoint("msamp_o2"), tmp_path)
    spoil, message = HARMS[harm]
    spoil(path)
    with pytest.raises(ValueError, match=message.replace("is a folder", "is no checkpoint")) as error:
        inspect_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert not sprung(path.parent).exists()


def test_values_of_weights_are_not_read(checkpoint, tmp_path):
    path = copied(checkpoint("msamp_o2"), tmp_path)
    HARMS["a bit of a tensor"][0](path)
    assert inspect_checkpoint(path).columns == inspect_checkpoint(checkpoint("msamp_o2")).columns


# Folders


SHARDED = ["msamp_o2", "bf16_with_fp8_mixed"]


def sharded_job(rank, place):
    for case in SHARDED:
        run(case, rank, 2, save_at(saved(place, case, "folder").parent, 2), max_steps=2, adam=True)


@pytest.fixture(scope="module")
def sharded(place, tmp_path_factory):
    on_processes(2, tmp_path_factory.mktemp("processes"), sharded_job, place)
    return lambda case: saved(place, case, "folder")


@pytest.mark.parametrize("case", SHARDED)
def test_a_folder_of_lowprec_sharded(sharded, case):
    path = sharded(case)
    found = inspect_checkpoint(path)
    assert (found.level, found.step, found.form) == (case, 2, "a folder of lowprec_sharded")
    weights, moment, model = column(found, "Weight"), column(found, "Optimizer states", "exp_avg"), Blocks()
    assert weights.elements == sum(t.numel() for t in model.state_dict().values())
    assert moment.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert weights.formats == ("fp16+fp32" if case == "msamp_o2" else "fp32")
    assert moment.in_training == CHART[case].optimizer_states[0].upper()
    assert found.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert {h.operand for h in found.histories} == {"input", "grad_output"}
    assert "a folder of lowprec_sharded" in " ".join(printed(found).split())


def test_a_folder_that_is_none(sharded, tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint: it lacks"):
        inspect_checkpoint(tmp_path)
    cut = tmp_path / "cut"
    shutil.copytree(sharded("msamp_o2"), cut)
    flip(cut / ".metadata", 300)
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        inspect_checkpoint(cut)
    other = tmp_path / "other"
    dcp.save({"weight": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(other), no_dist=True)
    torch.save({"global_step": 1}, other / META)
    with pytest.raises(ValueError, match="was written by neither lowprec_sharded nor lowprec_megatron"):
        inspect_checkpoint(other)


MEGATRON = ["bf16_mixed", "msamp_o2+fp16"]


def megatron_job(rank, place):
    from nemo_lowprec.megatron.checkpoint import save
    from nemo_lowprec.megatron.parallel import ParallelLayout

    with CpuForCuda():
        ParallelLayout().initialize()
        for case in MEGATRON:
            chunk, stepper = build(case)
            train_megatron(chunk, stepper, rank, range(1))
            for form in FORMS:
                state = {"level": level_of(case).name, "skipped_steps": 0}
                rest = {"state_dict": {}, "optimizer_states": [], "global_step": 1, "LowPrecision": state}
                save(rest, place / f"{case}-{form}", at_work(chunk, stepper), form)


@pytest.fixture(scope="module")
def megatron(place, tmp_path_factory):
    on_processes(2, tmp_path_factory.mktemp("processes"), megatron_job, place / "megatron")
    return place / "megatron"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", MEGATRON)
def test_a_folder_of_lowprec_megatron(megatron, case, form):
    found = inspect_checkpoint(megatron / f"{case}-{form}")
    assert (found.level, found.step, found.form) == (level_of(case).name, 1, "a folder of lowprec_megatron")
    count = 2 * 32 * 64 + 64 + 2 * 32
    assert column(found, "Weight").elements == count
    assert column(found, "Weight").formats == ("fp16+fp32" if "fp16" in case else "bf16")
    for name, part in (("Master weight", ""), ("Optimizer states", "exp_avg"), ("Optimizer states", "exp_avg_sq")):
        one = column(found, name, part)
        assert one.formats == "fp32" and one.elements >= count  # buckets are padded
    assert bool(found.loss_scale) == ("fp16" in case)
    assert ("4,096" in printed(found)) == ("fp16" in case)


def test_histories_of_transformer_engine_s_layers(tmp_path):
    """In a ring of four rows: row 0 is the present step, the newest rows come last."""
    forward = torch.zeros(4, 3)
    forward[2:, 0] = torch.tensor([1.0, 2.0])  # input
    forward[2:, 1] = torch.tensor([0.5, 0.25])  # weight
    backward = torch.zeros(4, 2)
    backward[1:, 0] = torch.tensor([1e-3, 2e-3, 3e-3])
    backward[0, 0] = 4e-3  # a step that has begun
    states = {"amax_history_fwd": forward, "scale_fwd": torch.tensor([224.0, 896.0, 1.0])}
    states |= {"amax_history_bwd": backward, "scale_bwd": torch.tensor([1e7, 1.0])}
    folder = tmp_path / "saved"
    dcp.save({"weight": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"fp8_histories": {"te": {"decoder.layers.0.mlp": states}}}, folder / META)
    found = inspect_checkpoint(folder)
    assert [(h.layer, h.operand, h.scale) for h in found.histories] == [
        ("decoder.layers.0.mlp", "input", 224.0),
        ("decoder.layers.0.mlp", "weight", 896.0),
        ("decoder.layers.0.mlp", "grad_output", 1e7),
    ]
    assert [h.amaxes for h in found.histories] == [
        (1.0, 2.0), (0.5, 0.25), pytest.approx((1e-3, 2e-3, 3e-3, 4e-3)),
    ]  # fmt: skip
    assert found.options == {"fp8_amax_history_len": 4}
    assert "Amaxes of weight: 1 layers" in printed(found)
