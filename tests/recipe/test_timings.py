"""Choosing the fastest of several ways with few measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torchtune_adaptive.recipe.search.timings import fastest, fitting


def test_the_first_that_fit_are_taken_and_what_cannot_fit_is_not_tried() -> None:
    tried = []

    def fits(way: int) -> bool:
        tried.append(way)
        return way <= 5

    ranked = [9, 7, 10, 4, 8, 5, 1, 2, 3]
    # Numbers stand for memory: what failed at 7 cannot fit at 10 or 8.
    assert fitting(ranked, fits, lambda one, other: one >= other, lambda way: way, most=3) == [4, 5]
    # Nor is what only needs less than one that fits: 1, 2 and 3.
    assert tried == [9, 7, 4, 4, 5, 5]
    assert not fitting(ranked, lambda way: False, lambda one, other: False, lambda way: 0, most=3)


def noisy(seconds: dict[str, float], noise: float, seed: int) -> object:
    numbers = random.Random(seed)

    def time(way: str, steps: int) -> Sequence[float]:
        return [seconds[way] * (1 + noise * numbers.random()) for _ in range(steps)]

    return time


def test_the_fastest_is_found_and_the_own_way_stays_to_the_end() -> None:
    seconds = {"own": 3.0, "a": 2.0, "b": 1.0, "c": 4.0}
    best, timings = fastest(list(seconds), noisy(seconds, 0.1, 0), "own")  # type: ignore[arg-type]
    assert best is not None and best.way == "b"
    steps = {timing.way: len(timing.steps) for timing in timings}
    assert steps["c"] < steps["own"] == steps["b"]


def test_never_slower_than_the_own_way_as_measured() -> None:
    for seed in range(200):
        numbers = random.Random(seed)
        ways = ["own", *"abcde"[: numbers.randrange(6)]]
        seconds = {way: numbers.uniform(1, 1.2) for way in ways}
        best, timings = fastest(ways, noisy(seconds, 0.3, seed), "own")  # type: ignore[arg-type]
        own = next(timing for timing in timings if timing.way == "own")
        assert best is not None and best.seconds <= own.seconds
        assert len(best.steps) == len(own.steps), "measured equally often"


def test_a_way_that_runs_out_of_memory_while_it_is_timed_is_out() -> None:
    def time(way: str, steps: int) -> Sequence[float] | None:
        return None if way == "a" else [1.0] * steps

    best, _ = fastest(["own", "a"], time, "own")
    assert best is not None and best.way == "own"
    best, timings = fastest(["a"], time, None)
    assert best is None and timings[0].failed
    assert fastest([], time, None) == (None, [])


def test_equal_ways_leave_the_config_as_it_is() -> None:
    best, _ = fastest(["a", "own", "b"], lambda way, steps: [1.0] * steps, "own")
    assert best is not None and best.way == "own"


def test_predictions_help_where_steps_vary() -> None:
    seconds = {"own": 1.3, "a": 1.0, "b": 1.03, "c": 1.06}

    def mean_loss(predicted: object) -> float:
        chosen = [
            fastest(list(seconds), noisy(seconds, 0.3, seed), "own", predicted)[0]  # type: ignore[arg-type]
            for seed in range(200)
        ]
        return sum(seconds[one.way] - 1 for one in chosen if one is not None) / len(chosen)

    # Predictions are all too short by the same factor, which says nothing.
    assert mean_loss(lambda way: seconds[way] / 2) < 0.7 * mean_loss(lambda way: None)


def test_predictions_do_not_count_where_steps_do_not_vary() -> None:
    seconds = {"own": 1.3, "a": 1.0, "b": 1.01}
    wrong = {"own": 1.3, "a": 1.1, "b": 1.0}
    best, _ = fastest(list(seconds), noisy(seconds, 0.002, 0), "own", wrong.get)  # type: ignore[arg-type]
    assert best is not None and best.way == "a"
