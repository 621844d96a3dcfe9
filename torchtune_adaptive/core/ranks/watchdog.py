"""Detects a rank that died or hangs, and stops long before the process group would, saying what it did.

Each rank has a thread that publishes what its main thread is doing, and learns from rank 0 what the others
publish (``star``). Two things make a rank lost: it sends no sign of life for ``limit`` seconds (killed,
stopped, its machine gone), or it stays where it is while the others are past that point and wait for it (a
hang), for longer than the activity allows. Then every other rank reports it and exits, whatever its main
thread is waiting in; the launcher sees the exit and ends the run.

Nothing here touches the device or delays a step: the main thread writes a few attributes, no more.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, NoReturn

import torch.distributed as dist

from torchtune_adaptive.common import RankLost, another_rank_has_failed, explain, say
from torchtune_adaptive.core.ranks.agreement import Ranks, is_lost_peer
from torchtune_adaptive.core.ranks.signs import DONE, LONGEST_SILENCE, Sign, lost_rank
from torchtune_adaptive.core.ranks.star import Star
from torchtune_adaptive.core.ranks.store import open_store

EXIT_CODE = 70
"""Tells our exit from a signal's or Python's own ("internal software error" of sysexits.h)."""
_BEATS_PER_LIMIT = 20
_SLOWEST_BEAT = 2.0  # seconds between two signs of life, whatever the limit
_QUICK_BEAT = 0.5  # likewise, once a collective has broken or a stop is requested
_SILENT_BEATS = 3  # after a collective broke, a rank that misses this many is the one that broke it
_LIMIT_TO_STOP = _SILENT_BEATS * _SLOWEST_BEAT
"""Seconds of silence after which a rank is lost where a stop is requested: a launcher asks for it when a rank
has died, and kills the others after 30."""


@dataclass(eq=False, repr=False)
class Watchdog:
    """Watches over the ranks of a run. Use as a context around everything that ranks do together."""

    LONGEST_SILENCE: ClassVar = LONGEST_SILENCE

    ranks: Ranks
    """The ranks to watch; with one rank there is nothing to do."""
    limit: float
    """Seconds without any sign of life after which a rank is lost."""
    on_duty: bool = True
    """Whether it watches; if not, it does nothing."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether this rank has been asked to stop. Then it does not wait for long to save with a rank that may
    be what the others are stopped for."""

    def __post_init__(self) -> None:
        self._activity = "starting"
        self._progress = 0
        self._patience: float | None = self.limit
        self._stopped = ""
        self._alarmed = False
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Lock()
        self._store: dist.TCPStore | None = None
        self._star: Star | None = None
        self._beats = 0

    # --- called by the main thread ------------------------------------------------------------------

    def tick(self) -> None:
        """Count one more operation that every rank performs."""
        self._progress += 1

    def enter(self, activity: str, patience: float | None) -> None:
        """The main thread is in ``activity`` from now on; every rank must enter the same activities.

        A rank that stands still in it for more than ``patience`` seconds, while others wait for it, hangs.
        With ``patience=None`` it may take any time, and keep the thread from publishing meanwhile.
        """
        before, self._activity, self._patience = self._patience, activity, patience
        self._progress += 1
        if None in (before, patience) and self._star is not None:
            # Now: there may be no other chance, and who is silent after such an activity is done with it.
            self._publish()

    def allow(self, seconds: float) -> None:
        """Let the activity take so much longer on this rank, which has said what it waits for."""
        if self._patience is not None:
            self._patience += seconds
        self._publish()

    # --- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Watchdog:
        if self.on_duty and self.ranks.size > 1:
            self._store = open_store(self.ranks, timedelta(seconds=self.limit))
            key = self.ranks.from_rank_zero(secrets.token_bytes(16))
            self._star = Star(self._store, self.ranks.rank, self.ranks.size, key, self._own)
            self._publish()
            self.ranks.any(False)  # from here on, every rank's sign exists
            watches = {"watchdog": self._watch, "watchdog of rank 0": self._watch_rank_zero}
            for name, watch in watches.items():
                thread = threading.Thread(target=watch, args=[self._star], name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if not self._threads:
            if self.ranks.size > 1 and is_lost_peer(error):
                raise RankLost(
                    f"another rank ended while this rank was in '{self._activity}'. What that rank "
                    "says is the reason"
                ) from error
            return
        broken: RuntimeError | None = None
        if error is None:
            try:
                self.ranks.any(False)  # nobody stops watching while another rank still works
            except RuntimeError as last:
                error = broken = last
        lost = None
        if is_lost_peer(error):
            if self.stop_requested():
                # The launcher knows who is lost, and what it has asked for cannot be done any more.
                self._leave(f"lost contact with another rank in '{self._activity}'")
            lost = RankLost(self._who_is_missing())
        ending = lost or error
        self._stopped = DONE if ending is None else f"{type(ending).__name__}: {ending}"
        self._close()
        if lost is not None:
            raise lost from error
        if broken is not None:
            raise broken

    def _close(self) -> None:
        """End the threads and the store, in this order, and before the interpreter ends.

        A thread that still needs the interpreter when that ends makes the process abort.
        """
        self._closing.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=self.limit)
        store, self._store = self._store, None
        star, self._star = self._star, None
        assert store is not None and star is not None
        if self._threads[0].is_alive():
            return  # rank 0 does not answer, and would not answer what follows either
        with suppress(Exception):  # nobody may be left
            store.set(_left(self.ranks.rank), "")
            gone = star.missing(self._silence) if self._alarmed else {}
            # The host leaves last: the others still need it for their last calls, and to read why it ends.
            if self.ranks.is_zero:
                patience = self.limit if self._stopped == DONE else 2 * self._healthy_beat
                others = [_left(rank) for rank in range(1, self.ranks.size) if rank not in gone]
                store.wait(others, timedelta(seconds=patience))

    # --- the threads ----------------------------------------------------------------------------------

    @property
    def _healthy_beat(self) -> float:
        return min(self.limit / _BEATS_PER_LIMIT, _SLOWEST_BEAT)

    @property
    def _beat(self) -> float:
        """Seconds between two signs of life of this rank, as things are."""
        in_a_hurry = self._alarmed or self.stop_requested()
        return min(self._healthy_beat, _QUICK_BEAT) if in_a_hurry else self._healthy_beat

    @property
    def _detour(self) -> float:
        """Seconds that a sign takes at most to be passed on by rank 0; two ranks read each other's."""
        return self._beat if self.ranks.size > 2 else 0.0

    @property
    def _silence(self) -> float:
        """Seconds of silence after which a rank is lost if a collective has broken.

        One that lives hears of that within a beat as it was, and then hurries as well.
        """
        return self._healthy_beat + _SILENT_BEATS * self._beat + self._detour

    def _rest(self) -> bool:
        """Wait for a beat, or less if there is an alarm; whether the threads are to end."""
        if self._alarmed:
            return self._closing.wait(self._beat)
        self._wake.wait(self._beat)
        return self._closing.is_set()

    def _alarm(self) -> None:
        """Hurry from now on, and let the others know; called when a collective broke, here or elsewhere."""
        self._alarmed = True
        self._publish()
        self._wake.set()

    def _watch(self, star: Star) -> None:
        while not self._rest():
            self._beats += 1
            try:
                others = star.exchange()
            except Exception as error:
                if not self._closing.wait(_SLOWEST_BEAT):  # or this rank is ending anyway
                    self._stop(f"rank 0, which hosts the signs of life, does not answer ({error})")
                return
            if not self._alarmed and any(sign.alarmed for sign in star.signs.values()):
                self._alarm()
            self._judge(others, star.read)
        self._publish()  # its last sign

    def _watch_rank_zero(self, star: Star) -> None:
        """Judge rank 0 by the age of its sign, whatever the other thread waits in.

        The store answers no request while its process is stopped, or once its machine is gone. The timeout of
        requests does not end them then. That nothing is read may also be this rank's doing, if it saves and
        holds the interpreter's lock: so each beat counts as two at most, however long it took.
        """
        now = time.monotonic()
        while not (self.ranks.is_zero or self._rest()):
            now = min(time.monotonic(), now + 2 * self._beat)
            # Twice: after the lock was held, the other thread has a beat to read first.
            if self._verdict(star.signs, now) is not None and not self._closing.wait(self._beat):
                self._judge(star.signs, now)

    def _judge(self, others: dict[int, Sign], now: float) -> None:
        """Stop if one of the others is lost."""
        verdict = self._verdict(others, now)
        if verdict is None:
            return
        if self.stop_requested():
            silent = self._verdict(
                {rank: sign for rank, sign in others.items() if not sign.stopped}, now
            )
            if silent is not None:
                self._leave(silent)
        # If all ranks end for the same reason, each reports it better itself: give this one a moment. And the
        # host of the store stays until the others have read what it has just passed on.
        moment = _SLOWEST_BEAT + (self._detour if self.ranks.is_zero else 0.0)
        if not self._closing.wait(moment):
            self._stop(verdict)

    def _verdict(self, others: dict[int, Sign], now: float) -> str | None:
        limit = self.limit
        if self.stop_requested():
            limit = min(limit, _LIMIT_TO_STOP)
        if self._alarmed:
            limit = min(limit, self._silence)
        return lost_rank(self._own(), others, now, limit)

    def _publish(self) -> None:
        """This rank's sign, now; whether it arrives is for the thread to notice."""
        with suppress(Exception):
            assert self._star is not None
            self._star.publish()

    def _own(self) -> Sign:
        return Sign(
            self._activity,
            self._progress,
            self._patience,
            self._stopped,
            self._beats,
            self._alarmed,
        )

    def _who_is_missing(self) -> str:
        """The ranks that have missed a few beats, as a sentence; called when a collective broke."""
        say(
            f"rank {self.ranks.rank}: lost contact in '{self._activity}'; identifying the missing rank"
        )
        assert self._star is not None
        self._alarm()
        # A rank that saves may hold the interpreter's lock: give that one as long as before the alarm. What
        # a lost one wrote last may be read after the alarm, and only then does its silence begin.
        end = time.monotonic() + (_SILENT_BEATS + 1) * self._healthy_beat + self._silence
        missing = self._star.missing(self._silence)
        while time.monotonic() < end and not any(map(_is_surely_lost, missing.values())):
            self._closing.wait(self._beat)  # meanwhile the thread keeps listening
            missing = self._star.missing(self._silence)
        named = [
            f"rank {rank} ({sign.stopped or 'silent'}; its last sign came from '{sign.activity}')"
            for rank, sign in missing.items()
        ]
        return (
            f"lost {', '.join(named) or 'contact with another rank'} "
            f"while this rank was in '{self._activity}'"
        )

    def _stop(self, why: str) -> None:
        self._stopping.acquire()  # for good: one thread says why
        try:
            explain(
                f"{why}. Stopping: this rank would otherwise wait forever. (If that rank was merely slow, "
                "raise adaptive_batching.rank_timeout or, for a hang in training, step_timeout.)"
            )
        finally:
            # The main thread may be waiting inside a collective, where no exception can reach it.
            os._exit(EXIT_CODE)

    def _leave(self, why: str) -> NoReturn:
        """End at once: the launcher has asked for it, and waits."""
        self._stopping.acquire()
        if not another_rank_has_failed():
            say(
                f"rank {self.ranks.rank}: {why}, so no checkpoint can be saved. Stopping as requested."
            )
        os._exit(EXIT_CODE)


def _is_surely_lost(sign: Sign) -> bool:
    return bool(sign.stopped) or sign.patience is not None


def _left(rank: int) -> str:
    return f"rank {rank} has left"
