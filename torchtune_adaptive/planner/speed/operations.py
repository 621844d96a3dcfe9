"""The operations of a training step, as a time model needs them, and those of any number of rows.

Which operations a step has does not depend on how many rows a micro-batch has, and what each of them computes
and moves is linear in the rows. So traces of two numbers of rows give every other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchtune_adaptive.common import packed_rows, unpacked_rows

# Kinds of operations.
GEMM = "gemm"
ATTENTION = "attention"
MEMORY = "memory"
"""Operations limited by memory bandwidth: all that are none of the others."""
COLLECTIVE = "collective"
COPY = "copy"
"""Copies between the device and the host."""
RECORD = "record"
WAIT = "wait"
"""A stream's waiting for a recorded event."""
HOST_WAIT = "host wait"
"""The host's waiting for an event, or (0) for all that its stream was given."""
ELSEWHERE = -1
SYNCHRONIZATION = (RECORD, WAIT, HOST_WAIT)

GATHERS, REDUCES = "all_gather_copy_in", "chunk_cat"
"""Names of the operations by which FSDP2 begins to gather parameters, and to reduce gradients."""


class Operation(NamedTuple):
    """An operation of a traced step."""

    kind: str
    name: str
    phase: str
    stream: int
    dtype: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    """Bytes read and written; of a collective, the whole tensor's; of a copy, those copied."""
    fused_bytes: float = 0.0
    """Bytes that are left if a compiler fuses the operation with its neighbors."""
    joins: bool = False
    """Whether a compiler would make it part of the same kernel as the operation before it."""
    shape: tuple[float, ...] = ()
    """Dimensions. Of a matrix product: batch, m, n, k; of attention: heads in all rows, queries, keys,
    dimension of a head; of a norm's backward pass, a softmax, or a sum down the columns: rows, columns; of a
    collective: ranks, and the distance between them; of ``GATHERS`` and ``REDUCES``: parameters."""
    repeats: int = 0
    """Layer, from 1, whose forward pass it repeats in the backward pass; ``ELSEWHERE`` if it repeats
    something outside of layers, 0 if it repeats nothing."""
    times: float = 1.0
    """How many operations it stands for, which compute and move that together."""
    event: int = 0
    """Number of the event that a synchronization records, or waits for."""


class StepOperations(NamedTuple):
    """The operations of one step in order."""

    micro_batches: list[list[Operation]]
    """Operations of each one's forward and backward pass: of the first, of those between if they are unlike
    the last, and of the last."""
    update: list[Operation]
    """Operations of clipping and the optimizer."""

    def parts(self) -> list[list[Operation]]:
        return [*self.micro_batches, self.update]

    def of_micro_batches(self, number: int) -> list[list[Operation]]:
        """The operations of each micro-batch in a step that has so many."""
        first, last = self.micro_batches[0], self.micro_batches[-1]
        between = self.micro_batches[1:2] or [first]
        return [first, *between * (number - 2), last][:number]

    @property
    def dtype(self) -> str:
        """The type of the numbers that most is computed with."""
        flops: dict[str, float] = {}
        for one in self.all():
            flops[one.dtype] = flops.get(one.dtype, 0.0) + one.flops
        return max(flops, key=lambda dtype: flops[dtype])

    def all(self) -> Iterator[Operation]:
        for part in self.parts():
            yield from part


class DifferentOperations(Exception):
    """Steps of different sizes do not have the same operations."""


def at_rows(few: StepOperations, many: StepOperations, share: float) -> StepOperations:
    """A step between those of ``few`` rows (a share of 0) and of ``many`` (1), or beyond them.

    Raises:
        DifferentOperations: the two differ in more than sizes.
    """
    return interpolated([few, many], [1 - share, share]) if share else few


def interpolated(steps: Sequence[StepOperations], weights: Sequence[float]) -> StepOperations:
    """A step whose sizes are those of several steps, weighted.

    Raises:
        DifferentOperations: these differ in more than sizes.
    """
    parts = [_interpolated(part, weights) for part in zip(*(s.parts() for s in steps), strict=True)]
    return StepOperations(parts[:-1], parts[-1])


def _interpolated(
    steps: Sequence[Sequence[Operation]], weights: Sequence[float]
) -> list[Operation]:
    if len(counts := {*map(len, steps)}) > 1:
        raise DifferentOperations(f"{' and '.join(map(str, sorted(counts)))} operations")
    known: dict[tuple[Operation, ...], Operation] = {}  # layers repeat themselves
    found = []
    for each in zip(*steps, strict=True):
        first = each[0]
        if first.kind in SYNCHRONIZATION:
            found.append(first)
            continue
        if len({(one.name, one.stream, len(one.shape)) for one in each}) > 1:
            raise DifferentOperations(" and ".join(one.name for one in each))
        if each not in known:
            known[each] = _weighted(each, weights)
        found.append(known[each])
    return found


def _weighted(each: Sequence[Operation], weights: Sequence[float]) -> Operation:
    def total(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    shapes = zip(*(one.shape for one in each), strict=True)
    return each[0]._replace(
        flops=total(one.flops for one in each),
        nbytes=total(one.nbytes for one in each),
        fused_bytes=total(one.fused_bytes for one in each),
        # Kernels divide dimensions into tiles, so 128 must not be a little more.
        shape=tuple(max(1.0, round(total(sizes), 6)) for sizes in shapes),
    )


def packed_up(step: StepOperations) -> dict[str, Any]:
    """A step for JSON. Layers repeat themselves, so each different operation is stored once, without its
    event, which is the last field."""
    kinds: dict[tuple[Any, ...], int] = {}
    parts = [
        packed_rows((kinds.setdefault(one[:-1], len(kinds)), one.event) for one in part)
        for part in step.parts()
    ]
    return {"kinds": [list(kind) for kind in kinds], "parts": parts}


def unpacked(packed: Mapping[str, Any]) -> StepOperations:
    """The step that was packed up."""
    kinds = [Operation(*kind) for kind in packed["kinds"]]
    kinds = [kind._replace(shape=tuple(kind.shape)) for kind in kinds]
    *micro_batches, update = (
        [
            kinds[number]._replace(event=event) if event else kinds[number]
            for number, event in unpacked_rows(part, 2)
        ]
        for part in packed["parts"]
    )
    return StepOperations(micro_batches, update)
