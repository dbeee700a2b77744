"""Opening .bin/.idx pairs, whole and broken."""

import numpy as np
import pytest

from nemo_lowprec.data import indexed
from nemo_lowprec.data.indexed import open_indexed


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_data_of_megatron_open(build_indexed, tmp_path, dtype, multimodal):
    data = open_indexed(build_indexed(tmp_path / "a", [[1, 2, 3], [], [4]], dtype, multimodal))
    assert [list(ids) for ids in data] == [[1, 2, 3], [], [4]]
    assert data[0].dtype == dtype


def test_missing_files_are_named(build_indexed, tmp_path):
    prefix = build_indexed(tmp_path / "a", [[1, 2]])
    with pytest.raises(ValueError, match=r"a\.bin\.idx does not exist: pass .* without the ending"):
        open_indexed(f"{prefix}.bin")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin does not exist"):
        open_indexed(prefix)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_truncated_and_overlong_files(build_indexed, tmp_path, ending):
    prefix = build_indexed(tmp_path / "a", [[1, 2, 3], [4, 5]])
    path = tmp_path / f"a.{ending}"
    whole = path.read_bytes()
    for length in {len(whole) - 1, len(whole) // 2, 9}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"a\.{ending} is truncated: .* {length} found"):
            open_indexed(prefix)
    path.write_bytes(whole + b"abc")
    with pytest.raises(ValueError, match="longer than its index says"):
        open_indexed(prefix)


def test_other_files_are_refused(build_indexed, tmp_path):
    prefix = build_indexed(tmp_path / "a", [[1, 2, 3]])
    path = tmp_path / "a.idx"
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a Megatron index"):
            open_indexed(prefix)
    path.write_bytes(whole[:9] + b"\x02" + whole[10:])
    with pytest.raises(ValueError, match="version 2 with dtype code 8"):
        open_indexed(prefix)


def test_data_without_tokens_are_refused(build_indexed, tmp_path):
    with pytest.raises(ValueError, match="holds no tokens"):
        open_indexed(build_indexed(tmp_path / "a", [[]]))


SEQUENCES = [[1, 2, 3], [], [4, 5], [6]]
HEADER, LENGTHS, STARTS = 34, 4 * len(SEQUENCES), 8 * len(SEQUENCES)


def broken(path, at, values, kind):
    """Write ``values`` at a byte of a file; its length stays."""
    whole = bytearray(path.read_bytes())
    raw = np.array(values, kind).tobytes()
    whole[at : at + len(raw)] = raw
    path.write_bytes(bytes(whole))


@pytest.mark.parametrize(
    ("at", "values", "kind", "message"),
    [
        (HEADER + LENGTHS, [0, 0, 0, 0], "<i8", "sequence 1 starts at byte 0 of the .bin file, .* end at byte 6"),
        (HEADER + LENGTHS, [2], "<i8", "sequence 0 starts at byte 2 "),
        (HEADER + LENGTHS + 16, [2**40], "<i8", "sequence 2 starts at byte 1099511627776 "),
        (HEADER + LENGTHS + 24, [-8], "<i8", "sequence 3 starts at byte -8 "),
        (HEADER, [-1, 4], "<i4", "sequence 0 has -1 tokens"),
        (HEADER, [2, 1], "<i4", "sequence 1 starts at byte 6 .* end at byte 4"),
        (HEADER + LENGTHS + STARTS, [1], "<i8", "bounds of documents that do not rise from 0"),
        (HEADER + LENGTHS + STARTS + 8, [4, 2], "<i8", "bounds of documents that do not rise from 0"),
        (HEADER + LENGTHS + STARTS + 8 * len(SEQUENCES), [9], "<i8", "bounds of documents that do not rise from 0"),
        (17, [6], "u1", "says that its data are float64"),
    ],
)
@pytest.mark.parametrize("parts", [None, 1, 3])
def test_an_index_that_does_not_describe_its_data_is_refused(
    build_indexed, tmp_path, monkeypatch, at, values, kind, message, parts
):
    if parts is not None:  # larger indices are read in parts
        monkeypatch.setattr(indexed, "_AT_ONCE", parts)
    prefix = build_indexed(tmp_path / "a", SEQUENCES, np.uint16)
    open_indexed(prefix)
    broken(tmp_path / "a.idx", at, values, kind)
    with pytest.raises(ValueError, match=rf"a\.idx .*{message}.*"):
        open_indexed(prefix)
