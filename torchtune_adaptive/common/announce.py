"""Lines that people see without having configured logging."""

from __future__ import annotations

import logging
import sys

_NAME = "torchtune_adaptive"


def announce(log: logging.Logger, line: str, level: int = logging.INFO, *, rank_zero: bool) -> None:
    """Log a line on rank 0, or print it on stderr where nobody has configured logging.

    Python itself would drop what is below a warning, also where only the root logger was given a handler, as
    by ``basicConfig``. Whoever gives the logger ``torchtune_adaptive`` a level decides instead, and so does a
    root logger that is silent about warnings. Other ranks log the line for debugging.
    """
    own = logging.getLogger(_NAME).level
    if not rank_zero:
        log.debug(line)
    elif not log.hasHandlers() and own <= level:
        over_a_progress_bar = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{over_a_progress_bar}{_NAME}: {line}", file=sys.stderr, flush=True)
    elif not own and log.getEffectiveLevel() == logging.WARNING:  # which it is by default
        log.handle(log.makeRecord(log.name, level, __file__, 0, line, (), None))
    else:
        log.log(level, line)
