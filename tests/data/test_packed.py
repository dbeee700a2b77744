"""Packing: every token in its place, and the same samples as Megatron's."""

import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.data.indexed import import_megatron, open_indexed
from nemo_lowprec.data.packed import PackedDataset


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    seq_length=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_windows_of_the_shuffled_documents(build_indexed, tmp_path_factory, lengths, seq_length, seed):
    if sum(lengths) < seq_length + 1:
        return
    bounds = np.cumsum([0, *lengths])
    documents = [np.arange(*pair) for pair in pairwise(bounds)]
    prefix = build_indexed(tmp_path_factory.mktemp("packed") / "a", documents)
    dataset = PackedDataset(prefix, seq_length, seed)
    assert len(dataset) == (sum(lengths) - 1) // seq_length

    # Every token has its own id, so the windows show the order of the whole stream.
    windows = {}
    successor = {}
    for sample in (dataset[index] for index in range(len(dataset))):
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert len(ids) == len(labels) == seq_length
        assert ids[1:] == labels[:-1]
        successor.update(zip(ids, labels, strict=True))
        windows[ids[0]] = labels[-1]
    assert len(successor) == len(dataset) * seq_length
    (start,) = windows.keys() - windows.values()
    stream = [start]
    while stream[-1] in successor:
        stream.append(successor[stream[-1]])
    assert len(stream) == len(dataset) * seq_length + 1
    # The stream is whole documents one after another, but for the last one.
    order = []
    for token in stream:
        document = int(np.searchsorted(bounds, token, side="right")) - 1
        if not order or order[-1] != document:
            assert token == bounds[document]
            order.append(document)
    assert len(order) == len(set(order))
    taken = [token for document in order for token in documents[document].tolist()]
    assert stream == taken[: len(stream)]


@pytest.mark.parametrize("seq_length", [7, 64])
@pytest.mark.parametrize("seed", [0, 1234])
def test_samples_are_those_of_megatron(prepared, tmp_path, seq_length, seed):
    tokenizer = SimpleNamespace(vocab_size=300, eod=0, unique_identifiers={})
    gpt_dataset = import_megatron("datasets.gpt_dataset")
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prepared.train_prefix], None),
        split="1,0,0",
        path_to_cache=str(tmp_path),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    data = open_indexed(prepared.train_prefix)
    documents = np.arange(len(data), dtype=np.int32)
    split = import_megatron("datasets.utils").Split.train
    theirs = gpt_dataset.GPTDataset(data, prepared.train_prefix, documents, None, split, config)
    ours = PackedDataset(prepared.train_prefix, seq_length, seed)
    assert len(ours) == len(theirs)
    for index in range(len(ours)):
        expected = theirs[index]
        assert torch.equal(ours[index]["input_ids"], expected["tokens"])
        assert torch.equal(ours[index]["labels"], expected["labels"])


def test_samples_are_int64_and_do_not_share_memory(prepared):
    sample = PackedDataset(prepared.train_prefix, 16, vocab_size=300)[0]
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    assert sample["input_ids"].shape == sample["labels"].shape == (16,)
    sample["input_ids"].zero_()
    assert sample["labels"][:-1].any()


def test_the_seed_changes_the_order(prepared):
    first, same, other = (PackedDataset(prepared.train_prefix, 16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[i]["input_ids"], same[i]["input_ids"]) for i in range(len(first)))
    assert not all(torch.equal(first[i]["input_ids"], other[i]["input_ids"]) for i in range(len(first)))


def test_it_can_be_sent_to_a_spawned_worker(prepared):
    dataset = PackedDataset(prepared.train_prefix, 16)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[3]["labels"], dataset[3]["labels"])


def test_ids_beyond_the_vocabulary_are_refused(build_indexed, tmp_path):
    dataset = PackedDataset(build_indexed(tmp_path / "a", [[1, 2, 9, 3]]), 3, vocab_size=9)
    with pytest.raises(ValueError, match="has id 9, which is not below vocab_size=9"):
        dataset[0]


def test_too_little_data_is_refused(build_indexed, tmp_path):
    prefix = build_indexed(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(ValueError, match="has 3 tokens, and one sample of seq_length=3 takes 4"):
        PackedDataset(prefix, 3)
    with pytest.raises(ValueError, match="seq_length=0"):
        PackedDataset(prefix, 0)


@pytest.mark.parametrize("at", [0, 997, 1999])
def test_ids_beyond_the_vocabulary_are_found_before_training_where_samples_are_few(build_indexed, tmp_path, at):
    ids = [1] * 2001
    ids[at] = 50
    prefix = build_indexed(tmp_path / "a", [ids], np.int32)
    with pytest.raises(ValueError, match="a has id 50, which is not below vocab_size=50"):
        PackedDataset(prefix, 40, vocab_size=50).check_ids()
    with pytest.raises(ValueError, match="a has id 50"):
        TextDataModule(train_prefix=prefix, validation_prefix=prefix, vocab_size=50, seq_length=40).setup()
    PackedDataset(prefix, 40, vocab_size=51).check_ids()


def test_ids_below_zero_are_refused(build_indexed, tmp_path):
    prefix = build_indexed(tmp_path / "a", [[1, 2, -3, 4, 5]], np.int32)
    with pytest.raises(ValueError, match=r"a\.bin has id -3: ids are not negative"):
        PackedDataset(prefix, 2, vocab_size=10).check_ids()


def test_of_many_samples_those_that_were_not_looked_at_are_looked_at_when_they_come(build_indexed, tmp_path):
    ids = [1] * 10_001
    ids[3] = 50
    data = PackedDataset(build_indexed(tmp_path / "a", [[*ids[2:], *ids[:2]]], np.int32), 1, vocab_size=50)
    with pytest.raises(ValueError, match="has id 50"):
        for index in range(len(data)):
            data[index]
