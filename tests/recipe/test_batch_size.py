"""How a search uses what is remembered and predicted, and what it remembers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import Alone
from torchtune_adaptive.core.search.strategies import Status
from torchtune_adaptive.core.search.trial import RankReport, SizeTrial
from torchtune_adaptive.core.sizes.split import Split, candidates
from torchtune_adaptive.recipe.search.batch_size import limit_of, possible_sizes
from torchtune_adaptive.recipe.search.sizing import InRows
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings

ABOUT = {"model": "a"}
SIZES = candidates("power_of_two", 64, 64)
FIXED, EACH_ROW, LIMIT = 100, 10, 270  # 16 rows take 260, 32 take 420


class FakeProbe:
    """A device on which a row takes so much memory, and of which a neighbour may hold a part."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.tried: list[int] = []

    def trial(self, size: int) -> SizeTrial:
        self.tried.append(size)
        peak = FIXED + EACH_ROW * size
        failed = "forward" if peak > self.limit else None
        report = RankReport(min(peak, LIMIT), peak, 0, failed_in=failed, usable_bytes=self.limit)
        return SizeTrial(size, 0.1, (report,))


class FakePredictions:
    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def largest(self, after: Any) -> int:
        return self.answers.pop(0) if self.answers else 0


def search(
    folder: Path, probe: FakeProbe, strategy: Any = "extrapolate", predictions: Any = None
) -> Any:
    first = FakeProbe(limit=10**9).trial(1)
    predictions = predictions or FakePredictions()
    return InRows(
        trial=probe.trial,
        sizes=SIZES,
        strategy=strategy,
        nothing_fits=AssertionError,
        about=ABOUT,
        first=first,
        predicted=predictions.largest,
    ).find(Alone(), str(folder))  # type: ignore[arg-type]


def remembered(folder: Path) -> int | None:
    return InRows.cache(str(folder)).get(ABOUT)


def test_a_remembered_size_takes_one_trial(tmp_path: Path) -> None:
    InRows.cache(str(tmp_path)).put(ABOUT, 16)
    found = search(tmp_path, probe := FakeProbe())
    assert (found.size, found.status, probe.tried) == (16, Status.REMEMBERED, [16])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_size_that_was_found_beside_a_neighbour_is_corrected(size: int, tmp_path: Path) -> None:
    InRows.cache(str(tmp_path)).put(ABOUT, size)
    found = search(tmp_path, probe := FakeProbe())
    assert (found.size, found.status) == (16, Status.NEXT_DOES_NOT_FIT)
    assert remembered(tmp_path) == 16
    assert len(set(probe.tried)) == len(probe.tried), "no size is tried twice"


def test_a_remembered_size_that_no_longer_fits_is_corrected(tmp_path: Path) -> None:
    InRows.cache(str(tmp_path)).put(ABOUT, 64)
    found = search(tmp_path, probe := FakeProbe())
    assert found.size == remembered(tmp_path) == 16
    assert probe.tried.count(64) == 1


def test_a_size_at_which_a_prediction_stopped_is_not_remembered(tmp_path: Path) -> None:
    found = search(tmp_path, FakeProbe(), "predict", FakePredictions(8, 8))
    assert (found.size, found.status) == (8, Status.PREDICTED)
    assert remembered(tmp_path) is None


def test_a_trial_may_correct_a_prediction_upwards(tmp_path: Path) -> None:
    found = search(tmp_path, probe := FakeProbe(), "predict", FakePredictions(8, 17, 17))
    assert (found.size, probe.tried) == (16, [8, 16])


def test_a_prediction_that_was_too_high_is_followed_by_a_search(tmp_path: Path) -> None:
    found = search(tmp_path, FakeProbe(), "predict", FakePredictions(64))
    assert (found.size, found.status) == (16, Status.NEXT_DOES_NOT_FIT)
    assert remembered(tmp_path) == 16


@pytest.mark.parametrize(
    ("settings", "largest", "reason"),
    [
        (
            {},
            4,
            "a larger one would leave fewer than 8 optimizer steps in an epoch; adaptive_batching.c",
        ),
        ({"use_maximum_batch_size": False}, 32, "the data has 100 rows per rank"),
        ({"ceiling": 8}, 8, "adaptive_batching.ceiling is 8"),
        ({"ceiling": 1000}, 32, "the data has 100 rows per rank"),
        ({"keep_global_batch": True}, 12, "a step has 12 rows per rank"),
        ({"keep_global_batch": True, "ceiling": 5}, 4, "adaptive_batching.ceiling is 5"),
    ],
)
def test_what_limits_the_candidates(settings: dict[str, Any], largest: int, reason: str) -> None:
    asked = AdaptiveSettings(**{"use_maximum_batch_size": True, **settings})
    configured = Split(4, 3, 2)
    limit = limit_of(asked, configured, 100)
    assert possible_sizes(asked, configured, limit.size)[-1] == largest
    assert limit.reason.startswith(reason)


@pytest.mark.parametrize(
    ("rows", "configured", "more", "largest"),
    [
        (320, Split(2, 1, 2), {}, 16),  # 160 steps become 20
        (320, Split(2, 4, 2), {}, 4),
        (320, Split(64, 1, 2), {}, 64),  # there were 5
        (320, Split(400, 1, 2), {}, 320),  # there were none
        (320, Split(2, 1, 2), {"max_steps": 10}, 32),
        (320, Split(2, 1, 2), {"max_steps": 1000}, 16),
        (320, Split(2, 1, 2), {"known": 128}, 128),
    ],
)
def test_a_search_leaves_some_steps_in_an_epoch(
    rows: int, configured: Split, more: dict[str, int], largest: int
) -> None:
    limit = limit_of(AdaptiveSettings(use_maximum_batch_size=True), configured, rows, **more)
    assert limit.size == largest
