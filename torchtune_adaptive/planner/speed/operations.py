"""The operations of a training step, as a time model needs them, and those of any number of rows.

Which operations a step has does not depend on how many rows a micro-batch has, and what each of them computes
and moves is linear in the rows. So traces of two numbers of rows give every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    collective: ranks, and the distance between them."""
    repeats: int = 0
    """Layer, from 1, whose forward pass it repeats in the backward pass; ``ELSEWHERE`` if it repeats
    something outside of layers, 0 if it repeats nothing."""
    event: int = 0
    """Number of the event that a synchronization records, or waits for."""


class StepOperations(NamedTuple):
    """The operations of one step in order."""

    micro_batches: list[list[Operation]]
    """Operations of each one's forward and backward pass. All but the first are alike."""
    update: list[Operation]
    """Operations of clipping and the optimizer."""

    def parts(self) -> list[list[Operation]]:
        return [*self.micro_batches, self.update]

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
    if not share:
        return few
    parts = [_operations_at(a, b, share) for a, b in zip(few.parts(), many.parts(), strict=True)]
    return StepOperations(parts[:-1], parts[-1])


def _operations_at(
    few: Sequence[Operation], many: Sequence[Operation], share: float
) -> list[Operation]:
    if len(few) != len(many):
        raise DifferentOperations(f"{len(few)} and {len(many)} operations")
    between: dict[tuple[Operation, Operation], Operation] = {}  # layers repeat themselves
    found = []
    for a, b in zip(few, many, strict=True):
        if a.kind in SYNCHRONIZATION:
            found.append(a)
            continue
        if (a.name, a.stream, len(a.shape)) != (b.name, b.stream, len(b.shape)):
            raise DifferentOperations(f"{a.name} and {b.name}")
        if (a, b) not in between:
            between[a, b] = _between(a, b, share)
        found.append(between[a, b])
    return found


def _between(a: Operation, b: Operation, share: float) -> Operation:
    def line(x: float, y: float) -> float:
        return x + share * (y - x)

    return a._replace(
        flops=line(a.flops, b.flops),
        nbytes=line(a.nbytes, b.nbytes),
        fused_bytes=line(a.fused_bytes, b.fused_bytes),
        shape=tuple(max(1.0, line(x, y)) for x, y in zip(a.shape, b.shape, strict=True)),
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
