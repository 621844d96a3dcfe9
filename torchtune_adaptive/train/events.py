"""What changed the batch during training: a log line and a row of JSON for each event."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torchtune_adaptive.batching.split import Split

log = logging.getLogger(__name__)


EVENTS_NAME = "batch_size_events.jsonl"


class Events:
    """What happened to the batch in training: a log line and a row of JSON for each.

    Args:
        folder: where the file lies; None on ranks that keep silent. A resumed run goes on with the file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / EVENTS_NAME if folder else None

    def changed(self, step: int, reason: str, **what: tuple[int, int]) -> None:
        """Something, as ``micro_batch``, is another one from ``step`` on; before and after."""
        if self._path is None:
            return
        (first, change), *others = (
            (name.replace("_", "-" if name == "micro_batch" else " "), f"{before} -> {after}")
            for name, (before, after) in what.items()
        )
        line = f"{first} {change} ({reason}, step {step})"
        log.info("; ".join([line, *(f"{name} {change}" for name, change in others)]))
        self._write({"step": step, "reason": reason, **{k: list(v) for k, v in what.items()}})

    def grown(self, before: Split, after: Split, samples: int, step: int, reason: str) -> None:
        """The global batch is another one from ``step`` on; as ``schedule.Replay`` reads it."""
        if self._path is None:
            return
        log.info(
            f"global batch {before.global_batch} -> {after.global_batch} ({reason}, after {samples} samples, "
            f"step {step}): {after.micro_batch} x {after.accumulation} x {after.ranks} ranks"
        )
        self._write(
            {
                "step": step,
                "reason": reason,
                "samples": samples,
                "global_batch": [before.global_batch, after.global_batch],
                "micro_batch": [before.micro_batch, after.micro_batch],
                "accumulation": [before.accumulation, after.accumulation],
            }
        )

    def noticed(self, step: int, what: str) -> None:
        """Something that changed nothing."""
        if self._path is None:
            return
        log.warning(f"{what} (step {step})")
        self._write({"step": step, "reason": what})

    def _write(self, row: dict[str, Any]) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
