"""Shows how far training is: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0
"""Seconds between two lines, where there is no terminal."""


class EpochDisplay:
    """How far an epoch is, in base steps; not shown where our messages are not (other ranks, ``--quiet``)."""

    def __init__(self, epoch: int, epochs: int, total: int, done: int) -> None:
        self._name = f"epoch {epoch + 1} of {epochs}"
        self._total, self._done = total, done
        self._shown = -1
        self._on = log.isEnabledFor(logging.INFO)
        on_terminal = self._on and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, desc=self._name) if on_terminal else None
        self._since = time.monotonic()
        self._line = ""

    def step(self, done: int, number: int, loss: float, tokens_per_second: float) -> None:
        """Show that step ``number`` of the run is done, and with it so many base steps of the epoch."""
        self._done = done
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.4g}, {tokens_per_second:,.0f} tokens/s", refresh=False
            )
            self._bar.update(done - self._bar.n)
            return
        self._line = (
            f"{self._name}, {done} of {self._total}: step {number}, loss {loss:.4g}, "
            f"{tokens_per_second:,.0f} tokens/s"
        )
        now = time.monotonic()
        if self._shown < 0 or now - self._since >= EVERY_SECONDS:
            self._say(now)

    def close(self) -> None:
        """The epoch is over, or interrupted."""
        if self._bar is not None:
            self._bar.close()
        elif self._line and self._shown != self._done:
            self._say(time.monotonic())

    def _say(self, now: float) -> None:
        self._since, self._shown = now, self._done
        log.info(self._line)


@contextmanager
def messages_beside_the_bar() -> Iterator[None]:
    """A context around an epoch: our messages go above the bar, where there is one."""
    if not sys.stderr.isatty():
        yield
        return
    with logging_redirect_tqdm([logging.getLogger("torchtune_adaptive")]):
        yield
