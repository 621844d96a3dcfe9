"""When the batch grows, by samples; what that does to the learning rate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.core.sizes.scaling import lr_factor
from torchtune_adaptive.core.sizes.split import Epochs, Split
from torchtune_adaptive.recipe.train.learning_rate import beta2_at
from torchtune_adaptive.schedule import (
    Geometric,
    GradientNoise,
    Linear,
    Moment,
    Replay,
    Schedule,
    Seesaw,
    Step,
)


def moment(**changes: Any) -> Moment:
    return Moment(**{"samples": 0, "epochs": 0.0, "start": 8, "current": 8, **changes})


def by_epochs(schedule: Schedule, *epochs: float) -> list[int]:
    return [schedule.global_batch(moment(epochs=e, samples=int(1000 * e))) for e in epochs]


def test_step_takes_what_is_written_for_these_samples() -> None:
    schedule = Step(at={500: 16, 2000: 64})
    assert by_epochs(schedule, 0, 0.499, 0.5, 1.999, 2, 9) == [8, 8, 16, 16, 64, 64]
    assert Step(at={0: 32}).global_batch(moment()) == 32


def test_geometric_multiplies_each_time() -> None:
    assert by_epochs(Geometric(), 0, 0.99, 1, 1.5, 2, 3) == [8, 8, 16, 16, 32, 64]
    assert by_epochs(Geometric(factor=3, every=0.5), 0, 0.5, 1) == [8, 24, 72]
    assert Geometric(every=0.01).global_batch(moment(epochs=1000)) > 10**18, "and no overflow"


def test_linear_adds_equal_increments_and_stops() -> None:
    assert by_epochs(Linear(to=40, over=2), 0, 0.49, 0.5, 1, 1.5, 2, 3) == [
        8, 8, 16, 24, 32, 40, 40,
    ]  # fmt: skip
    assert by_epochs(Linear(to=20, over=1, increment=8), 0, 0.5, 1) == [8, 16, 20]
    assert by_epochs(Linear(to=4, over=1), 0, 1) == [8, 8], "never down"


def test_seesaw_doubles_where_the_base_rate_halves() -> None:
    factors = (1.0, 0.51, 0.5, 0.26, 0.25, 0.1, 0.0)
    batches = [Seesaw().global_batch(moment(lr_factor=f, current=64)) for f in factors]
    assert batches == [8, 8, 16, 16, 32, 64, 64]
    assert lr_factor(Seesaw.lr_scaling, 16, 8) * 0.5 == pytest.approx(1 / math.sqrt(2))


def test_gradient_noise_doubles_after_patience_and_dwell_and_goes_on_after_a_restart() -> None:
    def run(schedule: GradientNoise, steps: range) -> list[int]:
        batches = []
        for step in steps:
            noise = None if step < 3 else 1000.0
            now = moment(samples=step, noise=noise)
            batches.append(schedule.global_batch(now))
            assert schedule.global_batch(now) == 8, "asked twice at one place, it counts once"
        return batches

    whole = run(GradientNoise(patience=2, dwell=6), range(14))
    assert [step for step, batch in enumerate(whole) if batch == 16] == [5, 11]
    first = GradientNoise(patience=2, dwell=6)
    before = run(first, range(8))
    second = GradientNoise(patience=2, dwell=6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + run(second, range(8, 14)) == whole


def test_replay_does_what_was_recorded(tmp_path: Path) -> None:
    rows = [
        {"step": 3, "reason": "no OOM for 2 steps", "micro_batch": [1, 2]},
        {"step": 4, "reason": "Geometric", "samples": 500, "global_batch": [8, 16]},
        {"step": 9, "reason": "Geometric", "samples": 900, "global_batch": [16, 32]},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert by_epochs(Replay(str(path)), 0, 0.5, 0.9) == [8, 16, 32]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match="records no growth"):
        Replay(str(path))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Step(at={0: 0}),
        lambda: Step(at={-1: 8}),
        lambda: Geometric(factor=0.5),
        lambda: Geometric(every=0),
        lambda: Geometric(factor="two"),  # type: ignore[arg-type]
        lambda: Linear(to=0),
        lambda: Linear(to=8, increment=0),
        lambda: GradientNoise(patience=0),
        lambda: GradientNoise(factor=float("nan")),
    ],
)
def test_nonsense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be a number >= "):
        wrong()


def test_the_learning_rate_rules() -> None:
    assert lr_factor("none", 64, 8) == 1
    assert lr_factor("linear", 64, 8) == 8
    assert lr_factor("sqrt", 32, 8) == 2
    assert lr_factor("gain", 64, 8, None) == 1
    assert lr_factor("gain", 64, 8, noise=1e12, exponent=1) == pytest.approx(8)  # all noise: linear
    assert lr_factor("gain", 64, 8, noise=1e-9) == pytest.approx(1)  # no noise: nothing to gain
    assert lr_factor("gain", 16, 8, noise=8, exponent=1) == pytest.approx((1 + 1) / (1 + 0.5))


def test_beta2_forgets_as_much_in_as_many_samples() -> None:
    assert beta2_at(0.999, 32, 8) == pytest.approx(0.999**4)
    assert beta2_at(0.999, 8, 8) == 0.999


def test_positions_follow_samples_and_an_epoch_ends_at_its_end() -> None:
    epochs = Epochs(samples=103, base_batch=4)
    assert epochs.base_steps == 25
    assert [epochs.position(0, used) for used in (0, 3, 4, 32, 100, 103)] == [0, 0, 1, 8, 25, 25]
    assert epochs.position(2, 0) == 50


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("largest", [1, 3, 8, 100])
def test_a_step_is_split_into_as_few_and_equal_parts_as_can_be(
    largest: int, accumulation: int
) -> None:
    for rows in range(accumulation, 60):
        split = Split.of(rows, 1, largest, accumulation)
        micro_batch, parts = split.micro_batch, split.accumulation
        assert micro_batch <= largest and (parts - 1) * micro_batch < rows <= parts * micro_batch
        if rows % accumulation == 0 and rows // accumulation <= largest:
            assert (micro_batch, parts) == (rows // accumulation, accumulation)
        assert parts <= max(accumulation, -(-rows // largest))
