"""Opening .bin/.idx pairs, whole and broken."""

import numpy as np
import pytest

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
