"""The rows of a step of torchtitan, which stay the same on another number of data-parallel ranks.

torchtitan deals its data to these ranks, makes rows of what each one gets, and saves the place in each of
these parts. So a run keeps the parts that it began with: each rank takes its share of the rows of a step out
of the loaders of the parts that have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from torchtune_adaptive.common import UsageError, announce, counted, launcher
from torchtune_adaptive.integrations.step_rows import can_share

log = logging.getLogger(__name__)

Config = TypeVar("Config")
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What a data loader of torchtitan yields: the inputs by name, and the labels."""

_LOADER, _PROGRESS = "dataloader", "train_state"
"""What these are called in a checkpoint."""


def data_ranks(trainer: Any) -> int:
    """The ranks that have rows of their own."""
    return int(trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard)


def with_rows_shared(config: Config) -> Config:
    """The config of a trainer whose batches are small enough for the rows of a step on these ranks.

    Raises:
        UsageError: the ranks cannot have equally many.
    """
    training: Any = config.training  # type: ignore[attr-defined]
    if training.global_batch_size < 1:
        return config
    ranks = launcher.size() // config.parallelism.tensor_parallel_degree  # type: ignore[attr-defined]
    share = _share(training.global_batch_size, max(1, ranks))
    training = replace(training, local_batch_size=_batch(share, training.local_batch_size))
    return replace(config, training=training)  # type: ignore[type-var]


def _share(rows: int, ranks: int) -> int:
    share, left = divmod(rows, ranks)
    if left:
        raise UsageError(
            f"training.global_batch_size: a step has {counted(rows, 'row')}, which {ranks} data-parallel "
            f"ranks cannot share equally. Ranks that can: {can_share(rows, ranks)}. For steps of another "
            "size, set it to that."
        )
    return share


def _batch(rows: int, most: int) -> int:
    """The rows of a batch, of which equal ones make up so many rows."""
    return max(n for n in range(1, min(rows, max(1, most)) + 1) if rows % n == 0)


class Parts:
    """In how many parts the data of a trainer are dealt, where it is resumed on any number of ranks."""

    def __init__(self, trainer: Any, local_batch_size: int) -> None:
        self._trainer, self._local = trainer, local_batch_size
        self._ranks = data_ranks(trainer)
        self.number = self._ranks
        load = getattr(trainer.checkpointer, "dcp_load", None)
        if load is not None:
            trainer.checkpointer.dcp_load = self._loading(load)

    def counted(self, tokens: int) -> int:
        """The tokens of one part, given those of one rank."""
        return tokens * self._ranks // self.number

    def counted_here(self, tokens: int) -> int:
        """The tokens of one rank, given those of one part."""
        return tokens * self.number // self._ranks

    def _loading(self, load: Callable[..., None]) -> Callable[..., None]:
        def load_on_these_ranks(states: dict[str, Any], **named: Any) -> None:
            begun_with = self._saved(states, named["checkpoint_id"])
            if begun_with in (None, self._ranks):
                return load(states, **named)
            goes_on = _LOADER in states
            loader = self._deal(begun_with if goes_on else self._ranks, begun_with, goes_on)
            self._trainer.dataloader = self._trainer.checkpointer.states[_LOADER] = loader
            if goes_on:
                states[_LOADER] = loader
            self.number = begun_with  # which the checkpoint has counted tokens of
            load(states, **named)
            self.number = loader.parts
            return None

        return load_on_these_ranks

    def _saved(self, states: dict[str, Any], checkpoint: Any) -> Any:
        """The parts that the data of a checkpoint's run are dealt in, if it is resumed and says so."""
        from torchtitan.components.dataloader import ParallelAwareDataloader

        if not isinstance(self._trainer.dataloader, ParallelAwareDataloader) or not (
            {_LOADER, _PROGRESS} & {*states}
        ):
            return None
        found: dict[str, Any] = {_LOADER: {"world_size": None}}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(found, checkpoint_id=checkpoint, planner=planner)
        return found[_LOADER]["world_size"]

    def _deal(self, parts: int, begun_with: int, goes_on: bool) -> PartsOfRank:
        trainer, config = self._trainer, self._trainer.config
        rows = config.training.global_batch_size
        if rows < 1:
            rows = self._local * begun_with
        share = _share(rows, self._ranks)
        if rows % parts:
            raise UsageError(
                f"training.global_batch_size: a step has {counted(rows, 'row')}, and the run began on "
                f"{parts} data-parallel ranks, so its data are in as many parts, which have equally "
                "many rows each. Set it to a multiple, or leave the place in the data out "
                "(--checkpoint.exclude_from_loading dataloader)."
            )
        of_part = rows // parts
        batch = _batch(of_part, self._local)

        def loader_of(part: int) -> Any:
            return config.dataloader.build(
                dp_world_size=parts,
                dp_rank=part,
                tokenizer=trainer.tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=batch,
                snapshot_every_n_steps=config.checkpoint.interval * (of_part // batch),
            )

        dims = trainer.parallel_dims
        rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        trainer.gradient_accumulation_steps = 1  # as what is dealt are whole steps
        place = "the data go on from where they were" if goes_on else "the data begin anew"
        line = (
            f"begun on {counted(begun_with, 'data-parallel rank')}, now on {self._ranks}: "
            f"{counted(rows, 'row')} a step, {share} on each; {place}"
        )
        announce(log, line, rank_zero=dist.get_rank() == 0)
        return PartsOfRank(loader_of, parts, of_part, range(rank * share, (rank + 1) * share))


class PartsOfRank:
    """Loads the rows that a rank has in each step; saves the places in the parts of the data that have them.

    Args:
        loader_of: makes the loader of a part.
        parts: how many there are.
        rows: those of a part in a step. Its loader yields them in equal batches.
        ours: those of this rank, where the rows of all parts are counted one after the other.
    """

    def __init__(self, loader_of: Callable[[int], Any], parts: int, rows: int, ours: range) -> None:
        self.parts, self._rows = parts, rows
        self._taken = [
            (loader_of(part), slice(max(0, ours.start - part * rows), ours.stop - part * rows))
            for part in range(ours.start // rows, -(-ours.stop // rows))
        ]

    def __iter__(self) -> Iterator[Batch]:
        loaders = [(iter(loader), rows) for loader, rows in self._taken]
        while True:
            try:
                taken = [_cut(self._step(loader), rows) for loader, rows in loaders]
            except StopIteration:
                return
            yield merged(taken)

    def _step(self, loader: Iterator[Batch]) -> Batch:
        batches: list[Batch] = []
        while sum(len(labels) for _, labels in batches) < self._rows:
            batches.append(next(loader))
        return merged(batches)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: value for loader, _ in self._taken for name, value in loader.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader, _ in self._taken:
            loader.load_state_dict(state)


def _cut(batch: Batch, rows: slice) -> Batch:
    inputs, labels = batch
    return {name: value[rows] for name, value in inputs.items()}, labels[rows]


def merged(batches: list[Batch]) -> Batch:
    """The rows of several batches in one."""
    rows = [len(labels) for _, labels in batches]
    for inputs, labels in batches:
        for name, value in {**inputs, "labels": labels}.items():
            if not isinstance(value, torch.Tensor) or not value.ndim or len(value) != len(labels):
                raise UsageError(
                    f"dataloader: {name} is {_shape(value)}, and there are {len(labels)} rows of labels. "
                    "Micro-batches are made of rows, so each value must be a tensor with one for each."
                )
    first = batches[0][0]
    try:
        inputs = {name: torch.cat([batch[name] for batch, _ in batches]) for name in first}
        return inputs, torch.cat([labels for _, labels in batches])
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"dataloader: {len(batches)} batches, of {rows} rows, have different names or lengths, so they "
            f"cannot be divided into other micro-batches: {error}. Cut or pad rows to seq_len."
        ) from None


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {[*value.shape]}"
    return f"a {type(value).__name__}"
