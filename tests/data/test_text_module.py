"""The data module: preparing by itself, its arguments, and what it exposes."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from nemo_lowprec.data.indexed import open_indexed
from nemo_lowprec.data.module import TextDataModule
from nemo_lowprec.data.prepare import is_prepared, prepare_data

SMALL = {"vocab_size": 300, "seq_length": 16, "micro_batch_size": 4, "validation_fraction": 0.2}


class Model(BoringModel):
    """Reads batches and trains on their mean."""

    def step(self, batch):
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
        return self.layer(batch["input_ids"].float().repeat(1, 2)).mean()

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        return {"x": self.step(batch)}

    def test_step(self, batch, batch_idx):
        self.step(batch)
        assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < self.trainer.datamodule.vocab_size
        self.log("test/samples", float(len(batch["input_ids"])), reduce_fx="sum")


def trainer(folder):
    return Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def test_a_trainer_prepares_what_is_missing(corpus, tmp_path):
    data = TextDataModule(tmp_path / "new", corpus, validation_samples=8, **SMALL)
    assert data.vocab_size == 300
    with pytest.raises(ValueError, match="call prepare_data"):
        _ = data.tokenizer
    trainer(tmp_path).fit(Model(), data)
    assert is_prepared(tmp_path / "new")
    assert data.vocab_size == data.tokenizer.get_vocab_size() <= 300
    assert len(data.val_dataloader()) == 2
    (metrics,) = trainer(tmp_path).test(Model(), data, verbose=False)
    assert metrics == {"test/samples": 8}  # the validation samples, every one of them


def test_batches_are_shifted_text(corpus, prepared):
    data = TextDataModule(prepared.path, corpus, **SMALL)
    data.prepare_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert int(batch["labels"].max()) < data.vocab_size
    everything = "".join(
        data.tokenizer.decode(ids, skip_special_tokens=False) for ids in open_indexed(prepared.train_prefix)
    )
    body = data.tokenizer.decode(batch["input_ids"][0].tolist(), skip_special_tokens=False)
    assert body.strip("\ufffd").split("<|endoftext|>")[0] in everything


def test_data_of_megatron_are_used_in_place(build_indexed, tmp_path):
    train = build_indexed(tmp_path / "theirs_train", [list(range(50))] * 9)
    validation = build_indexed(tmp_path / "theirs_validation", [list(range(50))] * 3)
    prefixes = {"train_prefix": train, "validation_prefix": validation}
    sizes = {"seq_length": 16, "micro_batch_size": 4}
    with pytest.raises(ValueError, match=r"no tokenizer\.json beside train_prefix"):
        TextDataModule(**prefixes, **sizes)
    data = TextDataModule(tmp_path / "unused", vocab_size=50, **prefixes, **sizes)
    trainer(tmp_path).fit(Model(), data)
    assert data.vocab_size == 50
    assert not (tmp_path / "unused").exists()
    small = TextDataModule(vocab_size=49, **prefixes, **sizes)
    with pytest.raises(ValueError, match="has id 49"):
        list(small.train_dataloader())


def test_the_tokenizer_beside_existing_data_is_found(prepared):
    data = TextDataModule(train_prefix=prepared.train_prefix, validation_prefix=prepared.validation_prefix)
    assert data.vocab_size == prepared.vocab_size


def test_what_is_left_out_is_as_the_data_were_prepared(corpus, tmp_path):
    options = {"vocab_size": 300, "validation_fraction": 0.3, "seed": 5, "max_bytes": 20_000}
    prepared = prepare_data(tmp_path / "out", corpus, **options)
    data = TextDataModule(prepared.path, corpus, seq_length=16, micro_batch_size=4, seed=1)
    assert data.vocab_size == prepared.vocab_size  # a model may be made before the data are set up
    data.prepare_data()
    data.setup()
    assert data.prepared.record == prepared.record and data.seed == 1
    new = TextDataModule(tmp_path / "new", corpus)
    (tmp_path / "new").mkdir()
    assert new.vocab_size == 8192


def test_data_prepared_otherwise_are_refused_before_training(prepared, corpus):
    data = TextDataModule(prepared.path, corpus, **{**SMALL, "vocab_size": 400})
    with pytest.raises(ValueError, match="vocab_size is 300 there and 400 now"):
        data.prepare_data()


def test_too_long_a_sequence_is_refused_in_setup(prepared, corpus):
    data = TextDataModule(prepared.path, corpus, **{**SMALL, "seq_length": 10**6})
    with pytest.raises(ValueError, match="pass a shorter seq_length"):
        data.setup()


@pytest.mark.parametrize(
    "bad",
    [
        {"vocab_size": 256},
        {"seq_length": 0},
        {"micro_batch_size": 0},
        {"num_workers": -1},
        {"seed": -1},
        {"validation_fraction": 1.5},
        {"max_bytes": 0},
        {"validation_samples": 0},
    ],
)
def test_bad_values_are_named_at_construction(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}="):
        TextDataModule(**bad)


def test_arguments_that_exclude_each_other():
    with pytest.raises(ValueError, match="both train_prefix and validation_prefix"):
        TextDataModule(train_prefix="a")
    with pytest.raises(ValueError, match="one or the other"):
        TextDataModule(train_prefix="a", validation_prefix="b", source="c")


def test_validating_a_checkpoint_does_not_move_training(prepared, corpus, tmp_path):
    data = TextDataModule(prepared.path, corpus, **SMALL)
    first = trainer(tmp_path)
    first.fit(Model(), data)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    assert data.state_dict()["position"]["taken"] == 12
    fresh = TextDataModule(prepared.path, corpus, **SMALL)
    options = {"ckpt_path": tmp_path / "saved.ckpt", "verbose": False, "weights_only": False}
    trainer(tmp_path).validate(Model(), fresh, **options)
    assert fresh.train_dataloader().state_dict()["taken"] == 0


def test_the_seed_reorders_training_and_not_validation(prepared):
    def samples(seed):
        data = TextDataModule(
            train_prefix=prepared.train_prefix, validation_prefix=prepared.validation_prefix, vocab_size=300,
            seq_length=16, micro_batch_size=4, seed=seed, validation_samples=8,
        )  # fmt: skip
        data.setup("fit")
        train, validation = (next(iter(d))["input_ids"] for d in (data.train_dataloader(), data.val_dataloader()))
        return train, validation

    (train, validation), (other_train, other_validation) = samples(0), samples(5)
    assert validation.equal(other_validation) and not train.equal(other_train)
