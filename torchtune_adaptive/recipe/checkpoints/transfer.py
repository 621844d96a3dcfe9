"""Files that ranks send each other, from a folder on one machine into a folder on another."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchtune_adaptive.common import durable

SILENCE = 60.0
"""Seconds that a rank waits for another one's next piece."""
_PIECE = 1 << 24
"""Bytes that are sent at once."""
_Pieces = dict[int, Iterator[torch.Tensor]]
"""Of what is sent to each rank, or received."""


@dataclass(frozen=True)
class Sent:
    """A file that one rank sends to another."""

    name: str
    size: int
    checksum: str
    """SHA-256 of its content."""
    source: int
    target: int


class NoAnswer(Exception):
    """A rank that neither sends nor receives."""

    def __init__(self, rank: int, is_late: bool) -> None:
        super().__init__(rank, is_late)
        self.rank, self.is_late = rank, is_late


def exchange(
    files: Iterable[Sent],
    group: dist.ProcessGroup,
    folder: Path,
    into: Path,
    longest: float,
) -> set[str]:
    """Send the files that others need from this rank, and receive those that it needs; on all ranks at once.

    Each rank goes through its files in the same rounds as those that it sends to, and waits for nobody else.
    What cannot be read here, or not be written, is left out, and delays nothing else.

    Args:
        files: what is sent, the same on all ranks.
        group: a gloo group of all ranks.
        folder: the folder of what this rank sends.
        into: the folder of what it receives.
        longest: the seconds that all of it may take.

    Returns:
        The names of what has arrived, with the content that it should have.

    Raises:
        NoAnswer: the group is of no use any more.
    """
    rank, end = group.rank(), time.monotonic() + longest
    sent, received = defaultdict[int, list[Sent]](list), defaultdict[int, list[Sent]](list)
    for each in files:
        if each.source == rank:
            sent[each.target].append(each)
        elif each.target == rank:
            received[each.source].append(each)
    outgoing = {peer: _pieces(some, folder) for peer, some in sent.items()}
    arrived = set[str]()
    incoming = {peer: _arriving(some, into, arrived) for peer, some in received.items()}
    while outgoing or incoming:
        if time.monotonic() > end:
            raise NoAnswer(min({*outgoing, *incoming}), is_late=True)
        _round(outgoing, incoming, group)
    return arrived


def _round(outgoing: _Pieces, incoming: _Pieces, group: dist.ProcessGroup) -> None:
    """Send the next piece to each rank, and receive the next one of each; leave out those that are done."""
    # With the pieces, for as long as they are sent.
    begun: list[tuple[int, torch.Tensor, dist.Work]] = []
    for peers, is_sent in ((outgoing, True), (incoming, False)):
        for peer in [*peers]:
            if (piece := next(peers[peer], None)) is None:
                del peers[peer]
                continue
            with _answering(peer):
                if is_sent:
                    work = dist.isend(piece, group=group, group_dst=peer)
                else:
                    work = dist.irecv(piece, group=group, group_src=peer)
            assert work is not None
            begun.append((peer, piece, work))
    for peer, _, work in begun:
        with _answering(peer):
            work.wait(timedelta(seconds=SILENCE))


@contextmanager
def _answering(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise NoAnswer(peer, is_late="Timed out" in str(error)) from error


def _pieces(files: Sequence[Sent], folder: Path) -> Iterator[torch.Tensor]:
    """The content of files, piece by piece; of one that cannot be read, as much of something else."""
    for each in files:
        for start in range(0, each.size, _PIECE):
            piece = torch.zeros(min(_PIECE, each.size - start), dtype=torch.uint8)
            with suppress(OSError), (folder / each.name).open("rb") as file:
                file.seek(start)
                file.readinto(piece.numpy().data)
            yield piece


def _arriving(files: Sequence[Sent], into: Path, arrived: set[str]) -> Iterator[torch.Tensor]:
    """Where the next piece of files that arrive is to be put, each of which is written when the next one is
    asked for. The names of those that are whole are added to ``arrived``."""
    for each in files:
        file = durable.HashedFile(into / each.name, flush=False)
        for start in range(0, each.size, _PIECE):
            piece = torch.empty(min(_PIECE, each.size - start), dtype=torch.uint8)
            yield piece
            file.write(piece.numpy().data)
        with suppress(OSError):
            file.close()
            if file.checksum == each.checksum:
                arrived.add(each.name)
                continue
        with suppress(OSError):
            (into / each.name).unlink(missing_ok=True)
