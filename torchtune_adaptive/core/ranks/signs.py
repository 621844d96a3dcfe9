"""Signs of life: what a rank publishes about itself, and when others consider it lost.

Signs travel through a key-value store to which any process that reaches its port can write. So each carries
a code made with a key that only the ranks have, and what has no such code is not a sign.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass

DONE = "done"
LONGEST_SILENCE = 1800.0
"""Seconds of silence after which a rank is lost in an activity that may take any time. Loading and saving may
hold the interpreter's lock for as long as a file takes, and then no thread of that rank can publish."""


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
    heard: float = 0.0
    """Time at which the sign last changed at all, on the observer's clock."""
    moved: float = 0.0
    """Time at which its progress last changed, on the observer's clock."""


def lost_rank(own: Sign, others: dict[int, Sign], now: float, limit: float) -> str | None:
    """The sentence to stop with, or None while all is well.

    A rank is lost when it is silent for ``limit`` seconds, or for ``LONGEST_SILENCE`` if its activity or this
    rank's has no patience: the last sign of a rank that is silent may be from the activity before.
    """
    for rank, sign in sorted(others.items()):
        if sign.stopped:
            if sign.stopped != DONE:
                return f"rank {rank} stopped in '{sign.activity}': {sign.stopped}"
            continue
        may_take_long = sign.patience is None or own.patience is None
        if now - sign.heard > (max(limit, LONGEST_SILENCE) if may_take_long else limit):
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


def sealed(sign: Sign, rank: int, key: bytes) -> str:
    """``sign`` as it is published."""
    text = json.dumps([rank, sign.activity, sign.progress, sign.patience, sign.stopped, sign.beats])
    return f"{_code(text, key)} {text}"


def opened(raw: bytes, rank: int, key: bytes, now: float) -> Sign | None:
    """The sign that ``rank`` has published, received at ``now``; None if ``raw`` is anything else."""
    code, _, text = raw.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(code.encode(), _code(text, key).encode()):
        return None
    writer, activity, progress, patience, stopped, beats = json.loads(text)
    if writer != rank:
        return None
    return Sign(activity, progress, patience, stopped, beats, heard=now, moved=now)


def _code(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()
