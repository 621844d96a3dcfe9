"""The size of a resumed run: tried again unless ranks, device and config are those of the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import RESUME, Records, assert_same_end, stopped_after, train, undisturbed

pytestmark = pytest.mark.runs

SEARCHED: dict[str, Any] = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "12MiB",
    "batch_size": 1,
    "max_steps_per_epoch": 4,
    "save_every_n_steps": 2,
    "keep_last_n_checkpoints": 9,
}


def resume(folder: Path, ranks: int = 1, **changes: Any) -> tuple[Records, bool]:
    """Resume a run: what it logged, and whether it has tried sizes."""
    report = folder / "batch_size_search.json"
    report.unlink()
    return train("full", folder, ranks, **{**SEARCHED, **RESUME, **changes}), report.exists()


def test_in_the_same_place_it_is_not_tried_again(tmp_path: Path) -> None:
    whole, records = undisturbed("full", **SEARCHED)
    again = stopped_after(2, whole, tmp_path / "again")
    resumed, searched = resume(again)
    assert not searched
    assert_same_end(resumed, records)
    report = (again / "report.html").read_text()
    assert "There was no search: batch_size is as before the run was resumed." in report


@pytest.mark.parametrize(
    "change",
    [
        {"adaptive_batching.memory_limit": "11MiB"},
        {"adaptive_batching.on_out_of_memory": "raise"},
        pytest.param({"tokenizer.max_seq_len": 64}, marks=pytest.mark.exhaustive),
        pytest.param({"adaptive_batching.headroom": 0.2}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda change: next(iter(change)),
)
def test_elsewhere_it_is(change: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = undisturbed("full", **SEARCHED)
    again = stopped_after(2, whole, tmp_path / "again")
    assert resume(again, **change)[1]


def test_on_other_ranks_it_is(tmp_path: Path) -> None:
    whole, _ = undisturbed("full", 2, **SEARCHED)
    again = tmp_path / "again"
    shutil.copytree(whole, again, symlinks=True)
    assert resume(again, epochs=2)[1]
