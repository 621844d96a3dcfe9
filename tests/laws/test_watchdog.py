"""What a beat of the watchdog costs with thousands of ranks: requests, signs read, and bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stars import Fleet
from torchtune_adaptive.core.ranks.signs import DONE, MOST_SUSPECTS, Sign, suspects
from torchtune_adaptive.core.ranks.star import _CHUNK

LIMIT = 45.0
MANY = 4096
STATES: dict[str, dict[str, Any]] = {
    "all is well": {},
    "all save": {"patience": None},
    "all have stood still for too long": {"patience": 0.5},
    "all have failed": {
        "stopped": "RankLost: lost rank 7 (silent; its last sign came from 'step 7')"
    },
    "all are done": {"stopped": DONE},
}


@pytest.mark.parametrize("size", [2, 64, MANY])
def test_a_beat_takes_two_requests_of_each_rank_and_reads_each_sign_once(size: int) -> None:
    fleet = Fleet(size)
    for store in fleet.stores:
        store.requests.clear()
    fleet.beat(LIMIT)
    zero, *others = fleet.stores
    assert {tuple(sorted(store.requests.items())) for store in others} == {
        (("multi_get", 1), ("set", 1))
    }
    assert {store.keys_read for store in others} == {1}
    assert zero.requests == {"set": 1, "multi_get": -(-(size - 1) // _CHUNK)}
    assert zero.keys_read == size - 1
    assert zero.largest_request <= _CHUNK


@pytest.mark.parametrize("state", STATES)
def test_what_a_rank_reads_does_not_grow_with_their_number(state: str) -> None:
    def bytes_read(size: int) -> int:
        fleet = Fleet(size, listeners=[1])
        fleet.change_all(**STATES[state])
        fleet.beat(LIMIT)
        fleet.beat(LIMIT)
        before = fleet.stores[1].bytes_read
        fleet.beat(LIMIT)
        return fleet.stores[1].bytes_read - before

    few, many = bytes_read(64), bytes_read(MANY)
    assert many <= 1.2 * few  # larger numbers have more digits
    assert many < 5000


def test_as_many_places_to_hang_at_as_ranks_do_not_make_the_sign_long() -> None:
    """Each is further than the one before, and there for longer: somebody may name each of them first."""
    signs = {
        rank: Sign("step 7", progress=rank, patience=0.5, moved=-float(rank))
        for rank in range(MANY)
    }
    assert len(suspects(signs, now=1.0)) <= 4 * MOST_SUSPECTS
