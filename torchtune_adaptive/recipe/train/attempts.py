"""The attempts of a run: how often ranks have begun it, how far each came, and when one more is in vain.

Rank 0 keeps this in a small file of the output folder. It writes the file when an attempt begins and ends,
and once a second between, so that the next attempt knows what is done again, even where this one is killed.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import NoProgress, counted, duration, not_essential

log = logging.getLogger(__name__)
ATTEMPTS_NAME = ".attempt.json"
_LENGTH = 1000  # bytes that the file has at least
_LONGEST = 1 << 16  # bytes that are read of it
_EVERY = 1.0  # seconds between two writes
MOST_IN_VAIN = 3
"""Attempts of one launcher that begin at the same checkpoint, one after the other, before it is given up."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run."""

    ranks: int
    launch: str | None = None
    """What tells its launcher from all others; None without one that starts ranks again."""
    checkpoint: str | None = None
    """The newest checkpoint when it began; None if there was none."""
    number: int = 1
    """Counted from 1 since the run began."""
    in_vain: int = 1
    """The attempts of this launcher that began at this checkpoint, up to this one."""
    reached: int = 0
    """The last step that this or an earlier attempt has trained."""
    again: int = 0
    """The steps that attempts have trained again, all together."""
    began: int | None = None
    """The step after which the last attempt began that came to train."""
    last_sign: float = field(default_factory=time.time)
    """The time of the last step, or of the beginning."""
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """What tells this run from all others."""

    def next(self, other: Attempt) -> Attempt:
        """The ``other`` attempt as the one that begins after this one.

        Raises:
            NoProgress: those before it have begun where it would begin, and have come to no checkpoint.
        """
        launch, checkpoint = other.launch, other.checkpoint
        is_same = launch is not None and (launch, checkpoint) == (self.launch, self.checkpoint)
        if is_same and self.in_vain >= MOST_IN_VAIN:
            where = f"from {checkpoint}" if checkpoint else "from the beginning, with no checkpoint"
            raise NoProgress(
                f"{self.in_vain} attempts in a row have begun {where}, and none came to the next checkpoint; "
                "each has said above why it ended. Mend that, or let save_every_n_steps be smaller, and "
                "start the run anew: the count begins anew then."
            )
        return replace(
            self,
            ranks=other.ranks,
            launch=launch,
            checkpoint=checkpoint,
            number=self.number + 1,
            in_vain=self.in_vain + 1 if is_same else 1,
        )


class Attempts:
    """This attempt and the one before, on rank 0.

    Args:
        folder: the output folder.
        now: this attempt, if it is the first.
        resumes: whether the run goes on from checkpoints, or else begins anew.

    Raises:
        NoProgress: earlier attempts came no further.
    """

    def __init__(self, folder: Path, now: Attempt, resumes: bool) -> None:
        self._path = folder / ATTEMPTS_NAME
        before = _read(self._path)
        is_restart = before is not None and now.launch is not None and before.launch == now.launch
        self.before = before if resumes or is_restart else None
        """The attempt before this one."""
        self.now = self.before.next(now) if self.before else now
        self._seconds = time.time() - self.before.last_sign if self.before and is_restart else None
        self._began_after = 0
        self._file: int | None = None
        self._written = 0.0
        with not_essential(f"{self._path}, which counts attempts,"):
            folder.mkdir(parents=True, exist_ok=True)
            # Not through a link, at whose end another file would be written.
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._note()

    def begin_after(self, step: int) -> None:
        """Training goes on after this step; 0 if it begins."""
        self._began_after = step
        changes: dict[str, Any] = {"began": step}
        if self.before is not None:
            changes["again"] = self.before.again + max(0, self.before.reached - step)
            if self.before.began is not None and step > self.before.began:
                changes["in_vain"] = 1  # there are snapshots between two checkpoints
        self._note(**changes)

    def facts(self) -> dict[str, Any] | None:
        """What an event says of an attempt that is not the first."""
        before, now = self.before, self.now
        if before is None:
            return None
        facts: dict[str, Any] = {"attempt": now.number, "ranks": [before.ranks, now.ranks]}
        if again := self.done_again:
            facts["steps_again"] = again
        if self._seconds is not None:
            facts["seconds_since_last_step"] = round(self._seconds, 1)
        return facts

    def text(self) -> str:
        """The same, as people read it."""
        assert self.before is not None
        ranks = counted(self.now.ranks, "rank")
        if self.before.ranks != self.now.ranks:
            ranks += f" ({self.before.ranks} before)"
        start = f"from step {self._began_after:,}" if self._began_after else "from the beginning"
        again = f"; {self.done_again} again" if self.done_again else ""
        since = "" if self._seconds is None else f"; {duration(self._seconds)} after the last step"
        return f"attempt {self.now.number} on {ranks}, {start}{again}{since}"

    @property
    def done_again(self) -> str:
        """The steps that this attempt trains again, as people read them."""
        last = self.before.reached if self.before else 0
        first = self._began_after + 1
        if last < first:
            return ""
        return f"step {first:,}" if last == first else f"steps {first:,}-{last:,}"

    def is_done_again(self, step: int) -> bool:
        """Whether an earlier attempt has trained this step."""
        return self.before is not None and step <= self.before.reached

    def reached(self, step: int) -> None:
        """A step is done."""
        self.now = replace(self.now, reached=max(step, self.now.reached), last_sign=time.time())
        if time.monotonic() >= self._written + _EVERY:
            self._note()

    def saved_when_stopped(self) -> None:
        """The run was asked to stop, and has saved: the next attempt is not one more in vain."""
        self._note(in_vain=0)

    def forget(self) -> None:
        """There was nothing to do, so this was no attempt."""
        if self.before is not None:
            self.now = self.before
            self._note()
        else:
            self._path.unlink(missing_ok=True)

    def _note(self, **changes: Any) -> None:
        self.now = replace(self.now, **changes)
        if self._file is None:
            return
        try:
            # One write, and never shorter: what is killed leaves the old text or the new one.
            length = max(_LENGTH, os.fstat(self._file).st_size)
            os.pwrite(self._file, json.dumps(asdict(self.now)).ljust(length).encode(), 0)
            self._written = time.monotonic()
        except OSError as error:
            log.warning(f"{self._path}, which counts attempts, is not written any more: {error}.")
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        self._note()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _read(path: Path) -> Attempt | None:
    """The last attempt of a run; None if there was none, or the file says nothing."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError, ValueError, TypeError), open(os.open(path, flags), "rb") as file:
        return Attempt(**json.loads(file.read(_LONGEST)))
    return None
