"""Text in 80 columns."""

from nemo_lowprec.lines import WIDTH, name_lines, pair_lines, path_text, text_lines

LONG = ".".join(f"part_number_{i}" for i in range(12))


def test_names_are_broken_behind_commas_and_dots_only():
    names = ["short", "model.layer", LONG, "q_proj", *(f"a.name{i}" for i in range(20))]
    lines = name_lines(names, 20)
    assert max(map(len, lines)) <= WIDTH and all(line[:20].isspace() and line[20] != " " for line in lines)
    assert all(line[-1] in ",." for line in lines[:-1])
    text = "".join(line.strip() + " " * line.endswith(",") for line in lines)
    assert text.split(", ") == names
    assert name_lines([], 4) == []


def test_a_part_of_a_name_is_never_broken():
    name = "module." + "x" * 100 + ".weight"
    assert [line.strip() for line in name_lines([name], 8)] == ["module.", "x" * 100 + ".", "weight"]


def test_values_start_in_one_column():
    lines = pair_lines([("Level", "te_fp8"), ("Validation loss", "2.5"), ("Note", "word " * 30)])
    assert {line.index(text) for line, text in zip(lines, ["te_fp8", "2.5", "word", "word"], strict=False)} == {20}
    assert max(map(len, lines)) <= WIDTH and lines[3][:20].isspace()
    assert pair_lines([("Empty", "")]) == ["  Empty"]


def test_a_path_is_never_broken():
    path = "/a/long-path" * 12
    assert pair_lines([("Level", "te_fp8"), ("Checkpoint", path)]) == [
        "  Level        te_fp8",
        "  Checkpoint",
        "    " + path,
    ]


def test_text_hangs():
    lines = text_lines("word " * 40, hanging=2)
    assert lines[0].startswith("word") and all(line.startswith("  word") for line in lines[1:])


def test_a_path_in_the_current_folder_is_shown_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_text(tmp_path / "runs" / "first") == path_text("runs/first") == "runs/first"
    assert path_text(tmp_path.parent) == str(tmp_path.parent)
