"""When a rank is lost, what counts as a sign of life, and what ends a process; the clock is an argument."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.signs import LONGEST_SILENCE, Sign, lost_rank, opened, sealed
from torchtune_adaptive.core.ranks.watchdog import EXIT_CODE, Watchdog

OWN = Sign("trial of 8 rows", progress=50, patience=45.0)
HEALTHY = Sign("trial of 8 rows", progress=50, patience=45.0, heard=99.0, moved=99.0)
KEY = b"known to the ranks"


def verdict(now: float = 100.0, own: Sign = OWN, **changes: object) -> str | None:
    others = {0: HEALTHY, 3: replace(HEALTHY, **changes)}  # type: ignore[arg-type]
    return lost_rank(own, others, now, limit=45)


def test_all_is_well() -> None:
    assert verdict() is None
    assert lost_rank(OWN, {}, 0.0, 45) is None


def test_a_silent_rank_is_named_with_its_last_activity() -> None:
    message = verdict(heard=50.0, activity="trial of 4 rows")
    assert message == (
        "rank 3 has sent no sign of life for 50 s, and this rank waits for it in "
        "'trial of 8 rows'; its last sign came from 'trial of 4 rows'"
    )
    assert verdict(heard=56.0) is None


def test_a_rank_that_stands_still_while_this_one_waits_for_it_hangs() -> None:
    message = verdict(moved=50.0, progress=49)
    assert (
        message is not None and "rank 3 has been hanging for 50 s in 'trial of 8 rows'" in message
    )


def test_a_rank_that_is_as_far_as_this_one_is_not_waited_for() -> None:
    assert verdict(moved=1.0, progress=50) is None  # both wait for a third, or both compute
    assert verdict(moved=1.0, progress=51) is None


def test_no_rank_hangs_in_an_activity_without_patience() -> None:
    assert verdict(moved=1.0, progress=49, patience=None) is None
    assert verdict(own=replace(OWN, patience=None), moved=1.0, progress=49) is None


def test_silence_in_an_activity_without_patience_is_bounded_but_long() -> None:
    """A rank that saves may hold the interpreter's lock."""
    now = 10_000.0

    def at(heard: float) -> str | None:
        sign = replace(HEALTHY, patience=None, heard=heard, moved=heard)
        return lost_rank(OWN, {3: sign}, now, limit=45)

    assert at(now - 300.0) is None, "a shard of 5 GB on a slow disk"
    assert at(now - LONGEST_SILENCE + 1) is None
    assert "rank 3 has sent no sign of life" in str(at(now - LONGEST_SILENCE - 1))


def test_a_silent_rank_is_lost_as_soon_where_this_rank_may_take_any_time() -> None:
    """It has not begun to save, and those that have wait for it."""
    assert "rank 3 has sent" in str(verdict(own=replace(OWN, patience=None), heard=50.0))


def test_a_rank_that_ended_says_why() -> None:
    assert verdict(stopped="done", heard=1.0) is None
    message = verdict(stopped="ValueError: no", heard=1.0)
    assert message == "rank 3 stopped in 'trial of 8 rows': ValueError: no"


def test_a_sign_arrives_as_it_was_sent() -> None:
    sign = Sign("saving 'ä' to disk", progress=7, patience=None, stopped="", beats=3)
    raw = sealed(sign, 2, KEY).encode()
    assert opened(raw, 2, KEY, now=5.0) == replace(sign, heard=5.0, moved=5.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe garbage",
        b"{}",
        b'{"phase": "saving", "stopped": "an error that never was"}',
        b"0" * 64 + b' [2, "x", 1, 1.0, "an error that never was", 1]',
        sealed(HEALTHY, 2, b"another key").encode(),
        sealed(HEALTHY, 1, KEY).encode(),  # another rank's
        sealed(HEALTHY, 2, KEY).encode()[:-1],
        sealed(HEALTHY, 2, KEY).encode() + b" ",
    ],
)
def test_what_the_rank_did_not_write_is_no_sign(raw: bytes) -> None:
    assert opened(raw, 2, KEY, now=0.0) is None


@pytest.mark.parametrize("end", ["_stop", "_leave"])
@pytest.mark.parametrize("launched", [False, True])
def test_it_ends_the_process_although_nobody_reads_why(
    end: str, launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the launcher or the terminal is gone with its machine."""
    if launched:  # and the folder of its error file is gone, too
        error_file = tmp_path / "gone/attempt_0/0/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    child = os.fork()
    if child == 0:
        try:
            reader, writer = os.pipe()
            os.close(reader)
            sys.stderr = os.fdopen(writer, "w")
            watching = getattr(Watchdog(Ranks(), limit=1.0), end)
            thread = threading.Thread(target=watching, args=["rank 1 is silent"], daemon=True)
            thread.start()
            thread.join(60)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_CODE
