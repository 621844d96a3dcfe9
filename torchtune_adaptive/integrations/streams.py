"""Datasets that can only be iterated over, of which each process takes its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils.data import IterableDataset


class Stream(IterableDataset[Any]):
    """A dataset that each process reads whole.

    To accelerate it is one like any other, of which processes take batches in turn. It would give each
    process other shards of a ``datasets.IterableDataset``, which need not have as many rows.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rows, name)  # its epoch is set


@contextmanager
def read_by_each_process(trainer: Any) -> Iterator[None]:
    """A context in which a trainer makes its loader, from which each process takes its own rows.

    Unless told otherwise, accelerate has one process read a stream, also where there is no other, and send
    what the collate function has made. Here each reads it and takes the same rows as there: the first batch
    is that of the first process, and so on.
    """
    loading, dataset = trainer.accelerator.dataloader_config, trainer.train_dataset
    if loading.dispatch_batches is None and isinstance(dataset, IterableDataset):
        dataset = Stream(dataset)
    with (
        mock.patch.object(loading, "dispatch_batches", False),
        mock.patch.object(trainer, "train_dataset", dataset),
    ):
        yield
