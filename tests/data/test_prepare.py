"""The prepared folder: its contents, and when it is used again or refused."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_lowprec.cli import main
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.data.corpus import list_documents, split_documents
from nemo_lowprec.data.indexed import open_indexed
from nemo_lowprec.data.prepare import is_prepared, open_prepared, prepare_data

ARGUMENTS = {"vocab_size": 300, "validation_fraction": 0.2}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_texts_come_back_and_every_document_has_one_end(prepared, corpus):
    tokenizer = prepared.load_tokenizer()
    split = split_documents(list_documents(corpus), 0.2, seed=0)
    for prefix, documents in zip((prepared.train_prefix, prepared.validation_prefix), split, strict=True):
        data = open_indexed(prefix)
        assert len(data) == len(documents)
        for ids, document in zip(data, documents, strict=True):
            assert ids.dtype == "uint16"
            assert list(ids).count(prepared.end_of_document) == 1
            assert ids[-1] == prepared.end_of_document
            assert ids.max() < prepared.vocab_size
            assert tokenizer.decode(ids[:-1]) == document.read()
        assert list(data.document_indices) == list(range(len(documents) + 1))


def test_record_counts_what_is_there(prepared):
    data = open_indexed(prepared.train_prefix)
    assert prepared.tokens["train"] == sum(len(ids) for ids in data)
    assert prepared.record["train"]["documents"] == len(data)
    assert prepared.record["arguments"]["vocab_size"] == 300
    assert prepared.vocab_size == prepared.load_tokenizer().get_vocab_size() <= 300


def test_transformers_reads_the_tokenizer(prepared):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(prepared.tokenizer_path))
    text = "for überträge in range:\r\n\tprint(次元)"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == prepared.end_of_document


def test_same_input_gives_the_same_files_in_another_process(prepared, corpus, tmp_path):
    code = (
        "import sys; from nemo_lowprec.data import prepare_data; "
        "prepare_data(sys.argv[1], sys.argv[2], vocab_size=300, validation_fraction=0.2)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "again"), str(corpus)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert contents(tmp_path / "again") == contents(prepared.path)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_the_characters_of_the_end_of_a_document_are_not_one(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_text(f"{number} <|endoftext|> goes on")
    prepared = prepare_data(tmp_path / "out", source, **ARGUMENTS)
    for ids in open_indexed(prepared.train_prefix):
        assert list(ids).count(prepared.end_of_document) == 1
        assert prepared.load_tokenizer().decode(ids[:-1]).endswith("<|endoftext|> goes on")


def test_the_tokenizer_is_trained_on_training_documents_only(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_text("common words " * 5)
    _, validation = split_documents(list_documents(source), 0.2, seed=0)
    for document in validation:
        document.path.write_text("zebra " * 50)
    vocabulary = prepare_data(tmp_path / "out", source, **ARGUMENTS).load_tokenizer().get_vocab()
    assert "Ġwords" in vocabulary
    assert not any("zeb" in token for token in vocabulary)


def test_standard_library_in_part(tmp_path):
    prepared = prepare_data(tmp_path / "out", vocab_size=1024, max_bytes=600_000, seed=1)
    documents = sum(prepared.record[split]["documents"] for split in ("train", "validation"))
    assert documents > 10
    tokens = sum(prepared.tokens.values())
    assert 600_000 / 8 < tokens < 600_000 / 2
    source = [
        document.read()
        for document in list_documents(None)
        if document.size < 600_000 and document.name.endswith(".py")
    ]
    tokenizer = prepared.load_tokenizer()
    for ids in open_indexed(prepared.validation_prefix):
        assert tokenizer.decode(ids[:-1]) in source


def test_a_folder_of_the_same_arguments_is_used_again(prepared, corpus, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in prepared.path.iterdir()}
    assert prepare_data(prepared.path, corpus, **ARGUMENTS) == prepared
    assert {path: path.stat().st_mtime_ns for path in prepared.path.iterdir()} == before
    assert is_prepared(prepared.path)
    assert open_prepared(prepared.path) == prepared
    assert not is_prepared(tmp_path)


def test_other_arguments_are_refused_by_name(prepared, corpus):
    before = contents(prepared.path)
    with pytest.raises(ValueError, match=r"vocab_size is 300 there and 400 now.*pass a new folder"):
        prepare_data(prepared.path, corpus, vocab_size=400, validation_fraction=0.2)
    with pytest.raises(ValueError, match="seed is 0 there and 3 now"):
        prepare_data(prepared.path, corpus, seed=3, **ARGUMENTS)
    with pytest.raises(ValueError, match=r"source is .* there and None now"):
        prepare_data(prepared.path, **ARGUMENTS)
    assert contents(prepared.path) == before


def test_a_changed_source_is_noticed_and_a_missing_one_is_not_needed(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_text("some words " * 5)
    prepared = prepare_data(tmp_path / "out", source, **ARGUMENTS)
    moved = source.rename(tmp_path / "moved")
    assert prepare_data(tmp_path / "out", moved, **ARGUMENTS) == prepared
    assert prepare_data(tmp_path / "out", source, **ARGUMENTS) == prepared
    moved.rename(source)
    (source / "new.txt").write_text("another")
    with pytest.raises(ValueError, match="have changed since"):
        prepare_data(tmp_path / "out", source, **ARGUMENTS)


def test_a_foreign_folder_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a folder of prepared data"):
        prepare_data(tmp_path, corpus, **ARGUMENTS)
    with pytest.raises(ValueError, match="not a folder of prepared data"):
        prepare_data(tmp_path / "thesis.txt", corpus, **ARGUMENTS)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_an_empty_folder_is_filled(corpus, tmp_path):
    assert is_prepared(prepare_data(tmp_path, corpus, **ARGUMENTS).path)


def test_a_killed_run_leaves_nothing_under_the_name(tmp_path):
    target = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(
        target=prepare_data, args=(target,), kwargs={"max_bytes": 4_000_000}
    )
    process.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.partial/train.bin")):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith(".out.")
    assert not is_prepared(target)
    assert not is_prepared(partial)
    prepared = prepare_data(target, vocab_size=400, max_bytes=600_000, seed=1)
    assert is_prepared(prepared.path)
    assert partial.is_dir()


def test_a_failed_run_leaves_nothing(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"None of the .* documents for train is UTF-8"):
        prepare_data(tmp_path / "out", source, **ARGUMENTS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_damaged_folder_is_refused(corpus, tmp_path):
    prepared = prepare_data(tmp_path / "out", corpus, **ARGUMENTS)
    data = prepared.path / "train.bin"
    whole = data.read_bytes()
    data.write_bytes(whole[:-2])
    assert not is_prepared(prepared.path)
    with pytest.raises(ValueError, match=f"{len(whole)} bytes expected, {len(whole) - 2} found"):
        prepare_data(prepared.path, corpus, **ARGUMENTS)
    data.write_bytes(whole)
    prepared.tokenizer_path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        open_prepared(prepared.path)
    (prepared.path / "prepared.json").write_text(json.dumps({"format": 99}))
    assert not is_prepared(prepared.path)


@pytest.mark.parametrize(
    "bad",
    [
        {"vocab_size": 256},
        {"validation_fraction": 0.0},
        {"validation_fraction": 1.0},
        {"seed": -1},
        {"max_bytes": 0},
        {"tokenizer_bytes": 0},
    ],
)
def test_bad_values_are_named(bad, corpus, tmp_path):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name}="):
        prepare_data(tmp_path / "out", corpus, **bad)
    assert not list(tmp_path.iterdir())


def changed(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", r"tokenizer\.json is no tokenizer"),
        ("tokenizer.json", b"{}", r"tokenizer\.json is no tokenizer"),
        ("tokenizer.json", lambda old: old[: len(old) // 2], r"tokenizer\.json is no tokenizer"),
        (
            "prepared.json",
            lambda old: old.replace(b'"vocab_size": 300,\n  "end', b'"vocab_size": 7,\n  "end'),
            "says 7",
        ),
        ("prepared.json", lambda old: old.replace(b'"tokens"', b'"takens"'), "says None"),
    ],
)
def test_a_folder_whose_files_do_not_belong_together_is_refused(prepared, tmp_path, name, content, message):
    folder = shutil.copytree(prepared.path, tmp_path / "copy")
    open_prepared(folder)
    changed(folder, name, content)
    with pytest.raises(ValueError, match=message):
        open_prepared(folder)


def test_a_broken_tokenizer_beside_existing_data_is_named(prepared, tmp_path):
    folder = shutil.copytree(prepared.path, tmp_path / "copy")
    changed(folder, "tokenizer.json", b"{")
    data = TextDataModule(train_prefix=folder / "train", validation_prefix=folder / "validation", seq_length=8)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer \(.*copy it again"):
        _ = data.vocab_size


@pytest.mark.parametrize("run", ["a", "7", "-", " ", "é"])
def test_a_word_of_any_length_is_cut(corpus, tmp_path, run):
    text = run * 100_000
    (tmp_path / "source").mkdir()
    for name in ("a", "b", "c", "d"):
        (tmp_path / "source" / f"{name}.txt").write_text(text)
    data = prepare_data(tmp_path / "out", tmp_path / "source", vocab_size=10**6, validation_fraction=0.5)
    tokenizer = data.load_tokenizer()
    longest = max(end - start for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    assert longest <= 256 and tokenizer.decode(tokenizer.encode(text).ids) == text


def test_words_of_ordinary_text_are_those_of_byte_level(prepared):
    text = "def f(x):\n    return {'a': 1234567890 * x}  # " + "-" * 200 + "\n\n\tüß 你好，世界\n"
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert prepared.load_tokenizer().pre_tokenizer.pre_tokenize_str(text) == plain.pre_tokenize_str(text)


@pytest.mark.parametrize("vocab_size", [99999999999, 2**24 + 1, 2**63, -1, 256])
def test_a_vocabulary_that_no_tokenizer_has_is_refused(corpus, tmp_path, vocab_size, capsys):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} "):
        prepare_data(tmp_path / "out", corpus, vocab_size=vocab_size)
    assert main(["prepare-data", "--out", str(tmp_path / "out"), f"--vocab-size={vocab_size}"]) == 2
    assert f"vocab_size={vocab_size} " in capsys.readouterr().err and not list(tmp_path.iterdir())
