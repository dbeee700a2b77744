"""torch's distributed checkpoints."""

import torch
import torch.distributed.checkpoint as dcp

from nemo_lowprec.compat import checkpoint


def test_an_index_says_where_each_tensor_lies(tmp_path):
    dcp.save({"a": torch.ones(4), "b": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    index = dcp.FileSystemReader(tmp_path).read_metadata()
    infos = list(index.storage_data.values())
    assert len(infos) == 2 and all(isinstance(info, checkpoint.StorageInfo) for info in infos)
    first, second = sorted(infos, key=lambda info: info.offset)
    assert first.offset == 0 and second.offset == first.length and first.relative_path == second.relative_path
    assert (tmp_path / first.relative_path).stat().st_size == first.length + second.length
