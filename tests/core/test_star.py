"""What every rank learns of the others through rank 0: the clock and the store are simulated."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from tests.helpers.stars import BEAT, KEY, Fleet
from torchtune_adaptive.core.ranks.signs import (
    DONE,
    LONGEST_SILENCE,
    Sign,
    lost_rank,
    opened,
    sealed,
    suspects,
)

LIMIT = 12.0
SIZES = [2, 3, 16, 4096, pytest.param(16_384, marks=pytest.mark.exhaustive)]
ZERO = "sign of life of rank 0"


def some(size: int) -> list[int]:
    """Enough to judge: the first, the last and one between."""
    return [1, size // 2, size - 2, size - 1]


def fleet_of(size: int) -> tuple[Fleet, int]:
    """Ranks of which all is well, and one of them that something will happen to."""
    fleet = Fleet(size, some(size))
    for _ in range(3):
        fleet.change_all(progress=fleet.signs[0].progress + 1)
        assert set(fleet.beat(LIMIT).values()) == {None}
    return fleet, 2 * size // 3


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_rank_is_named_by_all_after_the_limit(size: int) -> None:
    fleet, victim = fleet_of(size)
    fleet.mute(victim)
    named = fleet.until_named(LIMIT, within=2 * LIMIT)
    assert named.keys() == {0, *fleet.listeners} - {victim}
    for rank, (seconds, verdict) in named.items():
        assert verdict.startswith(f"rank {victim} has sent no sign of life"), verdict
        assert LIMIT < seconds <= LIMIT + BEAT * (1 if rank == 0 else 2)


@pytest.mark.parametrize("size", SIZES)
def test_a_hanging_rank_is_named_by_all_after_its_patience(size: int) -> None:
    fleet, victim = fleet_of(size)
    fleet.change_all(progress=200, patience=LIMIT)
    fleet.change(victim, progress=199)
    named = fleet.until_named(2 * LIMIT, within=2 * LIMIT)
    assert named.keys() == {0, *fleet.listeners} - {victim}
    for seconds, verdict in named.values():
        assert verdict.startswith(f"rank {victim} has been hanging"), verdict
        assert (
            LIMIT < seconds <= LIMIT + 3 * BEAT
        )  # the first is that in which it is seen to get there


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_stopped_is_named_in_the_next_beat(size: int) -> None:
    fleet, victim = fleet_of(size)
    fleet.change(victim, stopped="ValueError: no")
    fleet.stars[victim].publish()
    fleet.mute(victim)
    fleet.change_all(progress=150)
    assert fleet.beat(LIMIT)[0] == f"rank {victim} stopped in 'step 7': ValueError: no"
    verdicts = fleet.beat(LIMIT)
    assert set(verdicts.values()) == {f"rank {victim} stopped in 'step 7': ValueError: no"}


@pytest.mark.parametrize("patience", [LIMIT, None])
def test_rank_0_is_judged_by_the_age_of_its_own_sign(patience: float | None) -> None:
    """Its thread does not run, as while the interpreter's lock is held to write a file; others are well."""
    fleet, _ = fleet_of(16)
    fleet.change(0, patience=patience)
    fleet.beat(LIMIT)
    fleet.beat(LIMIT)
    fleet.mute(0)
    allowed = LIMIT if patience else LONGEST_SILENCE
    named = fleet.until_named(LIMIT, within=allowed + 10 * BEAT)
    assert named.keys() == {*fleet.listeners}
    for seconds, verdict in named.values():
        assert verdict.startswith("rank 0 has sent no sign of life"), verdict
        assert allowed < seconds <= allowed + 2 * BEAT


def test_rank_0_that_hangs_while_its_thread_lives_is_named() -> None:
    fleet, _ = fleet_of(16)
    fleet.change_all(progress=200, patience=LIMIT)
    fleet.change(0, progress=199)
    named = fleet.until_named(2 * LIMIT, within=2 * LIMIT)
    assert named.keys() == {*fleet.listeners}
    assert all("rank 0 has been hanging" in verdict for _, verdict in named.values())


def test_rank_0_that_stopped_says_why() -> None:
    fleet, _ = fleet_of(16)
    fleet.change(0, stopped="ValueError: no")
    fleet.stars[0].publish()  # its last sign, without another look at the others
    fleet.mute(0)
    verdicts = fleet.beat(LIMIT)
    assert set(verdicts.values()) == {"rank 0 stopped in 'step 7': ValueError: no"}


@pytest.mark.parametrize("without_patience", ["rank 0", "a rank that judges"])
def test_who_may_take_any_time_judges_as_well(without_patience: str) -> None:
    fleet, victim = fleet_of(16)
    calm = 0 if without_patience == "rank 0" else fleet.listeners[0]
    fleet.change(calm, patience=None)
    fleet.mute(victim)
    named = fleet.until_named(LIMIT, within=2 * LIMIT)
    assert named.keys() == {0, *fleet.listeners} - {victim}
    assert all(f"rank {victim} has sent" in verdict for _, verdict in named.values())


def test_ranks_that_rank_0_could_not_hear_for_long_are_not_lost() -> None:
    """After it could not run for long, it reads what they have written meanwhile."""
    fleet, _ = fleet_of(16)
    fleet.change(0, patience=None)
    fleet.beat(LIMIT)
    fleet.beat(LIMIT)
    fleet.mute(0)
    fleet.until_named(LIMIT, within=20 * LIMIT)
    fleet.muted.clear()
    fleet.change(0, patience=30.0)
    fleet.stars[0].publish()  # as its main thread does when it leaves such an activity
    for _ in range(3):
        assert set(fleet.beat(LIMIT).values()) == {None}


@pytest.mark.parametrize("holder", ["rank 0", "another rank"])
def test_nobody_is_silent_while_the_lock_is_held_after_the_store_has_answered(holder: str) -> None:
    """What was read is then older than it looks, and others have written meanwhile."""
    fleet, _ = fleet_of(16)
    held = 0 if holder == "rank 0" else fleet.listeners[0]
    read = fleet.stores[held].multi_get

    def read_and_wait(keys: list[str]) -> list[bytes]:
        found = read(keys)
        fleet.now += 3 * LIMIT
        return found

    fleet.stores[held].multi_get = read_and_wait  # type: ignore[method-assign]
    others = fleet.stars[held].exchange()  # nothing new: it reads again what it has read
    assert fleet.clock(held) - fleet.stars[held].read > LIMIT
    assert lost_rank(fleet.signs[held], others, fleet.stars[held].read, LIMIT) is None
    fleet.stores[held].multi_get = read  # type: ignore[method-assign]
    assert set(fleet.beat(LIMIT).values()) == {None}


@pytest.mark.parametrize("stopped", ["", "ValueError: no"])
def test_ranks_that_are_done_do_not_hide_one_that_is_not(stopped: str) -> None:
    fleet, victim = fleet_of(64)
    for rank in {*range(1, 64)} - {victim, *fleet.listeners}:
        fleet.change(rank, stopped=DONE)
        fleet.stars[rank].publish()
        fleet.mute(rank)
    fleet.beat(LIMIT)
    fleet.change(victim, stopped=stopped)
    fleet.stars[victim].publish()
    fleet.mute(victim)
    named = fleet.until_named(LIMIT, within=2 * LIMIT)
    assert named.keys() == {0, *fleet.listeners}
    expected = f"rank {victim} stopped in" if stopped else f"rank {victim} has sent"
    assert all(verdict.startswith(expected) for _, verdict in named.values())


def test_a_rank_does_not_name_itself() -> None:
    """It has just gone on, and what rank 0 says of it is older than that."""
    fleet, _ = fleet_of(16)
    fleet.change_all(progress=200, patience=LIMIT)
    for _ in range(10):
        assert set(fleet.beat(3 * LIMIT).values()) == {None}
    first = fleet.listeners[0]
    fleet.change(first, progress=201)
    verdict = fleet.beat(3 * LIMIT)[first]
    assert (
        verdict is not None and "rank 0 has been hanging" in verdict
    )  # rank 0 first, and not itself
    told = fleet.stars[first].exchange()
    assert first not in told and {*told} & {*fleet.listeners}


def test_ranks_that_save_do_not_hide_one_that_is_silent() -> None:
    fleet, victim = fleet_of(64)
    for rank in {*range(1, 64)} - {victim, *fleet.listeners}:
        fleet.change(rank, patience=None)
        fleet.stars[rank].publish()
        fleet.mute(rank)  # earlier than the victim, and none of them is lost
    fleet.beat(LIMIT)
    fleet.mute(victim)
    named = fleet.until_named(LIMIT, within=2 * LIMIT)
    assert named.keys() == {0, *fleet.listeners}
    assert all(f"rank {victim} has sent" in verdict for _, verdict in named.values())


def test_the_suspects_are_enough_for_every_rank() -> None:
    """Whoever judges by them names a rank if and only if it would by all signs, and one that is lost."""
    draw = random.Random(0)
    named = 0
    for _ in range(3000):
        now = 10_000.0
        silences = draw.choice([[1.0], [1.0, 5.0, 20.0, 100.0, 1700.0]])
        signs = {
            rank: Sign(
                "step 7",
                progress=draw.randrange(6),
                patience=draw.choice([None, 10.0, 50.0]),
                stopped=draw.choice([""] * 300 + [DONE, DONE, "an error"]),
                heard=now - draw.choice(silences) * draw.random(),
                moved=now - draw.choice([1.0, 5.0, 20.0, 60.0]) * draw.random(),
            )
            for rank in range(draw.choice([2, 20, 60, 120]))
        }
        raw = sealed(Sign("", 0, None, suspects=suspects(signs, now)), 0, KEY, now).encode()
        sign = opened(raw, 0, KEY, now)
        assert sign is not None
        own = Sign("step 7", draw.randrange(7), draw.choice([None, 10.0, 50.0, 60.0]))
        limit = draw.choice([4.0, 19.0, 90.0])
        verdict = lost_rank(own, sign.suspects, now, limit)
        assert (verdict is None) == (lost_rank(own, signs, now, limit) is None)
        if verdict is not None:
            rank = int(verdict.split()[1])
            assert lost_rank(own, {rank: signs[rank]}, now, limit) is not None
            named += 1
    assert 500 < named < 2500


def test_a_sign_with_suspects_arrives_as_it_was_sent_by_another_clock() -> None:
    said = Sign("saving 'ä'", 5, None, "an error", heard=90.0, moved=70.0)
    sign = Sign("step 7", 7, 30.0, beats=3, suspects={4: said})
    arrived = opened(sealed(sign, 0, KEY, now=100.0).encode(), 0, KEY, now=5000.0)
    assert arrived is not None
    assert arrived.suspects == {4: replace(said, heard=4990.0, moved=4970.0)}
    assert replace(arrived, suspects={}) == replace(sign, heard=5000.0, moved=5000.0, suspects={})


def forgeries(fleet: Fleet) -> dict[str, bytes]:
    """What a stranger may write in place of rank 0's sign."""
    said = Sign("step 7", 100, 30.0, stopped="an error that never was")
    foreign = replace(said, stopped="", suspects={5: said})
    genuine = fleet.values[ZERO]
    return {
        "noise": b"\xff\x00 not even text",
        "another key": sealed(foreign, 0, b"another key").encode(),
        "changed": genuine.replace(b"step 7", b"step 8"),
        "another rank's": fleet.values["sign of life of rank 5"],
        "cut short": genuine[:-1],
    }


@pytest.mark.parametrize("kind", ["noise", "another key", "changed", "another rank's", "cut short"])
def test_what_rank_0_did_not_write_is_ignored_and_reported_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, _ = fleet_of(16)
    said = forgeries(fleet)[kind]
    fleet.mute(0)
    fleet.beat(LIMIT)  # they read what it wrote last
    known = [fleet.stars[rank].signs[0] for rank in fleet.listeners]
    with caplog.at_level(logging.WARNING):
        for beat in range(2):
            fleet.values[ZERO] = said + b" " * beat
            assert set(fleet.beat(LIMIT).values()) == {None}
            assert [fleet.stars[rank].signs[0] for rank in fleet.listeners] == known
    reports = [record for record in caplog.records if "rank 0 that no rank" in record.message]
    assert len(reports) == len(fleet.listeners)
    named = fleet.until_named(LIMIT, within=2 * LIMIT)
    assert all("rank 0 has sent no sign" in verdict for _, verdict in named.values())
    assert named.keys() == {*fleet.listeners}


def test_who_broke_a_collective_is_known_to_all_within_five_beats() -> None:
    fleet, _ = fleet_of(64)
    victims = [5, 6, 7, 50]
    for rank in victims:
        fleet.mute(rank)
    for _ in range(5):
        fleet.beat(LIMIT)
    for rank in (0, *fleet.listeners):
        assert [*fleet.stars[rank].missing(3 * BEAT)] == victims, rank


def test_of_others_nothing_is_said_while_rank_0_is_silent() -> None:
    fleet, _ = fleet_of(64)
    fleet.mute(0)
    for _ in range(5):
        fleet.beat(LIMIT)
    for rank in fleet.listeners:
        assert [*fleet.stars[rank].missing(3 * BEAT)] == [0]
