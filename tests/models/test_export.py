"""A checkpoint of any level becomes safetensors that transformers loads, with the values that the run trained."""

import json
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import nemo_lowprec.models.export as module
from nemo_lowprec.chart import CHART
from nemo_lowprec.checkpoint.sharded_folder import open_folder
from nemo_lowprec.cli import main
from nemo_lowprec.models import CausalLM, export_checkpoint
from nemo_lowprec.models.cast import DTYPES, Cast
from nemo_lowprec.models.megatron_gpt import _read
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.weights import master_of
from tests.processes import on_processes
from tests.support import CASES, FP16_HALF, Net, loader, plugin, save_at, stored, trainer, values_of

ALL = [*CASES, *FP16_HALF]
SHARDED = [*CHART, "bf16_with_fp8_mixed+fp8_params", "msamp_o3+fp16"]
SOURCES = {
    "fp16_amp": "weights (FP32), the only copy",
    "te_fp8": "weights (FP32), the only copy",
    "msamp_o1": "weights (FP16), the only copy; norms, biases and other vectors FP32",
    "msamp_o2": "weights (FP16), the only copy; norms, biases and other vectors FP32",
    "msamp_o3": "master weights (FP16); other matrices are FP16, the only copy; norms, biases and other vectors FP32",
}
SIZES = {
    "llama_tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 1},
    "gpt2_tiny": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
}  # fmt: skip
IDS = torch.arange(32).view(2, 16) * 3 % 128


def small(preset="llama_tiny", **config):
    return CausalLM(preset, config={**SIZES[preset], **config}, vocab_size=128, lr=1e-2, min_lr=1e-3, warmup_steps=1)


def batches(rank=0):
    ids = torch.randint(0, 128, (2, 2, 16), generator=torch.Generator().manual_seed(rank))
    return DataLoader([{"input_ids": i, "labels": i.roll(-1, 1)} for i in ids], batch_size=None)


class Trained(Callback):
    """The values that the optimizer has trained: of masters, else of the parameters themselves."""

    def on_train_end(self, trainer, model):
        exact = lambda p: stored(p) if master_of(p) is None else values_of(master_of(p))  # noqa: E731
        self.values = {n.removeprefix("model."): exact(p).clone() for n, p in model.named_parameters()}


def fit(model, precision, folder, rank=0, **options):
    """Two steps, saved as folder/step=2.ckpt; returns that and the values."""
    trained = Trained()
    trainer(precision, trained, save_at(folder, 2), **{"max_steps": 2, **options}).fit(model, batches(rank))
    return folder / "step=2.ckpt", trained.values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def run(case, preset="llama_tiny", **config):
        key = (case, preset, *config.items())
        if key not in made:
            model = small(preset, **config)
            precision = plugin(case) if case else None
            made[key] = (*fit(model, precision, tmp_path_factory.mktemp("run")), model)
        return made[key]

    return run


@pytest.fixture
def checkpoint(runs):
    return runs("bf16_mixed")[0]


def loaded(out):
    """The exported model, every weight of which transformers found in the folder."""
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    return model


def metadata(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def changed(checkpoint, path, change):
    """A copy of a checkpoint's file, after ``change``."""
    tree = torch.load(checkpoint, weights_only=True)
    change(tree)
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL)
def test_transformers_loads_the_trained_values(runs, tmp_path, case, dtype):
    path, values, model = runs(case)
    found = export_checkpoint(path, tmp_path / "out", dtype)
    name = case.partition("+")[0]
    source = SOURCES.get(name, "master weights (FP32)")
    said = {"level": name, "source": source, "dtype": dtype}
    assert (found.level, found.source, found.dtype) == (name, source, dtype)
    assert metadata(tmp_path / "out" / "model.safetensors") == {
        "format": "pt", **{f"nemo_lowprec.{key}": value for key, value in said.items()}
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(DTYPES[dtype])[6:]
    got = loaded(tmp_path / "out")
    params = dict(got.named_parameters())
    assert params.keys() == values.keys()
    for key, value in values.items():
        assert params[key].dtype == DTYPES[dtype]
        assert torch.equal(params[key], value.to(DTYPES[dtype])), key
    assert found.parameters == sum(p.numel() for p in params.values())
    assert found.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    if dtype == "fp32":
        assert found.max_relative_error == 0
        with torch.no_grad():
            torch.testing.assert_close(got(IDS).logits, model.eval()(IDS))


@pytest.mark.parametrize("case", ["bf16_mixed", "bf16_with_fp8_mixed+fp8_params", "msamp_o3"])
def test_it_is_the_master_and_not_its_copy(runs, tmp_path, case):
    """What the weights would be if their copies were saved: BF16, FP8."""
    path, values, _ = runs(case)
    export_checkpoint(path, tmp_path / "out", "fp32")
    got = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(got, values["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize(("preset", "tied"), [("llama_tiny", True), ("llama_tiny", False), ("gpt2_tiny", True)])
def test_tied_weights_are_there_once(runs, tmp_path, preset, tied):
    path, _, model = runs("fp16_mixed", preset, tie_word_embeddings=tied)
    export_checkpoint(path, tmp_path / "out", "fp32")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied
    got = loaded(tmp_path / "out")
    embedding, head = got.get_input_embeddings().weight, got.get_output_embeddings().weight
    assert (embedding is head) == tied
    with torch.no_grad():
        torch.testing.assert_close(got(IDS).logits, model.eval()(IDS))


def test_tied_names_with_different_values_are_refused(checkpoint, tmp_path):
    def change(tree):
        tree["state_dict"]["model.lm_head.weight"] = tree["state_dict"]["model.lm_head.weight"] + 1

    path = changed(checkpoint, tmp_path / "x.ckpt", change)
    with pytest.raises(ValueError, match=r"other values for model\.lm_head\.weight than for .*embed_tokens"):
        export_checkpoint(path, tmp_path / "out")


def test_a_large_model_is_written_in_several_files(checkpoint, tmp_path, monkeypatch):
    export_checkpoint(checkpoint, tmp_path / "one", "fp32")
    monkeypatch.setattr(module, "_MAX_SHARD_SIZE", "20KB")
    found = export_checkpoint(checkpoint, tmp_path / "many", "fp32")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and found.bytes == sum(file.stat().st_size for file in files)
    assert set(json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"].values()) == {
        file.name for file in files
    }
    assert all(metadata(file)["nemo_lowprec.level"] == "bf16_mixed" for file in files)
    one, many = (loaded(tmp_path / name).state_dict() for name in ("one", "many"))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_the_tensors_are_aligned_as_safetensors_wants(checkpoint, tmp_path):
    export_checkpoint(checkpoint, tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0


def test_a_model_whose_layout_on_the_disk_is_another(tmp_path):
    """transformers keeps Mixtral's experts in one tensor, and in files one by one."""
    config = {**SIZES["llama_tiny"], "num_local_experts": 2, "num_experts_per_tok": 1}
    model = CausalLM(model_type="mixtral", config=config, vocab_size=128)
    path, _ = fit(model, None, tmp_path)
    found = export_checkpoint(path, tmp_path / "out", "fp32")
    assert any("experts.1." in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    got = loaded(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(got(IDS).logits, model.eval()(IDS))
    assert found.level is None and "names no level" in found.source


def test_a_checkpoint_of_weights_alone_names_no_level(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="x", every_n_train_steps=2, save_weights_only=True)
    trained = Trained()
    trainer(plugin("bf16_mixed"), trained, saving, max_steps=2).fit(small(), batches())
    found = export_checkpoint(tmp_path / "x.ckpt", tmp_path / "out", "fp32")
    assert found.level is None and "save_weights_only" in found.source
    assert metadata(tmp_path / "out" / "model.safetensors")["nemo_lowprec.level"] == "unknown"
    for name, value in loaded(tmp_path / "out").named_parameters():
        assert torch.equal(value, trained.values[name])


def test_generation_uses_its_cache(runs, tmp_path):
    export_checkpoint(runs("bf16_mixed")[0], tmp_path / "out")
    assert loaded(tmp_path / "out").config.use_cache is True
    path, _, _ = runs("bf16_mixed", use_cache=False)
    export_checkpoint(path, tmp_path / "off")
    assert loaded(tmp_path / "off").config.use_cache is False


def test_another_module_becomes_bare_safetensors(tmp_path, capsys):
    net = Net()
    net.again = net.mid  # tied
    trainer(plugin("msamp_o2"), save_at(tmp_path, 2), max_steps=2).fit(net, loader())
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    for dtype in DTYPES:
        found = export_checkpoint(tmp_path / "step=2.ckpt", tmp_path / dtype, dtype)
        assert found.architecture is None and found.level == "msamp_o2"
        got = load_file(tmp_path / dtype / "model.safetensors")
        assert got.keys() == saved.keys()
        assert all(torch.equal(got[name], saved[name].to(DTYPES[dtype])) for name in saved)
        assert metadata(tmp_path / dtype / "model.safetensors")["nemo_lowprec.source"] == SOURCES["msamp_o2"]
    found.print_table()
    assert "module's own names" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    with pytest.raises(ValueError, match="of no CausalLM"):
        export_checkpoint(tmp_path / "step=2.ckpt", tmp_path / "y", tokenizer=tmp_path)


def test_the_tokenizer_goes_with_it(data_dir, tmp_path, capsys):
    model = CausalLM("llama_tiny", config=SIZES["llama_tiny"], vocab_size=400)
    path, _ = fit(model, None, tmp_path)
    want = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    export_checkpoint(path, tmp_path / "one", tokenizer=data_dir)
    export_checkpoint(path, tmp_path / "two", tokenizer=data_dir / "tokenizer.json")
    again = export_checkpoint(path, tmp_path / "three", tokenizer=tmp_path / "one")  # transformers' own files
    for name in ("one", "two", "three"):
        got = AutoTokenizer.from_pretrained(tmp_path / name)
        text = "Chapter 3. word1 überträge"
        assert got(text)["input_ids"] == want.encode(text).ids and got.decode(got(text)["input_ids"]) == text
        assert got.eos_token == "<|endoftext|>"
        config = loaded(tmp_path / name)
        assert config.config.eos_token_id == config.generation_config.eos_token_id == got.eos_token_id == 0
    assert again.tokenizer
    export_checkpoint(path, tmp_path / "none").print_table()
    assert "--tokenizer writes it" in capsys.readouterr().out


def test_a_tokenizer_that_does_not_fit_is_refused(checkpoint, data_dir, tmp_path):
    with pytest.raises(ValueError, match=r"has \d+ ids, more than the model's 128"):
        export_checkpoint(checkpoint, tmp_path / "out", tokenizer=data_dir)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "nowhere.json", tmp_path / "bad"):
        with pytest.raises(ValueError, match=r"no tokenizer\.json that can be read"):
            export_checkpoint(checkpoint, tmp_path / "out", tokenizer=path)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


# Rounding


def test_rounding_is_measured():
    cast = Cast("fp16")
    values = torch.tensor([1.0, 1 + 2**-11, 3e-9, -0.0, 0.0, float("inf"), float("nan"), 65504.0])
    got = cast("x", values)
    assert torch.equal(got.nan_to_num(7), values.half().nan_to_num(7)) and got.dtype == torch.float16
    assert cast.max_relative_error == pytest.approx(2**-11, rel=1e-3)  # halfway, to even: down
    assert (cast.underflows, cast.not_finite, cast.found) == (1, 2, {"FP32": 8})
    cast = Cast("bf16")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 100, generator=generator)
    assert torch.equal(cast("y", values.t()), values.t().bfloat16())
    assert cast.max_relative_error == float(((values.bfloat16().float() - values) / values).abs().max())
    counts = torch.arange(3)
    assert cast("counts", counts) is counts
    assert Cast("fp32")("z", values) is values


def test_values_are_compared_piece_by_piece(monkeypatch):
    whole, pieces = Cast("bf16"), Cast("bf16")
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    one = whole("x", values)
    monkeypatch.setattr("nemo_lowprec.models.cast._CHUNK", 10)
    assert torch.equal(pieces("x", values), one)
    assert pieces.max_relative_error == whole.max_relative_error > 0


@pytest.mark.parametrize(
    ("dtype", "value", "way_out"),
    [("fp16", 65520.0, "--dtype bf16"), ("bf16", 3.4e38, "--dtype fp32"), ("fp16", 3.4e38, "--dtype fp32")],
)
def test_a_value_beyond_the_largest_is_refused(checkpoint, tmp_path, dtype, value, way_out):
    def change(tree):
        tree["state_dict"]["model.model.norm.weight"][3] = -value

    path = changed(checkpoint, tmp_path / "x.ckpt", change)
    with pytest.raises(ValueError, match=rf"model\.model\.norm\.weight reaches .*beyond .*{dtype.upper()}.*{way_out}"):
        export_checkpoint(path, tmp_path / "out", dtype)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))
    export_checkpoint(path, tmp_path / "out", way_out.split()[1])
    assert loaded(tmp_path / "out").model.norm.weight[3] == torch.tensor(-value).to(DTYPES[way_out.split()[1]])


def test_the_largest_of_fp16_is_exported(checkpoint, tmp_path):
    def change(tree):
        tree["state_dict"]["model.model.norm.weight"][3] = 65519.0  # rounds down

    export_checkpoint(changed(checkpoint, tmp_path / "x.ckpt", change), tmp_path / "out", "fp16")
    assert loaded(tmp_path / "out").model.norm.weight[3] == 65504


def test_values_that_are_not_finite_are_said(checkpoint, tmp_path, capsys):
    def change(tree):
        tree["state_dict"]["model.model.norm.weight"][:2] = torch.tensor([float("nan"), float("inf")])

    path = changed(checkpoint, tmp_path / "x.ckpt", change)
    for dtype in DTYPES:
        found = export_checkpoint(path, tmp_path / dtype, dtype)
        assert found.not_finite == 2
    found.print_table()
    assert "2 elements, as in the checkpoint" in capsys.readouterr().out


def test_bare_fp8_is_refused(tmp_path):
    torch.save({"state_dict": {"w": torch.ones(4).to(torch.float8_e4m3fn)}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"w is torch\.float8_e4m3fn: bare FP8"):
        export_checkpoint(tmp_path / "x.ckpt", tmp_path / "out")


# What is refused


def test_what_was_there_is_left_alone(checkpoint, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        with pytest.raises(ValueError, match="exists and is not empty"):
            export_checkpoint(checkpoint, taken)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_checkpoint(checkpoint, tmp_path / "empty")
    export_checkpoint(checkpoint, tmp_path / "deep" / "er")
    assert loaded(tmp_path / "empty").dtype == loaded(tmp_path / "deep" / "er").dtype == torch.bfloat16


def test_an_export_that_is_killed_leaves_nothing_under_the_name(checkpoint, tmp_path, monkeypatch):
    def killed(*arguments):
        assert list(tmp_path.glob(".out.*.part/model.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_sync", killed)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [100, 0.5, 0.99])
def test_a_file_that_was_cut_short(checkpoint, tmp_path, keep):
    data = checkpoint.read_bytes()
    (tmp_path / "x.ckpt").write_bytes(data[: keep if keep > 1 else int(len(data) * keep)])
    with pytest.raises(ValueError, match="no complete checkpoint"):
        export_checkpoint(tmp_path / "x.ckpt", tmp_path / "out")


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.ckpt does not exist"):
        export_checkpoint(tmp_path / "nowhere.ckpt", tmp_path / "out")
    for i, tree in enumerate(({"a": torch.ones(1)}, torch.ones(1), {"state_dict": 3})):
        torch.save(tree, tmp_path / f"{i}.pt")
        with pytest.raises(ValueError, match="no checkpoint of a LightningModule"):
            export_checkpoint(tmp_path / f"{i}.pt", tmp_path / "out")
    torch.save({"state_dict": {"w": torch.ones(1), "w._extra_state": {"a": 1}}}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"holds w\._extra_state among its weights"):
        export_checkpoint(tmp_path / "x.pt", tmp_path / "out")
    torch.save({"state_dict": {}, "hyper_parameters": {"made_by": Net}}, tmp_path / "y.pt")
    with pytest.raises(ValueError, match=r"holds tests\.support\.Net beside .*add_safe_globals"):
        export_checkpoint(tmp_path / "y.pt", tmp_path / "out")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="no complete sharded checkpoint"):
        export_checkpoint(tmp_path / "folder", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["state_dict"].update(value_head=torch.ones(2)), "holds value_head, which a LlamaFor"),
        (lambda tree: tree["state_dict"].pop("model.model.norm.weight"), "lacks model.model.norm.weight of its Llama"),
        (
            lambda tree: tree["hyper_parameters"]["config"].update(intermediate_size=96),
            r"gate_proj\.weight is \(64, 32\) in .* and \(96, 32\) in the Llama",
        ),
        (lambda tree: tree["hyper_parameters"].update(preset="llama_7t"), "Unknown model preset 'llama_7t'"),
    ],
)
def test_weights_that_are_not_the_architecture_s(checkpoint, tmp_path, change, message):
    path = changed(checkpoint, tmp_path / "x.ckpt", change)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Several processes


class BothForms(Trained):
    """Saves a sharded run's weights in a folder and in a file."""

    def __init__(self, place):
        self.place = place

    def on_train_end(self, trainer, model):
        for form in ("folder", "file"):
            trainer.strategy._save_distributed_checkpoint = form == "folder"
            trainer.save_checkpoint(self.place / form)


def in_every_form(rank, place):
    """Each level's two steps on two processes, sharded and (at each row of the chart) by ddp; what ddp has trained."""
    trained = {}
    options = {"max_steps": 2, "devices": 2, "use_distributed_sampler": False}
    for case in SHARDED:
        both = BothForms(place / case)
        trainer(plugin(case), both, strategy=LowPrecisionShardedStrategy(), **options).fit(small(), batches(rank))
        if case in CHART:
            _, trained[case] = fit(small(), plugin(case), place / case / "ddp", rank, strategy="ddp", **options)
    return trained


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), in_every_form, place)[0]


def exported(path, out, dtype="bf16"):
    export_checkpoint(path, out, dtype)
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.mark.parametrize("case", SHARDED)
def test_a_folder_gives_the_same_bytes_as_a_file(trained, place, tmp_path, case):
    assert (place / case / "folder").is_dir() and (place / case / "file").is_file()
    for dtype in ("bf16", "fp32"):
        folder = exported(place / case / "folder", tmp_path / f"folder-{dtype}", dtype)
        assert folder == exported(place / case / "file", tmp_path / f"file-{dtype}", dtype)
        assert folder.keys() == {"checksums.json", "config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("case", CHART)
def test_ddp_and_sharded_have_trained_the_same_model(trained, place, tmp_path, case):
    exported(place / case / "ddp" / "step=2.ckpt", tmp_path / "ddp", "fp32")
    exported(place / case / "folder", tmp_path / "sharded", "fp32")
    ddp, sharded = (dict(loaded(tmp_path / name).named_parameters()) for name in ("ddp", "sharded"))
    initial = small()
    initial.configure_model()
    moved = []
    for name, start in initial.model.named_parameters():
        assert torch.equal(ddp[name], trained[case][name].float()), name
        moved += [torch.stack([ddp[name] - start, sharded[name] - start]).flatten(1)]
    alike = torch.nn.functional.cosine_similarity(*torch.cat(moved, 1), dim=0)
    # NVFP4 rounds gradients up or down at random, on each process differently.
    assert alike > (0.8 if case == "bf16_with_nvfp4_mixed" else 0.9999)


@pytest.fixture
def folder(trained, place, tmp_path):
    return shutil.copytree(place / "msamp_o2" / "folder", tmp_path / "sharded")


def test_optimizer_states_are_not_read(folder, tmp_path):
    before = exported(folder, tmp_path / "before")
    from torch.distributed.checkpoint import FileSystemReader

    metadata, destroyed = FileSystemReader(folder).read_metadata(), 0
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("optimizer."):
            with (folder / info.relative_path).open("r+b") as file:
                file.seek(info.offset)
                file.write(b"\xff" * info.length)
            destroyed += info.length
    assert destroyed
    assert exported(folder, tmp_path / "after") == before


def test_a_folder_is_read_piece_by_piece(folder, tmp_path, monkeypatch):
    before = exported(folder, tmp_path / "before")
    monkeypatch.setattr("nemo_lowprec.checkpoint.sharded_folder._READ_AT_ONCE", 5000)
    assert exported(folder, tmp_path / "after") == before


@pytest.mark.parametrize("harm", ["meta.pt", ".metadata", "missing", "short"])
def test_a_folder_that_is_incomplete(folder, tmp_path, harm):
    part = folder / "__1_0.distcp"
    if harm == "short":
        part.write_bytes(part.read_bytes()[:-2000])
        part.with_name("__0_0.distcp").write_bytes(b"")
    else:
        (part if harm == "missing" else folder / harm).unlink()
    with pytest.raises(ValueError, match=r"incomplete|no complete sharded checkpoint"):
        export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_s_weights_are_described_without_being_read(folder):
    rest, tensors = open_folder(folder)
    assert "optimizer_states" not in rest and rest["LowPrecision"]["level"] == "msamp_o2"
    assert all(t.is_meta for t in tensors.values())
    assert tuple(tensors["model.model.norm.weight"].shape) == (32,)


# The command


def test_command(checkpoint, tmp_path, capsys):
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    printed = capsys.readouterr().out
    assert "bf16_mixed" in printed and "master weights (FP32)" in printed and "FP16" in printed
    assert loaded(tmp_path / "out").dtype == torch.float16
    assert main(["export", str(checkpoint), str(tmp_path / "default")]) == 0
    assert loaded(tmp_path / "default").dtype == torch.bfloat16
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "exists and is not empty" in error and "Traceback" not in error
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(checkpoint), str(tmp_path / "x"), "--dtype", "fp8"])
    assert stopped.value.code == 2
    with pytest.raises(ValueError, match="dtype='fp8' must be one of bf16, fp16, fp32"):
        export_checkpoint(checkpoint, tmp_path / "x", "fp8")


def test_an_exported_folder_that_is_not_what_was_written_is_refused(checkpoint, tmp_path):
    out = tmp_path / "out"
    export_checkpoint(checkpoint, out)
    _read(out)
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 16  # in a tensor: safetensors itself sees nothing
    file.write_bytes(bytes(data))
    load_file(file)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        _read(out)
    (out / "checksums.json").unlink()  # of another program
    _read(out)
