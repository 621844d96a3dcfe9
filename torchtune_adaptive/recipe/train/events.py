"""Everything that changes the course of a training: a log line and a line of JSON for each event."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import counted, not_essential
from torchtune_adaptive.core import Ranks, Split
from torchtune_adaptive.recipe.settings.asked import Asked

log = logging.getLogger(__name__)


EVENTS_NAME = "batch_size_events.jsonl"


def changes_in_words(what: Mapping[str, tuple[Any, Any]]) -> str:
    """Values by name, before and after, as people read them: ``micro-batch 8 -> 4``."""
    return "; ".join(map(_in_words, what.items()))


def _in_words(change: tuple[str, tuple[Any, Any]]) -> str:
    name, (before, after) = change
    return f"{name.replace('_', '-' if name == 'micro_batch' else ' ')} {before} -> {after}"


class Events:
    """Logs what happens to a training, its batch above all, and appends it to a JSON Lines file.

    Args:
        folder: the folder of the file; None on ranks that write nothing. A resumed run appends to the file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / EVENTS_NAME if folder else None

    @classmethod
    def of(cls, asked: Asked, ranks: Ranks) -> Events:
        """Those of a run, on this rank."""
        return cls(Path(asked["output_dir"]) if ranks.is_zero else None)

    def changed(self, step: int, reason: str, **what: tuple[Any, Any]) -> None:
        """Values such as ``micro_batch=(8, 4)`` (before, after) change from ``step`` on."""
        first, *others = map(_in_words, what.items())
        line = "; ".join([f"{first} ({reason}, step {step})", *others])
        self._put({"step": step, "reason": reason, **{k: list(v) for k, v in what.items()}}, line)

    def grown(self, before: Split, after: Split, samples: int, step: int, reason: str) -> None:
        """The global batch changes from ``step`` on; ``schedule.Replay`` reads this record."""
        self._put(
            {
                "step": step,
                "reason": reason,
                "samples": samples,
                "global_batch": [before.global_batch, after.global_batch],
                "micro_batch": [before.micro_batch, after.micro_batch],
                "accumulation": [before.accumulation, after.accumulation],
            },
            f"global batch {before.global_batch} -> {after.global_batch} ({reason}, after "
            f"{counted(samples, 'sample')}, step {step}): {after.micro_batch} x {after.accumulation} x "
            f"{counted(after.ranks, 'rank')}",
        )

    def resumed(self, step: int, source: str, changes: list[str]) -> None:
        """The run goes on from a checkpoint after ``step``. The log has said so, and what has changed."""
        self._put({"step": step, "reason": f"resumed from {source}", "changes": changes})

    def attempted(self, step: int, what: str, facts: Mapping[str, Any]) -> None:
        """Another attempt goes on after ``step``."""
        self._put({"step": step, "reason": what, **facts}, f"{what[0].upper()}{what[1:]}.")

    def noticed(self, step: int, what: str) -> None:
        """Warn about something that changed nothing."""
        self._put({"step": step, "reason": what}, f"{what} (step {step})", logging.WARNING)

    def _put(self, row: dict[str, Any], line: str | None = None, level: int = logging.INFO) -> None:
        if self._path is None:
            return
        if line is not None:
            log.log(level, line)
        with not_essential(f"An event in {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o666), "a") as file:
                file.write(json.dumps(row) + "\n")
