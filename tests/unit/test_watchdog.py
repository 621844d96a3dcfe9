"""When a rank is lost; the clock is an argument."""

from __future__ import annotations

from dataclasses import replace

from torchtune_adaptive.ranks.watchdog import Sign, lost_rank

OWN = Sign("trial of 8 rows", progress=50, patience=45.0)
HEALTHY = Sign("trial of 8 rows", progress=50, patience=45.0, heard=99.0, moved=99.0)


def verdict(now: float = 100.0, own: Sign = OWN, **changes: object) -> str | None:
    others = {0: HEALTHY, 3: replace(HEALTHY, **changes)}  # type: ignore[arg-type]
    return lost_rank(own, others, now, limit=45)


def test_all_is_well() -> None:
    assert verdict() is None
    assert lost_rank(OWN, {}, 0.0, 45) is None


def test_a_silent_rank_is_named_with_its_last_phase() -> None:
    said = verdict(heard=50.0, phase="trial of 4 rows")
    assert said == (
        "rank 3 has not been heard of for 50 s, and this rank waits for it in the phase 'trial of 8 rows'; "
        "its last word came from the phase 'trial of 4 rows'"
    )
    assert verdict(heard=56.0) is None


def test_a_rank_that_stands_still_while_this_one_waits_for_it_hangs() -> None:
    said = verdict(moved=50.0, progress=49)
    assert (
        said is not None
        and "rank 3 has been hanging for 50 s in the phase 'trial of 8 rows'" in said
    )


def test_who_is_as_far_as_this_rank_is_not_waited_for() -> None:
    assert verdict(moved=1.0, progress=50) is None  # both wait for a third, or both compute
    assert verdict(moved=1.0, progress=51) is None


def test_some_phases_may_take_as_long_as_they_like() -> None:
    assert verdict(moved=1.0, progress=49, patience=None) is None
    assert verdict(own=replace(OWN, patience=None), moved=1.0, progress=49) is None
    assert verdict(heard=1.0, patience=None) is not None, "but no rank may die in them"


def test_a_rank_that_ended_says_why() -> None:
    assert verdict(stopped="done", heard=1.0) is None
    said = verdict(stopped="ValueError: no", heard=1.0)
    assert said == "rank 3 stopped in the phase 'trial of 8 rows': ValueError: no"
