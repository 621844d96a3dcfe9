"""More than two ranks, of which one is lost: all others stop, and name the same one."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest

from tests.helpers.ranks import Ended, watch_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import EXIT_CODE, Watchdog

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LIMIT = 6.0  # longer than a name server may take, where connecting asks one
LIMIT_OF_MANY = 12.0  # in which 16 processes on a busy machine also find the store
LONG = 100.0  # seconds; a wait that nothing but the watchdog ends in time


def lose(victim: int, fate: str, at: float, in_collective: bool) -> None:
    ranks = Ranks(timeout=LONG)
    limit = LIMIT if ranks.size < 16 else LIMIT_OF_MANY
    with Watchdog(ranks, limit=limit) as watchdog:
        watchdog.enter("step 3", LIMIT if fate == "hangs" else LONG)
        ranks.any(False)
        if ranks.rank == victim:
            time.sleep(at)  # at once, or when all have passed the collective
            if fate == "hangs":
                time.sleep(2 * LONG)
            elif fate == "fails":
                raise ValueError("a bug")
            os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        watchdog.tick()
        if in_collective:
            ranks.any(False)
        time.sleep(LONG)  # as in a wait for the device, which no exception can end
        raise AssertionError("the watchdog let a rank wait")


def hold_the_lock(holder: int) -> str:
    """Longer than the limit, in an activity that may take any time; nobody publishes for that rank then."""
    ranks = Ranks(timeout=LONG)
    with Watchdog(ranks, limit=LIMIT) as watchdog:
        watchdog.enter("step 3", LIMIT)
        if ranks.rank != holder:
            time.sleep(LIMIT / 5)  # what the holder hears last is that they are in step 3
        watchdog.enter("saving", patience=None)
        if ranks.rank == holder:
            ctypes.PyDLL(None).usleep(int(1.5e6 * LIMIT))
        watchdog.enter("step 4", LIMIT)
        if ranks.rank == holder:
            end = time.monotonic() + LIMIT / 2
            while time.monotonic() < end:  # its threads judge what they know meanwhile
                time.sleep(0.001)
        ranks.any(False)
    return "done"


RUNS: dict[str, tuple[int, int, tuple[object, ...]]] = {
    "killed": (16, 11, ("killed", 2.0, False)),
    "stopped": (16, 11, ("stopped", 2.0, False)),
    "rank 0 killed": (16, 0, ("killed", 2.0, False)),
    "rank 0 stopped": (16, 0, ("stopped", 2.0, False)),
    "hangs": (3, 2, ("hangs", 2.0, False)),
    "fails": (3, 2, ("fails", 2.0, False)),
    "rank 0 hangs": (3, 0, ("hangs", 2.0, False)),
    "rank 0 fails": (3, 0, ("fails", 2.0, False)),
    "killed, in a collective": (3, 2, ("killed", 2.0, True)),
    "rank 0 stopped, in a collective": (2, 0, ("stopped", 2.0, True)),
    "rank 0 stopped at once": (3, 0, ("stopped", 0.0, False)),
}
"""Number of ranks, the victim, and what happens."""

SAYS = {
    "killed": "rank 11 has sent no sign of life for ",
    "stopped": "rank 11 has sent no sign of life for ",
    "rank 0 killed": "rank 0, which hosts the signs of life, does not answer",
    "rank 0 stopped": "rank 0 has sent no sign of life for ",
    "hangs": "rank 2 has been hanging for ",
    "fails": "rank 2 stopped in 'step 3': ValueError: a bug",
    "rank 0 hangs": "rank 0 has been hanging for ",
    "rank 0 fails": "rank 0 stopped in 'step 3': ValueError: a bug",
    "rank 0 stopped, in a collective": "rank 0 has sent no sign of life for ",
    "rank 0 stopped at once": "rank 0 has sent no sign of life for ",
}


def ended(run: str) -> list[Ended]:
    """How the ranks of a run end; those that are not the victim end by themselves."""
    size, victim, what = RUNS[run]
    others = [rank for rank in range(size) if rank != victim]
    return watch_ranks(lose, size, victim, *what, until_exit_of=others)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("run", SAYS)
def test_all_others_stop_and_name_it_once(run: str) -> None:
    size, victim, _ = RUNS[run]
    ranks = ended(run)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    assert len(survivors) == size - 1
    for rank in survivors:
        assert rank.exit_code == EXIT_CODE, rank.said
        assert rank.said.count("Stopping: this rank would otherwise wait forever") == 1, rank.said
        assert SAYS[run] in rank.said, rank.said


def test_who_broke_a_collective_is_named_by_all() -> None:
    *survivors, _ = ended("killed, in a collective")
    for rank in survivors:
        assert rank.exit_code in (1, EXIT_CODE), rank.said
        assert "rank 2" in rank.said, rank.said


def fail_beside_rank_0_that_is_stopped() -> None:
    ranks = Ranks(timeout=LONG)
    with Watchdog(ranks, limit=LIMIT) as watchdog:
        ranks.any(False)
        time.sleep(1.0)
        if ranks.is_zero:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(5 * watchdog._beat)  # its thread waits for an answer by now
        raise ValueError("a bug")


def test_a_rank_ends_though_rank_0_answers_nothing() -> None:
    _, rank = watch_ranks(
        fail_beside_rank_0_that_is_stopped, 2, until_exit_of=[1], timeout=10 * LIMIT
    )
    assert rank.exit_code == 1 and "ValueError: a bug" in rank.said, rank.said


@pytest.mark.rotating
@pytest.mark.parametrize("holder", [0, 2])
def test_nobody_is_lost_while_one_may_take_any_time(holder: int) -> None:
    for rank in watch_ranks(hold_the_lock, 3, holder, until_exit_of=[0, 1, 2]):
        assert rank.exit_code == 0, rank.said
