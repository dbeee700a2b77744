"""torch's distributed checkpoints."""

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo  # (file, offset, length) of a part of a tensor
