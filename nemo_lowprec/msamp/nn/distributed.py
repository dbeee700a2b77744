"""MS-AMP's names of DistributedDataParallel: torch's own, which averages a converted model's gradients in FP8."""

from torch.nn.parallel import DistributedDataParallel

FP8DistributedDataParallel = DistributedDataParallel

__all__ = ["DistributedDataParallel", "FP8DistributedDataParallel"]
