"""The signals that ask a run to stop, and what a forked process does with those that it has inherited."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LISTENING: list[int] = []
"""The sockets that signals are written to in this process."""


def leave_to_parent() -> None:
    """Give up signals in a forked process: they are not the run's, though it has inherited the socket."""
    if LISTENING:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        LISTENING.clear()
