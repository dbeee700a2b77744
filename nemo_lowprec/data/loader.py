"""The training data loader, whose position is part of the checkpoint, and the validation data loader.

The training position is (epoch, samples taken from that epoch), counted over all ranks. The loader counts its own
epochs: Lightning's epochs end early with `limit_train_batches`, and after a resume Lightning may count an epoch without
batches. So a resumed run goes on with the next batch, wherever the checkpoint was taken, with any number of workers,
and at any world size that keeps the global batch size.

Lightning restores the state of a loader before the first batch, but not after a checkpoint from the end of an epoch in
a run bounded by epochs. `TextDataModule` therefore saves the position in its own state, which Lightning always
restores.
"""

import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

Batch = dict[str, Tensor]


class ResumableLoader:
    """Training batches from a dataset, with a position that is saved and restored.

    A step takes `micro_batch_size * world_size` samples in order, and each rank a contiguous part of these samples. In
    rank order, the micro-batches of all ranks are the micro-batches that a single rank would see one after another. An
    epoch leaves out the last samples, fewer than a global batch; every epoch but the first leaves out other samples.

    Epoch 0 has the dataset's own order, which `PackedDataset` has shuffled as Megatron does. The order of every later
    epoch is a permutation drawn from the seed and the number of the epoch.

    Iterating goes on at the position, also in a second `iter()`. A batch counts as taken when the loader yields the
    batch, not when a worker has read the batch. The default random generator of torch is not used. The loader wraps a
    torch DataLoader and is none, so Lightning adds no sampler, whatever `use_distributed_sampler` says.

    Args:
        dataset: Map-style, with a length, each sample a dict of tensors.
        micro_batch_size: Samples of one batch on one rank.
        seed: Seed of the order of the samples.
        rank: Data-parallel rank of this process.
        world_size: Number of data-parallel ranks.
        global_batch_size: Samples of one optimizer step, over ranks and gradient accumulation. None: the samples of one
            batch on all ranks.
        num_workers: Processes that read ahead; 0: none.
        pin_memory: Whether batches come in page-locked memory.
        stop_at_epoch_end: Whether an iterator ends where an epoch ends. False: the iterator goes on with the next
            epoch, for a trainer that counts the batches itself.
        in_flight: Returns how many of the batches yielded last do not count as taken yet, for a checkpoint written from
            within a training step. None: no batch.

    Raises:
        ValueError: A bad value, or less than a global batch of samples.
    """

    def __init__(
        self,
        dataset: Sized,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        global_batch_size: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        stop_at_epoch_end: bool = True,
        in_flight: Callable[[], int] | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie in [0, world_size={world_size}).")
        self.samples_per_step = micro_batch_size * world_size
        global_batch_size = global_batch_size or self.samples_per_step
        if global_batch_size % self.samples_per_step:
            raise ValueError(
                f"global_batch_size={global_batch_size} must be a multiple of micro_batch_size * "
                f"world_size = {self.samples_per_step}."
            )
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"The training data have {len(dataset)} samples, less than one global batch of {global_batch_size}: "
                "pass more data, or a smaller seq_length, batch or accumulation."
            )
        # Not `self.dataset`: Lightning's overfit_batches would take an object with `dataset` for a torch DataLoader.
        self._dataset = dataset
        self.batch_size = micro_batch_size
        self.rank = rank
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.stop_at_epoch_end = stop_at_epoch_end
        self._seed = seed
        self._in_flight = in_flight
        self._epoch_samples = len(dataset) // global_batch_size * global_batch_size
        self._epoch = self._taken = 0
        self._untouched = True

    def __len__(self) -> int:
        """Batches of a whole epoch on one rank, wherever the position is."""
        return self._epoch_samples // self.samples_per_step

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the position on; nothing is read before the first batch is requested."""
        while True:
            # Batches on other ranks or of another size may not end where this epoch does.
            if self._taken + self.samples_per_step > self._epoch_samples:
                self._epoch, self._taken = self._epoch + 1, 0
            yield from self._rest_of_epoch()
            if self.stop_at_epoch_end:
                return

    def _rest_of_epoch(self) -> Iterator[Batch]:
        order = self._order(self._epoch)[self._taken : self._epoch_samples]
        steps = order.unfold(0, self.samples_per_step, self.samples_per_step)  # [steps, samples of all ranks]
        own = steps[:, self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        batches = (own[step].tolist() for step in range(len(own)))
        for batch in _torch_loader(self._dataset, self.num_workers, self.pin_memory, batch_sampler=batches):
            self._untouched = False
            self._taken += self.samples_per_step
            yield batch

    def _order(self, epoch: int) -> Tensor:
        """Sample indices of an epoch, int64 of shape [samples]."""
        samples = len(self._dataset)
        if epoch == 0:
            return torch.arange(samples)
        # Not seed + epoch, which would give neighbouring seeds nearly the same epochs.
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        return torch.randperm(samples, generator=generator)

    @property
    def sampler(self) -> "ResumableLoader":
        """The loader, because Lightning calls `sampler.set_epoch` at the start of each of its epochs."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Starts at Lightning's epoch, unless the loader has a position of its own already."""
        if self._untouched:
            self._epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The position: `epoch`, `taken` (samples of that epoch, all ranks), `samples` and `seed`."""
        taken = self._taken
        if self._in_flight is not None:
            taken = max(0, taken - self._in_flight() * self.samples_per_step)
        return {"epoch": self._epoch, "taken": taken, "samples": len(self._dataset), "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores a saved position; warns and ignores a position of other data or of another seed."""
        self._untouched = False
        here = {"samples": len(self._dataset), "seed": self._seed}
        there = {name: state[name] for name in here}
        if here != there:
            warnings.warn(
                f"The checkpoint's position belongs to other data or another seed ({there}, here {here}): these data "
                "start from their beginning.",
                stacklevel=2,
            )
            return
        self._epoch, self._taken = state["epoch"], state["taken"]


def validation_loader(
    dataset: Sized,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Whole batches in the dataset's order, from the beginning at each `iter()`.

    Every rank gets the same number of batches, because the ranks of a sharded model run each batch together. The last
    samples, which do not fill a batch on all ranks, are left out. The arguments are those of `ResumableLoader`.

    Returns:
        A torch DataLoader; on several ranks with a DistributedSampler, which Lightning keeps.

    Raises:
        ValueError: A bad value, or too few samples for one batch on every rank.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1.")
    if len(dataset) < micro_batch_size * world_size:
        raise ValueError(
            f"There are {len(dataset)} validation samples, too few for a batch of {micro_batch_size} on each of "
            f"{world_size} ranks: pass larger validation_samples or validation_fraction, or a smaller "
            "micro_batch_size or seq_length."
        )
    sampler: DistributedSampler[Any] | None = None
    if world_size > 1:
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=False, drop_last=True)  # type: ignore[arg-type]
    options = {"batch_size": micro_batch_size, "sampler": sampler, "drop_last": True}
    return _torch_loader(dataset, num_workers, pin_memory, **options)


def _torch_loader(dataset: Sized, num_workers: int, pin_memory: bool, **options: Any) -> DataLoader[Batch]:
    # A generator of its own: an iterator draws the seed of the workers, and a draw from the default generator would
    # change the dropout after a resume.
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
        **options,
    )
