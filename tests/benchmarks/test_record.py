"""Files of results: figures, and the command, versions, GPU and date they come from."""

from benchmarks.record import RESULTS, Record, lines, read


def test_every_result_starts_with_its_origin():
    files = sorted(RESULTS.glob("*.jsonl"))
    assert files
    for file in files:
        origins, figures = read(file)
        assert lines(file)[0] == origins[0] and figures
        assert all({"command", "date", "gpu", "versions"} <= set(origin) for origin in origins)


def test_a_file_written_in_parts_names_the_origin_of_each(tmp_path):
    path = tmp_path / "results.jsonl"
    Record(path).add(benchmark="x", figure=1)
    first = lines(path)
    Record(path, first).add(benchmark="x", figure=2)
    assert lines(path)[:2] == first
    origins, figures = read(path)
    assert lines(path) == [origins[0], figures[0], origins[1], figures[1]]
    assert [f["figure"] for f in figures] == [1, 2]


def test_an_origin_whose_figures_were_all_measured_again_is_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    Record(path).add(benchmark="x", figure=1)
    Record(path, lines(path)).add(benchmark="x", figure=2)
    origins, figures = read(path)
    Record(path, [*origins, figures[1]]).add(benchmark="x", figure=3)
    assert [f["figure"] for f in read(path)[1]] == [2, 3] and len(read(path)[0]) == 2


def test_a_command_says_which_links_were_off(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_VERSION", "2.28")
    Record(tmp_path / "results.jsonl").add(benchmark="x", figure=1)
    assert read(tmp_path / "results.jsonl")[0][0]["command"].startswith("NCCL_P2P_DISABLE=1 python ")
