"""Notice a rank that died or hangs, say which and where, and stop: long before the process group would.

Each rank has a thread that publishes where its main thread is, and reads the same of the others. Two
things make a rank lost: it is not heard of at all for ``limit`` seconds (killed, stopped, its machine
gone), or it stays where it is while the others are past that point and wait for it (a hang), for longer
than the phase allows. Then every other rank says so and exits, whatever its main thread is waiting in;
the launcher sees the exit and ends the run.

Nothing here touches the device or delays a step: the main thread writes a few attributes, no more.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from torchtune_adaptive.errors import RankLost
from torchtune_adaptive.ranks.agreement import Ranks

EXIT_CODE = 70
"""Tells our exit from a signal's or Python's own ("internal software error" of sysexits.h)."""
_DONE = "done"
_BEATS_PER_LIMIT = 20
_SLOWEST_BEAT = 2.0  # seconds between two signs of life, whatever the limit
_SILENT_BEATS = 3  # after a collective broke, so many missed beats name the rank that broke it

# What collectives say when a peer is gone. Anything else is this rank's own error.
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
)


@dataclass(frozen=True)
class Sign:
    """One rank's sign of life, as another rank sees it."""

    phase: str
    progress: int
    """Counts everything that all ranks do in the same order; who is behind holds the others up."""
    patience: float | None
    """Seconds after which standing still in this phase is a hang (saving a large checkpoint never is)."""
    stopped: str = ""
    """Set when the rank has ended: why."""
    beats: int = 0
    heard: float = 0.0
    """When the sign last changed at all, on the observer's clock."""
    moved: float = 0.0
    """When its progress last changed, on the observer's clock."""


def lost_rank(own: Sign, others: dict[int, Sign], now: float, limit: float) -> str | None:
    """The sentence to stop with, or None while all is well."""
    for rank, sign in sorted(others.items()):
        if sign.stopped:
            if sign.stopped != _DONE:
                return f"rank {rank} stopped in the phase '{sign.phase}': {sign.stopped}"
            continue
        if now - sign.heard > limit:
            return (
                f"rank {rank} has not been heard of for {now - sign.heard:.0f} s, and this rank waits for it "
                f"in the phase '{own.phase}'; its last word came from the phase '{sign.phase}'"
            )
        if sign.progress >= own.progress or sign.patience is None or own.patience is None:
            continue
        if now - sign.moved > max(sign.patience, own.patience):
            return (
                f"rank {rank} has been hanging for {now - sign.moved:.0f} s in the phase '{sign.phase}', "
                f"and this rank waits for it in '{own.phase}'"
            )
    return None


class Watchdog:
    """Watches over the ranks of a run. Use as a context around everything that ranks do together.

    Args:
        ranks: the ranks to watch; with one rank there is nothing to do.
        limit: seconds without any sign of life after which a rank is lost.
        on_duty: if not, it does nothing.
    """

    def __init__(self, ranks: Ranks, limit: float, on_duty: bool = True) -> None:
        self._ranks = ranks
        self._on_duty = on_duty and ranks.size > 1
        self._limit = limit
        self._phase = "starting"
        self._progress = 0
        self._patience: float | None = limit
        self._stopped = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = 0
        self._raw: dict[int, bytes] = {}
        self._others: dict[int, Sign] = {}

    # --- what the main thread says ------------------------------------------------------------------

    def tick(self) -> None:
        """One more thing done that every rank does."""
        self._progress += 1

    def enter(self, phase: str, patience: float | None) -> None:
        """The main thread is in ``phase`` from now on; every rank must enter the same phases.

        A rank that stands still in it for more than ``patience`` seconds, while others wait for it, hangs.
        """
        self._phase, self._patience = phase, patience
        self._progress += 1

    # --- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Watchdog:
        if self._on_duty:
            self._store = self._connect()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._thread is None:
            return
        if _is_lost_peer(error):
            raise RankLost(self._who_is_missing()) from error
        if error is None:
            self._ranks.any(False)  # rank 0 hosts the store: it must not leave before the others
            self._stopped = _DONE
        else:
            self._stopped = f"{type(error).__name__}: {error}"
        self._closing.set()
        self._thread.join(timeout=self._limit)

    def _connect(self) -> dist.TCPStore:
        """A key-value store of our own, hosted by rank 0."""
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        timeout = timedelta(seconds=self._limit)
        store, port = None, 0
        if self._ranks.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            port = store.port
        port = self._ranks.from_rank_zero(port)
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        store.set(_key(self._ranks.rank), self._sign_of_life())
        self._ranks.any(False)  # from here on, every rank's key exists
        return store

    # --- the thread -----------------------------------------------------------------------------------

    @property
    def _beat(self) -> float:
        return min(self._limit / _BEATS_PER_LIMIT, _SLOWEST_BEAT)

    def _watch(self) -> None:
        while not self._closing.wait(self._beat):
            try:
                self._exchange_signs()
            except Exception as error:
                if not self._closing.wait(_SLOWEST_BEAT):  # or rank 0 has left because all is done
                    self._stop(f"rank 0, which keeps the signs of life, does not answer ({error})")
                return
            verdict = lost_rank(self._own(), self._others, time.monotonic(), self._limit)
            # If all ranks end for the same reason, each says it better itself: give this one a moment.
            if verdict is not None and not self._closing.wait(_SLOWEST_BEAT):
                self._stop(verdict)
        with suppress(Exception):  # last words; it may be that nobody is left to keep them
            self._store.set(_key(self._ranks.rank), self._sign_of_life())

    def _exchange_signs(self) -> None:
        self._beats += 1
        self._store.set(_key(self._ranks.rank), self._sign_of_life())
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        now = time.monotonic()
        for rank, raw in zip(others, self._store.multi_get([_key(r) for r in others]), strict=True):
            if raw == self._raw.get(rank):
                continue
            self._raw[rank] = raw
            sign = Sign(**json.loads(raw), heard=now, moved=now)
            before = self._others.get(rank)
            if before is not None and before.progress == sign.progress:
                sign = replace(sign, moved=before.moved)
            self._others[rank] = sign

    def _sign_of_life(self) -> str:
        return json.dumps(
            {
                "phase": self._phase,
                "progress": self._progress,
                "patience": self._patience,
                "beats": self._beats,
                "stopped": self._stopped,
            }
        )

    def _own(self) -> Sign:
        return Sign(self._phase, self._progress, self._patience)

    def _who_is_missing(self) -> str:
        """Called when a collective broke: who has not been heard of for a few beats?"""
        print(
            f"rank {self._ranks.rank}: lost contact in the phase '{self._phase}'; finding out with whom",
            file=sys.stderr,
            flush=True,
        )
        silence = _SILENT_BEATS * self._beat
        self._closing.wait(silence + self._beat)  # the thread goes on listening meanwhile
        now = time.monotonic()
        missing = [
            f"rank {rank} ({sign.stopped or 'silent'}; its last word came from the phase '{sign.phase}')"
            for rank, sign in sorted(self._others.items())
            if sign.stopped or now - sign.heard > silence
        ]
        return (
            f"lost {', '.join(missing) or 'contact with another rank'} "
            f"while this rank was in the phase '{self._phase}'"
        )

    def _stop(self, why: str) -> None:
        print(
            f"rank {self._ranks.rank}: {why}. Stopping, or it would wait for ever. "
            "(If that rank was merely slow, raise adaptive_batching.rank_timeout or, for a hang in training, "
            "step_timeout.)",
            file=sys.stderr,
            flush=True,
        )
        # The main thread may be waiting inside a collective, where no exception can reach it.
        os._exit(EXIT_CODE)


def _is_lost_peer(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _LOST_PEER_TEXTS)


def _key(rank: int) -> str:
    return f"sign of life of rank {rank}"
