"""How signs of life reach all ranks: as a star, with rank 0 in its middle.

Every rank writes its sign into a key-value store. Rank 0 reads all of them, and its own sign holds the few of
ranks that may be lost; the others read that one sign. So in each beat the store serves two requests of every
rank, where it would give out N^2 signs if every rank read all the others'.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from torchtune_adaptive.core.ranks.signs import Sign, opened, sealed, suspects

log = logging.getLogger(__name__)
_CHUNK = 1024  # signs that rank 0 reads at once; between two chunks the store serves other ranks


class Star:
    """One rank's part in the exchange of signs.

    Args:
        store: the store of all ranks.
        rank: the number of this one.
        size: the number of all.
        key: what only these ranks know.
        own: this rank's sign as it is now.
        clock: seconds since any moment; no other rank's clock need agree with it.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        size: int,
        key: bytes,
        own: Callable[[], Sign],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._key, self._own, self._clock = store, rank, key, own, clock
        self._sources = [*range(1, size)] if rank == 0 else [0]
        self._raw: dict[int, bytes] = {}
        self.signs: dict[int, Sign] = {}
        """The signs that this rank reads itself: on rank 0 those of all others, elsewhere rank 0's."""
        self.read = self._clock()
        """When it last began to read them: all that was written before is among them. Silence is measured
        until then, because the interpreter's lock may have been held since."""
        self._suspects: dict[int, Sign] = {}  # that rank 0 has passed on
        # On rank 0, the suspects and when it read them: as one value, because any thread may publish.
        self._passes_on: tuple[dict[int, Sign], float] = {}, self.read
        self._publishing = threading.Lock()
        self._warned = False

    def publish(self) -> None:
        """Write this rank's sign; any thread may do so."""
        with self._publishing:  # or an older sign could replace a newer one
            # Ages as they were when rank 0 last read: since then it cannot know.
            passed_on, read = self._passes_on
            sign = replace(self._own(), suspects=passed_on)
            self._store.set(_key_of(self._rank), sealed(sign, self._rank, self._key, read))

    def exchange(self) -> dict[int, Sign]:
        """Publish this rank's sign, read what it is to read, and return the signs to judge by now.

        What rank 0 passes on is judged when it arrives, and not again: while rank 0 is silent, the ages of
        others would grow without saying anything about them.
        """
        if not self.signs:  # until a rank is heard, it is where this one is
            now = self._clock()
            self.signs = dict.fromkeys(self._sources, replace(self._own(), heard=now, moved=now))
        if self._rank == 0:
            self._listen()
            found = suspects(self.signs, self.read)
            self._passes_on = found, self.read
            self.publish()
            return found
        self.publish()
        news = self._listen()
        if news:
            passed_on = self.signs[0].suspects
            self._suspects = {rank: sign for rank, sign in passed_on.items() if rank != self._rank}
        return self.signs | (self._suspects if news else {})

    def missing(self, silence: float) -> dict[int, Sign]:
        """The ranks that have stopped or not been heard for ``silence`` seconds, as far as is known here."""
        since = self._clock() - silence
        known = self.signs | self._suspects
        if self._rank != 0 and self.signs and self.signs[0].heard < since:
            known = self.signs  # of the others nothing has been heard since
        return {
            rank: sign for rank, sign in sorted(known.items()) if sign.stopped or sign.heard < since
        }

    def _listen(self) -> bool:
        """Read the signs of this rank's sources; whether any of them is new."""
        news, began = False, self._clock()
        for start in range(0, len(self._sources), _CHUNK):
            chunk = self._sources[start : start + _CHUNK]
            values = self._store.multi_get([_key_of(rank) for rank in chunk])
            for rank, raw in zip(chunk, values, strict=True):
                if raw != self._raw.get(rank):
                    self._raw[rank] = raw
                    news |= self._hear(rank, raw, began)
        self.read = began
        return news

    def _hear(self, rank: int, raw: bytes, began: float) -> bool:
        sign = opened(raw, rank, self._key, began)
        if sign is None:
            if not self._warned:
                log.warning(
                    f"The key-value store of the watchdog holds a value for rank {rank} that no rank of this "
                    "run has written; ignoring it, and any other like it. Another process can connect to "
                    "the store's port: check who reaches this machine."
                )
            self._warned = True
            return False
        before, now = self.signs[rank], self._clock()
        moved = before.moved if before.progress == sign.progress else now
        self.signs[rank] = replace(sign, heard=now, moved=moved)
        return True


def _key_of(rank: int) -> str:
    return f"sign of life of rank {rank}"
