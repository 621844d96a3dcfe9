"""The search for the largest micro-batch, on the simulated device and on a stand-in for a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.accelerator import Card
from tests.helpers.fastest import LENGTH, PLENTY, Memory, Run, TimedCard, run_of
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.recipe.search.batch_size import find_micro_batch

pytestmark = pytest.mark.ranks

BUFFERS = 1 << 30


class CardWithBuffers(TimedCard):
    """The memory of a card, of which communication takes a part when it is first used."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self._card.neighbour = BUFFERS
        with super().running():
            yield


class NoPlanner:
    """A planner without answers."""

    def __init__(self) -> None:
        self.capacities: list[int] = []

    def largest(self, row_length: int, capacity: int) -> None:
        self.capacities.append(capacity)

    def learn_from(self, *_: Any) -> None: ...


def searching_run(device: str, memory: Memory | None = None) -> Run:
    asked = {"use_fastest_configuration": False, "use_maximum_batch_size": True, "cache": False}
    run, _ = run_of(device, memory=memory, search="predict", rounding="none", ceiling=16, **asked)
    run[0].step.memory.runs = False  # type: ignore[attr-defined]
    return run


def found_and_tried(device: str) -> tuple[int, dict[int, bool]]:
    """The size that is found where about half of what 16 rows take is free, and which sizes fit."""
    prober, rows = searching_run(device)
    worst = prober.worst_case(rows.data, rows.lengths, LENGTH)
    memory: Any = prober.step.memory

    def tried(sizes: list[int]) -> list[Any]:
        with prober.probe(lambda size: 1) as probe:
            probe.prime(worst.batch)
            return [probe.trial(size, worst.batch) for size in sizes]

    memory.limit = sum(each.usage.peak_bytes for each in tried([1, 16])) // 2
    found = find_micro_batch(prober, rows).largest
    fits = {each.size: each.fits for each in tried([found - 1, found, found + 1])}
    return found, fits


@pytest.mark.rotating
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_finds_the_largest_size_that_fits(device: str) -> None:
    [(found, fits)] = run_ranks(found_and_tried, 1, device)
    assert 2 < found < 16 and fits == {found - 1: True, found: True, found + 1: False}


def capacities_told() -> list[int]:
    card = Card(PLENTY)
    card.install(pytest.MonkeyPatch())
    run, planner = searching_run("cuda", CardWithBuffers(card)), NoPlanner()
    find_micro_batch(*run, planner=planner)  # type: ignore[arg-type]
    return planner.capacities


def test_a_prediction_is_for_what_the_first_steps_leave() -> None:
    [capacities] = run_ranks(capacities_told, 1)
    assert set(capacities) == {PLENTY - BUFFERS}
