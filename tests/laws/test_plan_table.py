"""A table of micro-batches says what plans of each of them say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.planner import Speed
from torchtune_adaptive.planner.step_table import StepTable, sizes
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.plan.limits import confirm
from torchtune_adaptive.recipe.plan.predict import Prediction
from torchtune_adaptive.recipe.plan.request import PlanRequest, on_devices, plan_request
from torchtune_adaptive.recipe.plan.table import tabulated
from torchtune_adaptive.recipe.registry import load_config, with_overrides

GPUS = ("rtx3070-8gb", "h100-80gb")
"""One that few rows fit on, and one whose libraries take other workspaces."""
ON_GPUS = (
    "device=cuda",
    "dtype=bf16",
    "adaptive_batching.memory_limit=null",
    "model.vocab_size=32000",
)


def a_plan(cache: Path, ranks: int, **asked: Any) -> PlanRequest:
    cfg = with_overrides(load_config("tiny/full"), [*ON_GPUS, f"adaptive_batching.cache={cache}"])
    rows = asked.pop("rows", 2)
    return plan_request(with_overrides(cfg, [f"batch_size={rows}"]), ranks, length=500, **asked)


def a_table(cache: Path, ranks: int) -> StepTable:
    plan = a_plan(cache, ranks, gpu_name=GPUS[0])
    return tabulated(plan.query(), on_devices(plan, ",".join(GPUS)), (1, 2, 5, 48, 300))


def a_prediction(cache: Path, ranks: int, gpu: str, rows: int) -> Prediction:
    return confirm(a_plan(cache, ranks, gpu_name=gpu, rows=rows).query(), ())[0]


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_table_says_what_plans_say(ranks: int, tmp_path: Path) -> None:
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        table: StepTable = run(a_table, tmp_path, ranks).result(timeout=300)
        asked = [(here, n) for here in table.on_devices for n in range(len(table.rows))]
        plans = [
            run(a_prediction, tmp_path, ranks, here.device.name, table.rows[n]) for here, n in asked
        ]
        found = [one.result(timeout=300) for one in plans]
    assert table.uneven is (ranks == 3)  # who cannot share 64 rows of a matrix evenly
    verdicts = set()
    for (here, n), plan in zip(asked, found, strict=True):
        assert here.peaks[n] == plan.configured
        assert here.largest == plan.largest
        verdicts.add(verdict := here.peaks[n].verdict(here.device))
        speed: Speed | None = here.speeds[n]
        assert speed == (None if verdict == "DOES NOT FIT" else plan.speed)
    assert verdicts >= {"FITS", "DOES NOT FIT"}


@pytest.mark.parametrize("few", [False, True])
def test_sizes_show_what_fits_and_what_does_not(few: bool) -> None:
    for configured, own, largest in ((1, 0, 0), (2, 24, 62), (100, 7, 7), (3, 5, 11)):
        found = sizes(configured, own, largest, few)
        assert list(found) == sorted({*found}) and found[0] == 1
        assert configured in found and (own in found or not own)
        assert any(size > largest for size in found)
        assert len(found) <= (10 if few else 17)


def test_gpus_that_differ_in_memory_alone_share_peaks() -> None:
    plan = a_plan(Path("unused"), 2, gpu_name="h100-80gb")
    (h100, _), (h200, _), (a100, _) = on_devices(plan, "h100-80gb,h200-141gb,a100-80gb")
    assert h100.as_replayed == h200.as_replayed != a100.as_replayed
    for change in ({"expandable": True}, {"caching": False}, {"correction": 1.1}):
        assert replace(h100, **change).as_replayed != h100.as_replayed
