"""The example of mnist.py on several processes, with torch's DistributedDataParallel.

    python -m torch.distributed.run --nproc-per-node 2 examples/mnist_ddp.py --enable-msamp --opt-level O2

On GPUs over NCCL, one to a process; without them over gloo. What --enable-msamp changes is one line: the call of
``nemo_lowprec.initialize``, before the model is wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from mnist import Net, evaluate, load_data, parse_arguments, train_epoch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nemo_lowprec import msamp


def main(argv: Sequence[str] | None = None) -> tuple[nn.Module, float]:
    """Train on all processes and test on each; returns the model and its accuracy."""
    args = parse_arguments(__doc__, argv)
    use_cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)  # each its own dropout; the weights are the first one's
    train, test, side = load_data(args.data)
    sampler: DistributedSampler = DistributedSampler(train, seed=args.seed)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler)
    test_loader = DataLoader(test, 256)

    model: nn.Module = Net(side).to(device)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.enable_msamp:
        model, optimizer = msamp.initialize(model, optimizer, opt_level=args.opt_level)
    wrapped = DistributedDataParallel(model, device_ids=[device.index] if use_cuda else None)

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(wrapped, device, train_loader, optimizer)
        accuracy = evaluate(wrapped.module, device, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: last loss {loss:.4f}, test accuracy {accuracy:.3f}", flush=True)
        scheduler.step()
    dist.destroy_process_group()
    return model, accuracy


if __name__ == "__main__":
    main()
