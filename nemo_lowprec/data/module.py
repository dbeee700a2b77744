"""The data of a pretraining run as one LightningDataModule."""

from collections.abc import Sized
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Subset

from nemo_lowprec.arguments import checked
from nemo_lowprec.data.loader import Batch, ResumableLoader, validation_loader
from nemo_lowprec.data.packed import PackedDataset
from nemo_lowprec.data.prepare import DEFAULT_VOCAB_SIZE, PreparedData, is_prepared, open_prepared, prepare_data
from nemo_lowprec.data.tokenizer import Tokenizer, check_vocab_size, load_tokenizer


class TextDataModule(LightningDataModule):
    """Packed text for next-token prediction, which prepares missing data and resumes at the saved position.

    A batch is a dict of `input_ids` and `labels`, int64 of shape [micro_batch_size, seq_length]; the labels are already
    shifted (see `PackedDataset`). Testing uses the validation data.

    Any value of Lightning's `use_distributed_sampler` works. The global batch is micro_batch_size x data-parallel ranks
    x `accumulate_grad_batches`, and a training epoch is a whole number of global batches.

    Args:
        data_dir: Prepared folder. The first process of each node prepares a folder that does not exist.
        source: Source of the texts (see `prepare_data`); None: the Python standard library.
        vocab_size: Number of ids; None: the number of the prepared data. Where `data_dir` is still to be prepared, the
            size of the tokenizer to train (None: 8192). With prefixes, the size of the data's tokenizer; None needs a
            `tokenizer.json` beside the data.
        seq_length: Tokens of one sample.
        micro_batch_size: Samples of one batch on one rank.
        num_workers: Processes that read ahead, for training and for validation each; 0: none.
        seed: Seed of the order of documents and samples. (`prepare_data` has another seed for the split.)
        validation_fraction: Fraction of the source's files that preparing keeps for validation; None: the fraction of
            the prepared data, or 0.02.
        max_bytes: Bytes of the source that preparing takes; None: as the data are prepared, or all.
        train_prefix, validation_prefix: Paths, without the ending, of existing Megatron or NeMo .bin/.idx data to use
            in place of `data_dir`.
        validation_samples: Largest number of samples to validate on, a random choice, the same for every seed; None:
            all samples.
        pin_memory: Whether batches come in page-locked memory; None: where there is a GPU.

    Raises:
        ValueError: At construction, a bad value, or arguments that exclude each other; when preparing or setting up, as
            for `prepare_data`, `open_indexed` and `PackedDataset`.
    """

    @checked
    def __init__(
        self,
        data_dir: str | Path = "data/stdlib",
        source: str | Path | None = None,
        vocab_size: int | None = None,
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        num_workers: int = 0,
        seed: int = 0,
        validation_fraction: float | None = None,
        max_bytes: int | None = None,
        train_prefix: str | Path | None = None,
        validation_prefix: str | Path | None = None,
        validation_samples: int | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__()
        if (train_prefix is None) != (validation_prefix is None):
            raise ValueError("Pass both train_prefix and validation_prefix, or neither.")
        self._prefixes = None if train_prefix is None else (str(train_prefix), str(validation_prefix))
        if self._prefixes is not None and (source is not None or max_bytes is not None):
            raise ValueError(
                "source and max_bytes are for preparing data, and train_prefix names data that are prepared: pass one "
                "or the other."
            )
        if self._prefixes is None and vocab_size is not None:
            check_vocab_size(vocab_size)
        self.data_dir = Path(data_dir)
        self._tokenizer_file = (Path(self._prefixes[0]).parent if self._prefixes else self.data_dir) / "tokenizer.json"
        if self._prefixes is not None and vocab_size is None and not self._tokenizer_file.is_file():
            raise ValueError(
                f"There is no tokenizer.json beside train_prefix={train_prefix}: pass vocab_size, the number of ids of "
                "the tokenizer that made the data."
            )
        self.source = source
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.validation_fraction = validation_fraction
        self.max_bytes = max_bytes
        self.validation_samples = validation_samples
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.prepared: PreparedData | None = None
        self._vocab_size = vocab_size
        self._train: PackedDataset | None = None
        self._validation: PackedDataset | None = None
        self._loader: ResumableLoader | None = None
        self._position: dict[str, int] | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer once `setup` has run, and the argument `vocab_size` before.

        A model that is built for the argument always fits, because the tokenizer has as many ids or fewer.
        """
        if self.prepared is not None:
            return self.prepared.vocab_size
        if self._vocab_size is not None:
            return self._vocab_size
        if self._prefixes is not None:
            return int(self.tokenizer.get_vocab_size())
        return open_prepared(self.data_dir).vocab_size if is_prepared(self.data_dir) else DEFAULT_VOCAB_SIZE

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data, of the `tokenizers` library; loaded at the first access.

        Raises:
            ValueError: The data are not prepared yet, or have no tokenizer.json beside them.
        """
        path = self._tokenizer_file
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: call prepare_data() first, or put the tokenizer of the data there."
            )
        return load_tokenizer(path)

    def prepare_data(self) -> None:
        """Prepares a missing `data_dir`; Lightning calls this method in one process of each node."""
        if self._prefixes is None:
            prepare_data(
                self.data_dir,
                source=self.source,
                vocab_size=self._vocab_size,
                validation_fraction=self.validation_fraction,
                max_bytes=self.max_bytes,
            )

    def setup(self, stage: str | None = None) -> None:
        """Opens the data and builds the samples; `stage` makes no difference."""
        if self._train is not None:
            return
        if self._prefixes is None:
            self.prepared = open_prepared(self.data_dir)
            prefixes = (self.prepared.train_prefix, self.prepared.validation_prefix)
        else:
            prefixes = self._prefixes
        train = PackedDataset(prefixes[0], self.seq_length, self.seed, self.vocab_size)
        # Seed 0 whatever the run's seed: runs with different seeds are validated on the same samples.
        validation = PackedDataset(prefixes[1], self.seq_length, 0, self.vocab_size)
        for data in (train, validation):
            data.check_ids()
        self._train, self._validation = train, validation

    def agreement(self) -> dict[str, Any]:
        """Values that must be equal on every process: settings, and after `setup` the fingerprints of the corpus."""
        names = ("seq_length", "micro_batch_size", "seed", "validation_samples")
        settings = {name: getattr(self, name) for name in names}
        if self._train is None or self._validation is None:
            return settings
        corpora = {"train corpus": self._train.fingerprint, "validation corpus": self._validation.fingerprint}
        return {"vocab_size": self.vocab_size, **settings, **corpora}

    def train_dataloader(self) -> ResumableLoader | DataLoader[Batch]:
        """Training batches from the restored position on.

        With `overfit_batches` every epoch has the same first batches, and there is no position.
        """
        self.setup()
        assert self._train is not None
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            return self._in_order(self._train)
        rank, world_size = self._shard()
        steps = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        self._loader = ResumableLoader(
            self._train,
            self.micro_batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            global_batch_size=self.micro_batch_size * world_size * steps,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Lightning itself counts to len() or limit_train_batches.
            stop_at_epoch_end=self.trainer is None,
            in_flight=self._batches_in_flight,
        )
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def val_dataloader(self) -> DataLoader[Batch]:
        """Validation batches, the same ones each time."""
        self.setup()
        assert self._validation is not None
        return self._in_order(Subset(self._validation, range(len(self._validation))[: self.validation_samples]))

    test_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data."""
        return {} if self._loader is None else {"position": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the next `train_dataloader()`; validation and tests ignore the position."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._position = state_dict.get("position")

    def _in_order(self, dataset: Sized) -> DataLoader[Batch]:
        rank, world_size = self._shard()
        return validation_loader(dataset, self.micro_batch_size, rank, world_size, self.num_workers, self.pin_memory)

    def _shard(self) -> tuple[int, int]:
        """The data-parallel rank of this process, and the number of data-parallel ranks."""
        # A strategy with tensor or pipeline parallel ranks reports its data-parallel ranks here.
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (sampler["rank"], sampler["num_replicas"]) if sampler else (0, 1)

    def _batches_in_flight(self) -> int:
        """1 within a training step, because a resumed run repeats the batch of that step; else 0."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)
