"""Signs of life: what a rank publishes about itself, and when others consider it lost.

Signs travel through a key-value store to which any process that reaches its port can write. So each carries
a code made with a key that only the ranks have, and what has no such code is not a sign. No clock is compared
with another machine's: a sign that is passed on carries its ages.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import islice
from math import inf

DONE = "done"
LONGEST_SILENCE = 1800.0
"""Seconds of silence after which a rank is lost in an activity that may take any time. Loading and saving may
hold the interpreter's lock for as long as a file takes, and then no thread of that rank can publish."""
MOST_SUSPECTS = 8  # of each kind; as many ranks as a machine often has


@dataclass(frozen=True)
class Sign:
    """One rank's sign of life, as another rank sees it."""

    activity: str
    progress: int
    """Count of everything that all ranks do in the same order; who is behind holds the others up."""
    patience: float | None
    """Seconds without progress after which a rank hangs in this activity; None if it may take any time."""
    stopped: str = ""
    """Reason why the rank has ended, once it has."""
    beats: int = 0
    alarmed: bool = False
    """Whether a collective of this rank has broken, or of one that it has heard of."""
    heard: float = 0.0
    """Time at which the sign last changed at all, on the observer's clock."""
    moved: float = 0.0
    """Time at which its progress last changed, on the observer's clock."""
    suspects: dict[int, Sign] = field(default_factory=dict)
    """In rank 0's sign: the last signs of the ranks that may be lost, as rank 0 has received them."""


def lost_rank(own: Sign, others: dict[int, Sign], now: float, limit: float) -> str | None:
    """The sentence to stop with, or None while all is well.

    A rank is lost when it is silent for ``limit`` seconds, or for ``LONGEST_SILENCE`` if its activity has no
    patience. Whether this rank's has does not matter: one that does not arrive in a save is waited for there.

    Args:
        now: a time before which nothing was written that ``others`` lack, on the clock of their ``heard``.
    """
    for rank, sign in sorted(others.items()):
        if sign.stopped:
            if sign.stopped != DONE:
                return f"rank {rank} stopped in '{sign.activity}': {sign.stopped}"
            continue
        if now - sign.heard > (max(limit, LONGEST_SILENCE) if sign.patience is None else limit):
            return (
                f"rank {rank} has sent no sign of life for {now - sign.heard:.0f} s, and this rank waits "
                f"for it in '{own.activity}'; its last sign came from '{sign.activity}'"
            )
        if sign.progress >= own.progress or sign.patience is None or own.patience is None:
            continue
        if now - sign.moved > max(sign.patience, own.patience):
            return (
                f"rank {rank} has been hanging for {now - sign.moved:.0f} s in '{sign.activity}', "
                f"and this rank waits for it in '{own.activity}'"
            )
    return None


def suspects(signs: dict[int, Sign], now: float) -> dict[int, Sign]:
    """The few of ``signs`` that are enough for any rank to judge by.

    If ``lost_rank`` names one of all ranks, it names one of these as well, whatever the rank that asks is
    doing and whatever its limit is.
    """
    alive = [rank for rank, sign in signs.items() if not sign.stopped]
    ended = [rank for rank, sign in signs.items() if sign.stopped]
    longest_silent = partial(nsmallest, MOST_SUSPECTS, key=lambda rank: signs[rank].heard)
    found = [
        *nsmallest(
            MOST_SUSPECTS, ended, key=lambda rank: (signs[rank].stopped == DONE, signs[rank].heard)
        ),
        # Apart, because these may be silent for long without being lost.
        *longest_silent(rank for rank in alive if signs[rank].patience is None),
        *longest_silent(rank for rank in alive if signs[rank].patience is not None),
        *islice(_overdue({rank: signs[rank] for rank in alive}, now), MOST_SUSPECTS),
    ]
    return {rank: signs[rank] for rank in found}


def _overdue(signs: dict[int, Sign], now: float) -> Iterator[int]:
    """For each progress, of the ranks behind it the one that has stood still longest, if for too long."""
    late = (
        (sign.progress, sign.moved, rank)
        for rank, sign in signs.items()
        if sign.patience is not None and now - sign.moved > sign.patience
    )
    longest = inf
    for _, moved, rank in sorted(late):
        if moved < longest:
            longest = moved
            yield rank


def sealed(sign: Sign, rank: int, key: bytes, now: float = 0.0) -> str:
    """``sign`` as it is published, with the ages that its suspects have at ``now``."""
    passed_on = [
        [other, *_said(said), round(now - said.heard, 3), round(now - said.moved, 3)]
        for other, said in sign.suspects.items()
    ]
    text = json.dumps([rank, *_said(sign), sign.beats, sign.alarmed, passed_on])
    return f"{_code(text.encode(), key)} {text}"


def opened(raw: bytes, rank: int, key: bytes, now: float) -> Sign | None:
    """The sign that ``rank`` has published, received at ``now``; None if ``raw`` is anything else."""
    code, _, text = raw.partition(b" ")
    if not hmac.compare_digest(code, _code(text, key).encode()):
        return None
    writer, activity, progress, patience, stopped, beats, alarmed, passed_on = json.loads(text)
    if writer != rank:
        return None
    suspects = {
        other: Sign(act, done, patient, end, heard=now - silent, moved=now - still)
        for other, act, done, patient, end, silent, still in passed_on
    }
    return Sign(activity, progress, patience, stopped, beats, alarmed, now, now, suspects)


def _said(sign: Sign) -> tuple[str, int, float | None, str]:
    return sign.activity, sign.progress, sign.patience, sign.stopped


def _code(text: bytes, key: bytes) -> str:
    return hmac.digest(key, text, "sha256").hex()
