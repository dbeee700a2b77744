"""The documents' tables and pictures: made from the results, each with a sentence that says what to see, each figure
beside one with the same settings."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from benchmarks.headline_tables import headlines
from benchmarks.headline_tables import rows as headline_rows
from benchmarks.pictures import BLACK, LINES, MOST, OTHERS, OURS, Bar, Bars, Dots, Lines, Picture
from benchmarks.record import RESULTS
from benchmarks.rst import origin, rst_table, simple_table
from benchmarks.support_tables import subject_of
from benchmarks.tables import DOCUMENTS, MEASURED, PICTURES, README, TABLES, fill

BLOCK = re.compile(r"(?s)^\.\. (\w+) begins\n\n(.*?)\n\n\.\. \1 ends$", re.M)
TIME = re.compile(r"([\d.]+) ms\b")
SENTENCE = re.compile(r"(?s)[A-Z`].*\d.*\.")  # with a figure
OF_TIMES = (
    "experts",
    "lora",
    "te",
    "torchao",
    "adam",
    "adam low-bit",
    "average",
    "parallel",
    "fsdp2",
    "megatron",
    "megatron msamp",
)
OF_MODELS = ("te", "torchao", "parallel", "fsdp2", "megatron", "megatron msamp")
OF_MODELS += ("llama_8b", "loss", "swin_1b", "deit_1b")


def blocks(text):
    """Name to the paragraphs of each block in the document."""
    return {name: made.split("\n\n") for name, made in BLOCK.findall(text)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document):
    assert fill(document.read_text()) == document.read_text(), "run python -m benchmarks.tables --write"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_and_picture_is_below_a_sentence_that_says_what_to_see(document):
    found = blocks(document.read_text())
    assert found
    for name, (sentence, shown, *_) in found.items():
        assert SENTENCE.fullmatch(sentence) and not sentence.startswith(".."), name
        assert shown.startswith((".. list-table::", ".. image::", "===")), name


def test_measured_rst_has_no_table_and_no_picture_outside_the_blocks():
    outside = BLOCK.sub("", MEASURED.read_text())
    assert "list-table" not in outside and ".. image" not in outside
    assert not re.search(r"^=+ +=+", outside, re.M)


def test_every_table_is_in_a_document():
    assert {name for document in DOCUMENTS for name in blocks(document.read_text())} == set(TABLES)


def test_measured_rst_begins_with_its_contents():
    text = MEASURED.read_text()
    assert text.index(".. contents::") < text.index("\n----")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_picture_is_there_and_has_a_text_in_its_place(document):
    images = re.findall(r"^\.\. image:: (\S+)\n   :alt: (.+)$", document.read_text(), re.M)
    assert len(images) == document.read_text().count(".. image::") and (images or document not in (README, MEASURED))
    for path, alt in images:
        assert (document.parent / path).exists() and re.search(r"\d", alt), path


def test_every_row_of_the_headlines_states_the_settings_of_both_sides():
    for key, row in headline_rows().items():
        assert re.search(r"\bGPUs?\b", row.claim), key
        for settings in (row.settings, row.other_settings):
            if key == "average":
                assert re.search(r"FP8|BF16", settings), key
            else:
                for kept in ("weights", "masters", "gradients", "states"):
                    assert re.search(rf"(FP\d+|BF16|no|and) {kept}", settings), f"{key}: {kept} of {settings}"
        if key in OF_MODELS:
            assert re.search(r"\w+('s)? attention, head in", row.shared) and re.search(r"batch|tokens", row.shared), key


def test_settings_of_a_level_are_those_of_the_chart():
    rows = headline_rows()
    assert rows["te"].settings == "``msamp_o2``: FP16 weights, no masters, FP8 gradients, FP8+FP16 states"
    assert rows["loss"].other_settings.endswith("BF16 weights, FP32 masters, FP32 gradients, FP32+FP32 states")


def test_ratios_are_of_the_times_beside_them():
    rows = headline_rows()
    assert {key for key, row in rows.items() if row.ratio.endswith("×")} == set(OF_TIMES)
    for key in OF_TIMES:
        ours, other = (float(TIME.search(figure)[1]) for figure in (rows[key].figure, rows[key].other_figure))
        assert float(rows[key].ratio.split()[0]) == pytest.approx(other / ours, rel=0.01), key


def test_headlines_have_what_is_slower_too():
    ratios = {key: float(headline_rows()[key].ratio.split()[0]) for key in OF_TIMES}
    assert min(ratios.values()) < 1
    takeaway = " ".join(headlines().split("\n\n")[0].split())
    for key in ("te", "torchao", "fsdp2", "megatron"):
        assert f"{headline_rows()[key].ratio} as" in takeaway


def test_what_memory_costs_in_time_is_said_beside_it():
    for model in ("swin_1b", "deit_1b"):
        row = headline_rows()[model]
        megabytes, ms, others, others_ms = (
            int(found.replace(",", ""))
            for figure in (row.figure, row.other_figure)
            for found in re.fullmatch(r"([\d,]+) MB, (\d+) ms", figure).groups()
        )
        saved, slower = re.fullmatch(r"([\d.]+) % saved at ([\d.]+) × the time", row.ratio).groups()
        assert float(saved) == pytest.approx(100 * (1 - megabytes / others), abs=0.06)
        assert float(slower) == pytest.approx(ms / others_ms, abs=0.02)


def test_a_contestant_stands_in_one_table():
    found = blocks(MEASURED.read_text())
    rows = [{line.split("  ")[0] for line in found[name][1].splitlines()[3:-1]} for name in ("throughput", "fastest")]
    assert all(rows) and not set.intersection(*rows)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read(name):
    picture = PICTURES[name]()
    assert 0 < picture.data.marks <= MOST
    drawn = {
        Bars: lambda data: len(data.bars),
        Dots: lambda data: len(data.rows),
        Lines: lambda data: sum(len(panel.lines) for panel in data.panels),
    }
    assert picture.data.marks == drawn[type(picture.data)](picture.data)
    for colours in picture.data.colours:
        assert len(set(colours.values())) == len(colours) > 1, colours
        assert set(colours.values()) <= {OURS, OTHERS, BLACK, *LINES}
    if isinstance(picture.data, Bars):
        assert {bar.ours for bar in picture.data.bars} == {True, False}
        assert len({bar.label for bar in picture.data.bars}) == picture.data.marks
        assert all(bar.ours == bar.label.startswith("nemo_lowprec ") for bar in picture.data.bars)
    assert re.search(r"Bars|Lines|Rows", picture.shown), "it says which contestants it has"


def comment(path):
    """What a PNG file keeps under the name Comment."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"tEXt" and content.startswith(b"Comment\0"):
            return content[len(b"Comment\0") :].decode()
        at += 12 + size
    return None


def test_pictures_are_drawn_from_the_results_that_are_there():
    files = {make().file: make() for make in PICTURES.values()}
    assert {path.name for path in RESULTS.glob("*.png")} == set(files)
    for file, picture in files.items():
        assert comment(RESULTS / file) == picture.digest(), f"{file}: run python -m benchmarks.tables --write"


@pytest.mark.parametrize("name", ["fastest_picture", "curves_picture", "msamp_picture"])  # one of each kind
def test_a_picture_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    picture = PICTURES[name]()
    picture.draw(tmp_path)
    assert comment(tmp_path / picture.file) == picture.digest()


def test_a_picture_with_more_than_can_be_read_is_refused():
    many = Bars("tokens/s", tuple(Bar(str(i), i, str(i), True) for i in range(MOST + 1)))
    with pytest.raises(ValueError, match=rf"many\.png has {MOST + 1} bars"):
        Picture("many.png", "See.", "Bars.", many)


def test_cells_of_both_kinds_of_table_line_up():
    assert simple_table(("a", "bc"), [("long", "1"), ("–", "2")]).splitlines() == [
        "====  ==", "a     bc", "====  ==", "long  1", "–     2", "====  ==",
    ]  # fmt: skip
    assert rst_table(("a", "b"), [("one\n\ntwo", "c")]).splitlines()[-5:] == [
        "     - b", "   * - one", "", "       two", "     - c",
    ]  # fmt: skip


def test_commands_stand_below_the_machine_that_they_share():
    one = {"command": "python -m a", "date": "d", "gpu": "G", "gpus": 2, "versions": {"torch": "2", "timm": None}}
    made = origin([one, {**one, "command": "python -m b"}, {**one, "gpus": 1}], "timm")
    assert made.split("\n\n") == [
        "Measured on 2 × G, d, torch 2:", ".. code-block:: text", "   python -m a\n   python -m b",
        "Measured on G, d, torch 2:", ".. code-block:: text", "   python -m a",
    ]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_valid(document):
    core = pytest.importorskip("docutils.core")
    settings = {"report_level": 1, "halt_level": 2, "file_insertion_enabled": False}
    html = core.publish_parts(document.read_text(), writer="html5", settings_overrides=settings)["html_body"]
    assert "system-message" not in html and "<table" in html
    assert html.count("<h2>") > (5 if document in (README, MEASURED) else 1)


def test_each_file_of_gpu_tests_has_a_subject():
    files = list((Path(__file__).parents[1] / "gpu").glob("test_*.py"))
    assert len(files) > 50 and all(subject_of(file) for file in files)
