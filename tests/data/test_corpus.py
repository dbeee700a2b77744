"""Documents, their order, and the split."""

import json
import shutil

import pytest

from nemo_lowprec.data.corpus import (
    limit_bytes,
    list_documents,
    listing_fingerprint,
    source_files,
    split_documents,
)


def names(documents):
    return [document.name for document in documents]


def test_documents_are_the_files_sorted_by_name_below_the_source(corpus):
    found = names(list_documents(corpus))
    assert len(found) == 60
    assert found == sorted(found)
    assert found[0] == "part0/00.txt"


def test_text_is_read_with_its_line_ends(corpus):
    document = list_documents(corpus)[0]
    assert document.read().encode() == document.path.read_bytes()
    assert document.read().endswith("\r\n")


def test_split_is_by_name_and_seed_alone(corpus, tmp_path):
    train, validation = split_documents(list_documents(corpus), 0.2, seed=0)
    assert validation
    assert set(names(train)).isdisjoint(names(validation))
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    again = split_documents(list_documents(moved), 0.2, seed=0)
    assert (names(again[0]), names(again[1])) == (names(train), names(validation))
    for document in train[:30]:
        (moved / document.name).unlink()
    fewer = split_documents(list_documents(moved), 0.2, seed=0)
    assert names(fewer[1]) == names(validation)
    assert names(fewer[0]) == names(train)[30:]
    other = split_documents(list_documents(corpus), 0.2, seed=1)
    assert names(other[1]) != names(validation)


def test_split_keeps_about_the_fraction():
    documents = list_documents(None)
    _, validation = split_documents(documents, 0.02, seed=0)
    assert 0.01 < len(validation) / len(documents) < 0.03


def test_the_standard_library_has_no_installed_packages():
    found = names(list_documents(None))
    assert "argparse.py" in found
    assert all(name.endswith(".py") for name in found)
    assert not any("site-packages" in name or "__pycache__" in name for name in found)


def test_max_bytes_takes_a_fixed_subset_that_fits(corpus):
    documents = list_documents(corpus)
    chosen = limit_bytes(documents, 5000, seed=0)
    total = sum(document.size for document in chosen)
    smallest_left = min(document.size for document in documents if document not in chosen)
    assert total <= 5000 < total + smallest_left
    assert names(chosen) == sorted(names(chosen))
    assert limit_bytes(documents[::-1], 5000, seed=0)[::-1] == chosen
    assert limit_bytes(documents, 5000, seed=1) != chosen
    with pytest.raises(ValueError, match="max_bytes=3 is less than the smallest document"):
        limit_bytes(documents, 3, seed=0)


def test_a_jsonl_file_is_split_by_lines_and_a_folder_of_them_by_files(tmp_path):
    lines = [json.dumps({"text": f"ä {number}\n", "id": number}) for number in range(40)]
    shard = tmp_path / "a.jsonl"
    shard.write_text("\n".join([*lines[:20], "", *lines[20:]]) + "\n", encoding="utf-8")
    (tmp_path / "README").write_text("not a part of the corpus")
    documents = list_documents(shard)
    assert [document.read() for document in documents] == [f"ä {n}\n" for n in range(40)]
    assert documents[20].name == "a.jsonl:21"
    train, validation = split_documents(documents, 0.2, seed=0)
    assert train
    assert validation
    shutil.copy(shard, tmp_path / "b.jsonl")
    documents = list_documents(tmp_path)
    assert len(documents) == 80
    assert {document.group for document in documents} == {"a.jsonl", "b.jsonl"}


def test_another_text_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n[1]\n{"content": \n')
    good, array, broken = list_documents(path, text_field="content")
    assert good.read() == "x"
    with pytest.raises(ValueError, match=r"a\.jsonl:1 has no text under 'content' \(it has list"):
        array.read()
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is not JSON"):
        broken.read()
    with pytest.raises(ValueError, match=r"has no text under 'text' \(it has \['content'\]\)"):
        list_documents(path)[0].read()


def test_files_that_are_not_utf8_are_told_apart(tmp_path):
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "utf8.txt").write_bytes("schön".encode())
    assert [document.read() for document in list_documents(tmp_path)] == [None, "schön"]


def test_sources_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        list_documents(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no text"):
        list_documents(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(ValueError, match="holds no text"):
        list_documents(tmp_path)
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(ValueError, match="is a single text"):
        list_documents(tmp_path / "one.txt")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="only blank lines"):
        list_documents(tmp_path / "blank.jsonl")


def test_a_file_that_went_away_is_named(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("x")
    (document,) = list_documents(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"one\.txt of the corpus cannot be read"):
        document.read()


def test_a_split_with_an_empty_side_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(ValueError, match="leaves nothing for validation out of 1 separable parts"):
        split_documents(list_documents(tmp_path), 1e-9, seed=0)


def test_fingerprint_sees_names_and_sizes_and_not_the_place(corpus, tmp_path):
    before = listing_fingerprint(source_files(corpus))
    moved = shutil.copytree(corpus, tmp_path / "moved")
    assert listing_fingerprint(source_files(moved)) == before
    (moved / "part0" / "00.txt").write_text("shorter")
    assert listing_fingerprint(source_files(moved)) != before
