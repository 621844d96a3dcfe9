"""Gradient noise: what is estimated from sums, and when the batch should grow."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from torchtune_adaptive.core.sizes.noise import NoiseScale, NoiseSums
from torchtune_adaptive.schedule import GradientNoise, Moment

GRADIENT = [0.3, -0.2, 0.05, 0.4]  # of a token, on average
DEVIATION = [1.0, 2.0, 0.5, 1.5]  # of a token, in each parameter
SQUARED_GRADIENT = sum(g * g for g in GRADIENT)
VARIANCE = sum(d * d for d in DEVIATION)


def expected(small: list[int], tokens: int, rows: int = 8) -> NoiseSums:
    """The sums of a step without any chance in them."""
    squared = sum(n * n for n in small)
    return NoiseSums(
        small=squared * SQUARED_GRADIENT + sum(small) * VARIANCE,
        small_tokens=sum(small),
        small_tokens_squared=squared,
        big=tokens**2 * SQUARED_GRADIENT + tokens * VARIANCE,
        tokens=tokens,
        tokens_squared=tokens**2,
        rows=rows,
    )


def sampled(small: list[int], chance: random.Random) -> NoiseSums:
    """The sums of a step whose tokens' gradients are drawn."""
    gradients = [
        [
            n * mean + math.sqrt(n) * deviation * chance.gauss(0, 1)
            for mean, deviation in zip(GRADIENT, DEVIATION, strict=True)
        ]
        for n in small
    ]
    return replace(
        expected(small, sum(small)),
        small=sum(x * x for gradient in gradients for x in gradient),
        big=sum(sum(column) ** 2 for column in zip(*gradients, strict=True)),
    )


def noise_of(steps: list[NoiseSums], **settings: int) -> NoiseScale:
    noise = NoiseScale(**settings)
    for sums in steps:
        noise.update(sums)
    return noise


@pytest.mark.parametrize(
    ("small", "tokens"),
    [([5, 5], 10), ([3, 9, 1, 20], 33), ([7], 30), ([4, 0, 6], 10)],
    ids=["equal", "unequal", "the first of several", "one empty"],
)
def test_without_chance_the_estimate_is_the_truth(small: list[int], tokens: int) -> None:
    sums = expected(small, tokens)
    assert sums.squared_gradient() == pytest.approx(SQUARED_GRADIENT, rel=1e-9)
    assert sums.variance() == pytest.approx(VARIANCE, rel=1e-9)
    assert sums.scale_in_tokens() == pytest.approx(VARIANCE / SQUARED_GRADIENT, rel=1e-9)


def test_steps_of_different_batches_are_pooled() -> None:
    steps = [expected([3, 9, 1], 13), expected([5] * 8, 40), expected([2], 64)] * 10
    noise = noise_of(steps, window=20)
    assert noise.scale_in_tokens == pytest.approx(VARIANCE / SQUARED_GRADIENT, rel=1e-9)


def test_of_many_drawn_steps_the_truth_is_recovered() -> None:
    chance = random.Random(0)
    steps = [sampled([chance.randint(1, 30) for _ in range(8)], chance) for _ in range(4000)]
    noise = noise_of(steps, window=10**9)
    assert noise.scale_in_tokens == pytest.approx(VARIANCE / SQUARED_GRADIENT, rel=0.02)
    # The mean of the single steps' ratios would not do, and many steps have none.
    assert sum(sums.scale_in_tokens() is None for sums in steps) > 10


def test_in_rows_it_is_divided_by_the_tokens_of_a_mean_row() -> None:
    noise = noise_of([expected([30, 10], 40, rows=8), expected([10, 10], 20, rows=2)] * 5)
    assert noise.scale_in_tokens is not None
    assert noise.scale_in_rows == pytest.approx(noise.scale_in_tokens / 6, rel=0.01)


def test_old_steps_are_forgotten() -> None:
    later = expected([5, 5], 10)
    before = replace(later, small=2 * later.small)
    noise = noise_of([before] * 50 + [later] * 200, window=10)
    assert noise.scale_in_tokens == pytest.approx(VARIANCE / SQUARED_GRADIENT, rel=1e-6)


def test_there_is_no_estimate_before_enough_steps() -> None:
    noise = NoiseScale(least_steps=3)
    seen = []
    for _ in range(4):
        seen.append(noise.scale_in_tokens is None and noise.scale_in_rows is None)
        noise.update(expected([5, 5], 10))
    assert seen == [True, True, True, False]
    assert noise.steps == 4


@pytest.mark.parametrize(
    "sums",
    [
        replace(expected([5, 5], 10), big=0.0),  # the gradients cancel: |G|² would be negative
        replace(expected([5, 5], 10), small=0.0),  # tr Σ would be
        replace(expected([5, 5], 10), small=0.0, big=0.0),
        replace(expected([5, 5], 10), small=1e308, big=1e308),
        expected([10], 10),  # the small batch is the whole step
        NoiseSums(0, 0, 0, 0, 0, 0, 0),
    ],
)
def test_no_estimate_is_none_and_never_a_number(sums: NoiseSums) -> None:
    noise = noise_of([sums] * 20)
    assert noise.scale_in_tokens is None and noise.scale_in_rows is None


def test_every_estimate_is_positive_and_finite() -> None:
    chance = random.Random(1)
    noise = NoiseScale(window=2, least_steps=1)
    estimates = []
    for _ in range(1000):
        noise.update(sampled([chance.randint(1, 3), chance.randint(1, 3)], chance))
        estimates.append(noise.scale_in_rows)
    assert None in estimates
    assert all(0 < estimate < math.inf for estimate in estimates if estimate is not None)


def test_a_step_that_measured_nothing_or_overflowed_leaves_no_trace() -> None:
    step = expected([5, 5], 10)
    noise = noise_of([step] * 20)
    before = noise.state_dict()
    for nothing in (None, replace(step, small=math.inf), replace(step, big=math.nan)):
        noise.update(nothing)
    assert noise.state_dict() == before


def test_the_state_is_restored_bit_for_bit() -> None:
    chance = random.Random(2)
    steps = [sampled([3, 9, 1], chance) for _ in range(60)]
    noise = noise_of(steps[:30], window=20)
    resumed = NoiseScale(window=20)
    resumed.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    for sums in steps[30:]:
        assert resumed.scale_in_rows == noise.scale_in_rows
        noise.update(sums)
        resumed.update(sums)
    assert resumed.state_dict() == noise.state_dict()


# --- growth ---------------------------------------------------------------------------------------------


def doubles(schedule: GradientNoise, check: int, scale: float | None, batch: int) -> bool:
    """Whether the batch is doubled, the ``check``-th time."""
    now = Moment(samples=check, epochs=0.0, start=8, current=batch, noise=scale)
    return schedule.global_batch(now) == 2 * batch


def doublings(schedule: GradientNoise, scales: list[float | None], batch: int = 8) -> list[int]:
    """The checks, counted from 1, after which the batch is doubled."""
    checks = []
    for check, scale in enumerate(scales, start=1):
        if doubles(schedule, check, scale, batch):
            batch *= 2
            checks.append(check)
    return checks


def test_a_step_up_is_followed_one_doubling_at_a_time() -> None:
    schedule = GradientNoise(patience=3, dwell=10)
    assert doublings(schedule, [10.0] * 20 + [64.0] * 60) == [23, 33, 43]  # 8 -> 64


def test_it_takes_twice_the_batch() -> None:
    assert doublings(GradientNoise(3, 5), [15.9] * 50) == []
    assert doublings(GradientNoise(3, 5), [16.0] * 50) == [5]
    assert doublings(GradientNoise(3, 5, factor=0.5), [31.9] * 50) == []
    assert doublings(GradientNoise(3, 5, factor=2.0), [8.0] * 50) == [5]


def test_noise_is_no_reason() -> None:
    up, down = 20.0, 10.0
    assert doublings(GradientNoise(3, 5), [up, up, down] * 20) == []
    assert doublings(GradientNoise(3, 5), [down] * 9 + [up, up, down, up, up, up]) == [15]


def test_a_dip_costs_the_patience_but_nothing_is_taken_back() -> None:
    schedule = GradientNoise(patience=3, dwell=4)
    assert doublings(schedule, [20.0] * 4 + [1.0] * 10 + [40.0] * 4) == [4, 17]


def test_what_is_not_known_is_no_reason() -> None:
    assert doublings(GradientNoise(3, 3), [None] * 20) == []
    assert doublings(GradientNoise(3, 3), [20.0, 20.0, None] * 10) == []


def test_there_is_time_between_doublings() -> None:
    assert doublings(GradientNoise(1, 7), [1e9] * 30) == [7, 14, 21, 28]
    assert doublings(GradientNoise(3, 1), [1e9] * 10) == [3, 6, 9]


@pytest.mark.parametrize("resume_at", range(1, 40, 5))
def test_a_resumed_run_decides_as_if_it_had_not_been_interrupted(resume_at: int) -> None:
    chance = random.Random(3)
    scales: list[float | None] = [chance.uniform(10, 100) for _ in range(40)]
    whole, first, second = (GradientNoise(2, 6) for _ in range(3))
    checks = list(enumerate(scales))
    uninterrupted = [doubles(whole, check, scale, 16) for check, scale in checks]
    decisions = [doubles(first, check, scale, 16) for check, scale in checks[:resume_at]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    decisions += [doubles(second, check, scale, 16) for check, scale in checks[resume_at:]]
    assert decisions == uninterrupted and any(decisions)
