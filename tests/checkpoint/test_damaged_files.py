"""A checkpoint in one file that is not what was written is refused in one sentence, wherever it is opened."""

import os
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from nemo_lowprec.checkpoint.torch_zip import check_file, load
from nemo_lowprec.cli import main
from nemo_lowprec.models import CausalLM
from nemo_lowprec.models.export import export_checkpoint
from nemo_lowprec.plugins.checkpoint_io import AtomicCheckpointIO
from nemo_lowprec.train import pretrain
from tests.checkpoint.damage import BIT_FLIPS, HARMS, copied, flip, member_at, sprung
from tests.models.test_train import parts
from tests.processes import on_processes
from tests.support import CASES, Net, loader, plugin, save_at, train, trainer

LEVEL = "msamp_o2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    train(Net(), LEVEL, save_at(folder, 1), max_steps=1)
    return folder / "step=1.ckpt"


def fit(path, folder, case=LEVEL):
    model = Net()
    try:
        trainer(plugin(case), max_steps=2).fit(model, loader(), ckpt_path=path)
    finally:
        assert not model.losses


def evaluated(stage):
    return lambda path, folder: getattr(trainer(plugin(LEVEL)), stage)(Net(), loader(), ckpt_path=path)


FACES = {
    "fit": fit,
    **{stage: evaluated(stage) for stage in ("validate", "test", "predict")},
    "export": lambda path, folder: export_checkpoint(path, folder / "out"),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("harm", HARMS)
def test_one_sentence_names_the_file(checkpoint, tmp_path, harm, face):
    path = copied(checkpoint, tmp_path / "harmed")
    spoil, message = HARMS[harm]
    spoil(path)
    with pytest.raises(ValueError, match=message) as found:
        FACES[face](path, tmp_path)
    assert str(path) in str(found.value) and "\n" not in str(found.value)
    assert not sprung(path.parent).exists() and not (tmp_path / "out").exists()
    assert type(found.value) is ValueError


@pytest.mark.parametrize("case", CASES)
def test_every_level_refuses_a_flipped_bit(checkpoint, tmp_path, case):
    path = copied(checkpoint, tmp_path)
    BIT_FLIPS["a bit of a tensor"][0](path)
    with pytest.raises(ValueError, match="is damaged"):
        fit(path, tmp_path, case)


def test_a_file_that_this_user_may_not_read(checkpoint):
    if os.geteuid():
        pytest.skip("needs another user to be")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    path = copied(checkpoint, folder)
    path.chmod(0)
    os.seteuid(65534)
    try:
        for face in ("fit", "test", "export"):
            with pytest.raises(ValueError, match=r"x\.ckpt cannot be read: Permission denied"):
                FACES[face](path, folder)
    finally:
        os.seteuid(0)


def test_the_tensor_is_named(checkpoint, tmp_path):
    whole = torch.load(checkpoint, weights_only=True)
    names = {f"state_dict.{name}" for name in whole["state_dict"]}
    for state in whole["optimizer_states"]:
        names |= {f"optimizer_states.0.state.{i}.{key}" for i, s in state["state"].items() for key in s}
    rest = {"LowPrecision.rng.0.torch", "LowPrecision.rng.0.numpy.1"}
    found = set()
    with zipfile.ZipFile(checkpoint) as file:
        members = [info for info in file.infolist() if "/data/" in info.filename and info.file_size]
    for info in members:
        path = copied(checkpoint, tmp_path)
        flip(path, member_at(path.read_bytes(), info))
        with pytest.raises(ValueError, match=r"damaged: .+ is not what was written") as error:
            check_file(path)
        found.add(str(error.value).partition("damaged: ")[2].split()[0])
    assert {n for n in found if n.startswith(("state_dict", "optimizer_states"))} == names
    assert rest <= found


def test_each_bit_that_is_not_padding_counts(tmp_path):
    """What opens after a flip is what was written."""
    path, tree = tmp_path / "a", {"state_dict": {"w": torch.randn(20), "v": torch.ones(3)}, "step": 7}
    torch.save(tree, path)
    data = path.read_bytes()
    refused = 0
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            opened = load(path)
        except ValueError:
            refused += 1
            continue
        assert opened["step"] == 7 and all(
            torch.equal(opened["state_dict"][k], v) for k, v in tree["state_dict"].items()
        )
    assert refused > len(data) / 20


def test_an_export_reads_no_optimizer_states(checkpoint, tmp_path):
    with zipfile.ZipFile(checkpoint) as file:
        members = [info for info in file.infolist() if "/data/" in info.filename]
    for info in members:
        path = copied(checkpoint, tmp_path)
        flip(path, member_at(path.read_bytes(), info))
        with pytest.raises(ValueError, match="is damaged") as found:
            check_file(path)
        if "optimizer_states" in str(found.value):
            break
    export_checkpoint(path, tmp_path / "out")


def test_files_without_checksums_and_of_plain_lightning_open(checkpoint, tmp_path):
    plain = tmp_path / "plain"
    train(Net(), None, save_at(plain, 1), max_steps=1)
    fit_on = trainer(plugin(LEVEL), max_steps=2)
    fit_on.fit(Net(), loader(), ckpt_path=plain / "step=1.ckpt")
    assert fit_on.global_step == 2
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(checkpoint, weights_only=True), tmp_path / "x.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "x.ckpt") as file:
        assert not any(info.CRC for info in file.infolist())
    fit_on = trainer(plugin(LEVEL), max_steps=2)
    fit_on.fit(Net(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert fit_on.global_step == 2


def test_a_trainer_without_a_level_stays_lightnings(checkpoint, tmp_path):
    seen = []

    class Looks(SingleDeviceStrategy):
        def _look(self):
            found = SingleDeviceStrategy.checkpoint_io.fget(self)
            seen.append(type(found))
            return found

        checkpoint_io = property(_look, SingleDeviceStrategy.checkpoint_io.fset)

    for level, own in ((None, TorchCheckpointIO), (plugin(LEVEL), AtomicCheckpointIO)):
        strategy = Looks(torch.device("cpu"))
        seen.clear()
        trainer(level, strategy=strategy, max_steps=2).fit(Net(), loader(), ckpt_path=checkpoint)
        assert set(seen) == {TorchCheckpointIO, own}
    path = copied(checkpoint, tmp_path)
    BIT_FLIPS["a bit of a tensor"][0](path)
    trainer(None, max_steps=2).fit(Net(), loader(), ckpt_path=path)  # as ever


def test_lightnings_asynchronous_files_are_checked_too(checkpoint, tmp_path):
    train(Net(), [plugin(LEVEL), AsyncCheckpointIO()], save_at(tmp_path, 1), max_steps=1)
    path = copied(tmp_path / "step=1.ckpt", tmp_path / "harmed")
    BIT_FLIPS["a bit of a tensor"][0](path)
    with pytest.raises(ValueError, match="is damaged"):
        trainer([plugin(LEVEL), AsyncCheckpointIO()], max_steps=2).fit(Net(), loader(), ckpt_path=path)


def test_objects_that_the_user_trusts_open(checkpoint, tmp_path):
    tree = torch.load(checkpoint, weights_only=True)
    torch.save({**tree, "hyper_parameters": {"made_by": Path}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"holds pathlib\S*Path beside tensors"):
        fit(tmp_path / "x.ckpt", tmp_path)
    fit_on = trainer(plugin(LEVEL), max_steps=2)
    fit_on.fit(Net(), loader(), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert fit_on.global_step == 2


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("harm", ["a bit of a tensor", "cut short", "a pipe", "a folder"])
def test_pretrain_and_the_command_say_it(data_dir, checkpoint, tmp_path, harm, capsys, monkeypatch):
    path = copied(checkpoint, tmp_path / "harmed")
    HARMS[harm][0](path)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        pretrain(**parts(data_dir, tmp_path), ckpt_path=str(path))
    monkeypatch.chdir(tmp_path)
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = [
        "+model.config={" + ",".join(f"{k}:{v}" for k, v in tiny.items()) + ",num_key_value_heads:1}", "data=megatron",
        "data.seq_length=32", "data.num_workers=0", f"data.train_prefix={data_dir / 'train'}",
        f"data.validation_prefix={data_dir / 'validation'}", "trainer.accelerator=cpu", "trainer.max_steps=2",
        f"ckpt_path='{path}'", "precision=msamp_o2",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["pretrain", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert str(path) in error[-1] and error[-1].startswith("nemo-lowprec pretrain: ")
    assert not any("Traceback" in line for line in error)


@pytest.mark.parametrize("harm", ["a bit of a tensor", "cut short", "a pipe", "code, protocol 2"])
def test_a_causal_lm_that_loads_its_weights(data_dir, tmp_path, harm):
    made = parts(data_dir, tmp_path, max_steps=1)
    pretrain(**made)
    again = CausalLM.load_from_checkpoint(tmp_path / "last.ckpt")
    assert all(torch.equal(p, made["model"].state_dict()[name]) for name, p in again.state_dict().items())
    path = copied(tmp_path / "last.ckpt", tmp_path / "harmed")
    spoil, message = HARMS[harm]
    spoil(path)
    with pytest.raises(ValueError, match=message):
        CausalLM.load_from_checkpoint(path)
    assert not sprung(path.parent).exists()


def of_ddp(rank, path, folder):
    """The message of each strategy of two processes, for a flipped bit."""
    found = {}
    for strategy in ("ddp", "lowprec_ddp", "lowprec_sharded"):
        for stage in ("fit", "test"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(ValueError, match=r"state_dict\.\S+ is not what was written") as error:
                    run = trainer(plugin(LEVEL), devices=2, strategy=strategy, max_steps=2)
                    getattr(run, stage)(Net(), loader(), ckpt_path=path)
            found[f"{strategy} {stage}"] = str(error.value)
    return found


def test_all_processes_refuse_it(checkpoint, tmp_path):
    path = copied(checkpoint, tmp_path / "harmed")
    with zipfile.ZipFile(path) as file:
        first = next(info for info in file.infolist() if info.filename.endswith("/data/0"))
    flip(path, member_at(path.read_bytes(), first))
    one, other = on_processes(2, tmp_path, of_ddp, path, tmp_path)
    assert one == other and len(one) == 6


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_remote_file_is_checked_too(checkpoint, stage):
    import fsspec

    url = f"memory://checkpoints/{stage}.ckpt"
    data = bytearray(checkpoint.read_bytes())
    run = lambda: getattr(trainer(plugin(LEVEL), max_steps=2), stage)(Net(), loader(), ckpt_path=url)  # noqa: E731
    with fsspec.open(url, "wb") as file:
        file.write(bytes(data))
    run()
    data[len(data) // 2] ^= 16
    with fsspec.open(url, "wb") as file:
        file.write(bytes(data))
    with pytest.raises(ValueError, match=f"^{url} is damaged"):
        run()
