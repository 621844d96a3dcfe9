"""Says why this process ends where it will be read: last, and once.

torchrun ends the other ranks as soon as one has failed, and then prints a report of some 40 lines. Whatever
the ranks print stands above that. What the first rank to fail wrote to its error file stands at its end, as
the root cause. The format of the file is that of ``torch.distributed.elastic.multiprocessing.errors``. There
is no such report before a restart, so the rank prints its reason there as well.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torchtune_adaptive.common import launcher

MOMENT = 30.0
"""Seconds that a rank waits for the launcher to end it, once another one says why. torchrun looks often,
but that other one writes a report before it ends: on a busy machine, 5 s were not always enough."""
_CLAIM, _MISTAKE = "reason", "mistake on "
_status: int | None = None
"""The status with which this process leaves the other ranks, once it does."""


def explain(reason: str, *, known_to_all: bool = False, repeats: bool = False) -> None:
    """Tell the user in one line why this process ends; return when it may end.

    Args:
        reason: the line.
        known_to_all: whether all ranks end for this reason, so that one of them may speak for all.
        repeats: whether every attempt would end for it. torchrun makes all that it may; those that follow end
            at once (``end_if_in_vain``).
    """
    if known_to_all and launcher.local_rank() != 0:
        # Rank 0 says it, once it has written the run's report; unless that takes too long.
        moment = time.monotonic() + MOMENT
        while time.monotonic() < moment and not another_rank_has_failed():
            time.sleep(0.05)
    file = _error_file()
    if file is not None and repeats and launcher.restarts() < launcher.max_restarts():
        with suppress(OSError):
            _mistake(file).write_text(reason)
            reason += "\nIt would be the same again, so the attempts that torchrun still makes end at once."
    if file is None or not _is_reported(file, reason):
        _print(reason)


def end_if_in_vain() -> None:
    """End now if an earlier attempt has left the reason for which this one would end as well.

    torchrun starts a run again whatever its ranks end with. So this is to be called before anything that
    takes its time.
    """
    if (file := _error_file()) is None:
        return
    with suppress(OSError):
        _write(file, _mistake(file).read_text())
        sys.exit(1)


def would_repeat(error_file: str) -> bool:
    """Whether the rank with this error file ended for a reason that would be the same again. torch says
    ``<N/A>`` for one that was killed."""
    folders = Path(error_file).parents
    return len(folders) > 2 and any(folders[2].glob(f"{_MISTAKE}*"))


def named_rank(reason: str) -> int | None:
    """The rank that another one was lost with, as its reason or its watchdog's says; None if it says none."""
    found = re.match(r"rank \d+: (?:RankLost: lost )?rank (\d+)\b", reason)
    return int(found[1]) if found else None


def explain_bug(error: BaseException) -> None:
    """The same for an exception that nobody expected, with its traceback."""
    if (file := _error_file()) is None:
        traceback.print_exception(error)
        return
    callstack = "".join(traceback.format_exception(error))
    if not _is_reported(file, f"{type(error).__name__}: {error}", callstack):
        _print(callstack)


def end(reason: str) -> NoReturn:
    """End this process for a reason that holds on every rank."""
    explain(reason, known_to_all=True, repeats=True)
    sys.exit(1)


def leave(status: int) -> NoReturn:
    """End this process without a word to the other ranks, which may be gone, or wait for this one.

    What is registered to run at exit does run, as where a metric logger sends its last records. But process
    groups are not destroyed, as they would be after that: NCCL may wait there for all ranks.
    """
    global _status
    _status = status
    sys.exit(status)


@atexit.register  # early, so that it is the last
def _leave() -> None:
    if _status is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(_status)


def another_rank_has_failed() -> bool:
    """Whether a rank of this machine has given a reason; its launcher then ends all others."""
    file = _error_file()
    return file is not None and _claim(file).exists()


def note(reason: str) -> None:
    """Leave a reason that has been printed for the launcher's report as well."""
    if (file := _error_file()) is not None and not another_rank_has_failed():
        with suppress(OSError):
            _write(file, reason)


def _error_file() -> Path | None:
    """The file in which torchrun looks for the reason; None without torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file and "TORCHELASTIC_RUN_ID" in os.environ else None


def _is_reported(file: Path, reason: str, callstack: str | None = None) -> bool:
    """Leave a reason for the launcher; whether it will print that."""
    try:
        _write(file, reason, callstack)
    except OSError:
        return False
    return launcher.restarts() >= launcher.max_restarts()


def _write(file: Path, reason: str, callstack: str | None = None) -> None:
    try:
        _claim(file).touch(exist_ok=False)
    except FileExistsError:
        # Another rank has given a reason, this one or what led to it, and the launcher is about to end this
        # process. If it does not, there are two reasons.
        time.sleep(MOMENT)
    except OSError:
        pass  # then each rank gives its own
    more = {"timestamp": str(int(time.time()))}
    if callstack is not None:
        more["py_callstack"] = callstack
    file.write_text(json.dumps({"message": {"message": reason, "extraInfo": more}}))


def _claim(file: Path) -> Path:
    """Made by the first rank to fail; torchrun gives each rank a folder in one that they share."""
    return file.parent.parent / _CLAIM


def _mistake(file: Path) -> Path:
    """What all attempts of a launcher on this many ranks would end for; each has a folder beside it."""
    return file.parents[2] / f"{_MISTAKE}{launcher.size()} ranks"


def _print(reason: str) -> None:
    prefix = f"rank {launcher.rank()}: " if launcher.has_started_this() else ""
    say(f"\n{prefix}{reason}\n")


def say(line: str) -> None:
    """Print a line on stderr, whether or not there is anybody who still reads it."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
