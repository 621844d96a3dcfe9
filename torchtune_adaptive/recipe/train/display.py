"""Shows how far training is: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import logging
import math
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
        self._total = total
        on_terminal = log.isEnabledFor(logging.INFO) and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, desc=self._name) if on_terminal else None
        self._line = ""
        """The last step, unless it has been shown."""
        self._shown_at = -math.inf  # the first step is shown at once

    def step(self, done: int, number: int, said: str) -> None:
        """Show that step ``number`` of the run is done, and with it so many base steps of the epoch.

        ``said`` has the numbers of the step that people watch.
        """
        if self._bar is not None:
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        self._line = f"{self._name}, {done} of {self._total}: step {number}, {said}"
        if time.monotonic() - self._shown_at >= EVERY_SECONDS:
            self._say()

    def close(self) -> None:
        """The epoch is over, or interrupted."""
        if self._bar is not None:
            self._bar.close()
        elif self._line:
            self._say()

    def _say(self) -> None:
        log.info(self._line)
        self._line, self._shown_at = "", time.monotonic()


@contextmanager
def messages_beside_the_bar() -> Iterator[None]:
    """A context around an epoch: our messages go above the bar, where there is one."""
    if not sys.stderr.isatty():
        yield
        return
    with logging_redirect_tqdm([logging.getLogger("torchtune_adaptive")]):
        yield
