"""What our groups of ranks cost, in sockets and reads of the store, and how long a rank waits in them."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_ranks, watch_ranks
from torchtune_adaptive.common import RankLost
from torchtune_adaptive.core.ranks import agreement
from torchtune_adaptive.core.ranks.agreement import Ranks, SomeRanks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone

RANKS = 16
LIMIT = 6.0

EXCHANGES: dict[str, Callable[[Ranks], Any]] = {
    "spread": lambda ranks: ranks.spread(ranks.rank),
    "gather": lambda ranks: ranks.gather(ranks.rank),
    "largest": lambda ranks: ranks.largest([ranks.rank, 7]),
    "from_rank_zero": lambda ranks: ranks.from_rank_zero(ranks.rank),
    "alike": lambda ranks: sorted(ranks.alike(ranks.rank % 2).members),
    "waiting": lambda ranks: AllOrNone(ranks).decide(lambda: 5),
}


def sockets() -> int:
    """The sockets that this process has open."""
    seen = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            seen += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except OSError:  # the one that the list was read from
            continue
    return seen


def sockets_of_a_run() -> tuple[int, int, list[Any]]:
    """The sockets that a rank opens for our groups: those of a run that has used every exchange, and those of
    a further group, in which checkpoints are written."""
    before = sockets()
    ranks = Ranks(timeout=200)
    heard = [exchange(ranks) for name, exchange in EXCHANGES.items() if name != "alike"]
    of_run = sockets() - before
    of_a_thread = ranks.in_a_thread(200)
    of_another = sockets() - before - of_run
    of_a_thread.close()
    ranks.close()
    return of_run, of_another, heard


@pytest.mark.ranks
def test_a_rank_has_about_log_n_connections_and_rank_zero_one_with_each() -> None:
    """A group in which all ranks are connected has 16 of them, with its own socket, and a run had three."""
    said = run_ranks(sockets_of_a_run, RANKS)
    assert [heard for _, _, heard in said] == [
        [(0, 15), [*range(16)], [15, 7], 0, 5] for _ in range(RANKS)
    ]
    zero, *others = [(of_run, of_another) for of_run, of_another, _ in said]
    assert max(zero) <= RANKS
    # Its own, two of the ring, one with rank 0, and those of the tree.
    assert max(map(max, others)) <= 4 + math.log2(RANKS)


def groups_and_their_costs(given: str | None) -> tuple[list[str], int, int]:
    """The variable in effect while a group is made and afterwards, and the limits of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
    name, seen, make = "TORCH_GLOO_LAZY_INIT", [], dist.new_group
    if given is not None:
        os.environ[name] = given

    def seeing(*positional: Any, **named: Any) -> Any:
        seen.append(str(os.environ.get(name)))
        return make(*positional, **named)

    dist.new_group = seeing
    ranks = Ranks(timeout=200)
    assert ranks.spread(ranks.rank) == (0, ranks.size - 1)
    seen.append(str(os.environ.get(name)))
    return seen, *resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.ranks
@pytest.mark.parametrize(("given", "seen"), [(None, ["1", "None"]), ("0", ["0", "0"])])
def test_only_our_groups_connect_late_and_the_user_may_decide(
    given: str | None, seen: list[str]
) -> None:
    for names, soft, hard in run_ranks(groups_and_their_costs, 2, given):
        assert names == seen
        assert soft == hard, "as many files may be open as the system allows"


class Store:
    """A key-value store that counts what it is asked for."""

    def __init__(self, here: int) -> None:
        self.here, self.asked = here, 0

    def add(self, _: str, amount: int) -> int:
        self.asked += 1
        self.here += amount
        return self.here

    def set(self, _: str, __: str) -> None:
        self.asked += 1

    wait = set


@pytest.mark.parametrize("ranks", [8, 4096])
@pytest.mark.parametrize(("missing", "asks"), [(1, 3), (2, 2)], ids=["the last", "another"])
def test_a_rank_asks_the_store_equally_often_whatever_their_number(
    ranks: int, missing: int, asks: int
) -> None:
    """It is one key that all wait for. gloo by itself has each rank read a key of every other one."""
    store = Store(ranks - missing)
    group = SimpleNamespace(size=lambda: ranks, get_group_store=lambda: store)
    agreement._meet(group, timedelta(seconds=5))  # type: ignore[arg-type]
    assert store.asked == asks


class Value:
    """A value that counts how often it is compared with another one."""

    compared = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        Value.compared += 1
        return isinstance(other, Value) and self.value == other.value


@pytest.mark.parametrize("ranks", [64, 4096])
def test_parts_of_the_ranks_are_found_in_as_many_comparisons_as_there_are_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr(agreement, "_shared_group", lambda _, members: made.append(members))
    own = SomeRanks([*range(ranks)], rank=9)
    parts = ranks // 8
    monkeypatch.setattr(own, "gather", lambda _: [Value(rank % parts) for rank in range(ranks)])
    Value.compared = 0
    part = own.alike(Value(9 % parts))
    assert Value.compared <= 2 * ranks
    assert len(made) == parts and len(part.members) == 8 and 9 in part.members


def alike_in_different_numbers_of_groups() -> list[list[int]]:
    """What a rank hears in parts of the ranks, some of which are in groups of somebody else's."""
    ranks = Ranks(timeout=200)
    for members in ([0], [0, 1]):
        dist.new_group(members)
    parts = [ranks.alike(ranks.rank < 2), ranks.alike(ranks.rank % 2)]
    heard = [part.gather(ranks.rank) for part in parts]
    parts[0].close()
    again = ranks.alike(ranks.rank < 2)  # the same ranks, after their group is gone
    heard.append(again.gather(ranks.rank))
    ranks.close()
    return heard


@pytest.mark.ranks
def test_parts_find_each_other_whatever_groups_a_rank_is_in() -> None:
    assert run_ranks(alike_in_different_numbers_of_groups, 4) == [
        [pair, [rank % 2, rank % 2 + 2], pair]
        for rank, pair in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]])
    ]


def dies(where: str, kind: str, victim: int) -> None:
    """Exchange something with a rank that is killed: at the start, when it has made the group, when all have
    but are not connected, or right before its first exchange."""

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    is_victim = dist.get_rank() == victim
    if is_victim and where in ("_meet", "_connect"):
        setattr(agreement, where, end)
    if is_victim and where == "start":
        end()
    begun = time.monotonic()
    try:
        ranks = Ranks(timeout=LIMIT)
        if is_victim:
            end()
        EXCHANGES[kind](ranks)
    except RankLost as error:
        print(f"lost after {time.monotonic() - begun:.1f} s: {error}", flush=True)
        os._exit(0)
    os._exit(3)  # the exchange came to an end without its victim


PLACES = ["start", "_meet", "_connect", "exchange"]


@pytest.mark.ranks
@pytest.mark.rotating
@pytest.mark.parametrize("kind", [*EXCHANGES])
@pytest.mark.parametrize("where", PLACES)
def test_no_rank_waits_beyond_its_limit_for_one_that_has_died(where: str, kind: str) -> None:
    """gloo by itself would wait for a connection for five times the limit."""
    ranks = 3
    victim = ([*EXCHANGES].index(kind) + PLACES.index(where)) % ranks
    others = [rank for rank in range(ranks) if rank != victim]
    ended = watch_ranks(dies, ranks, where, kind, victim, until_exit_of=others, timeout=3 * LIMIT)
    for rank in others:
        assert ended[rank].exit_code == 0, ended[rank].said
        assert "lost after" in ended[rank].said


def patient_for_files_only() -> str:
    """Wait twice for longer than the limit: for a file, and for an answer."""
    ranks = Ranks(timeout=4.0)

    def write() -> str:
        time.sleep(6.0)
        return "written"

    written = AllOrNone(ranks).decide(write)
    if ranks.is_zero:
        with pytest.raises(RankLost, match="has not answered for 4 s"):
            ranks.gather(None)
    else:
        time.sleep(10.0)
    return written


@pytest.mark.ranks
def test_ranks_wait_longer_for_files_in_the_same_group() -> None:
    assert run_ranks(patient_for_files_only, 2) == ["written", "written"]
