"""Lines that people see without having configured logging."""

from __future__ import annotations

import logging
import sys

_NAME = "torchtune_adaptive"


def announce(log: logging.Logger, line: str, level: int = logging.INFO, *, rank_zero: bool) -> None:
    """Log a line on rank 0, or print it on stderr where nobody has configured logging.

    Python itself would drop what is below a warning. Whoever adds a handler, or gives the logger
    ``torchtune_adaptive`` a higher level, decides instead. Other ranks log the line for debugging.
    """
    level = level if rank_zero else logging.DEBUG
    configured = log.hasHandlers() or logging.getLogger(_NAME).level > level
    if configured or not rank_zero:
        log.log(level, line)
    else:
        over_a_progress_bar = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{over_a_progress_bar}{_NAME}: {line}", file=sys.stderr, flush=True)
