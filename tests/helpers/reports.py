"""A report of a search."""

from __future__ import annotations

from typing import Any

from torchtune_adaptive.core.search.strategies import SearchResult, Status
from torchtune_adaptive.core.search.trial import RankReport, SizeTrial
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.recipe.data.rows import RowSize
from torchtune_adaptive.recipe.search.size_report import SearchReport

GIB = 1 << 30


def trial(
    size: int, peaks: list[int], failed: dict[int, str] | None = None, retries: int = 0
) -> SizeTrial:
    reports = tuple(
        RankReport(
            peak, peak - GIB, retries, failed_in=(failed or {}).get(rank), usable_bytes=76 * GIB
        )
        for rank, peak in enumerate(peaks)
    )
    return SizeTrial(size, 1.25, reports)


TRIALS = (
    trial(1, [20 * GIB, 21 * GIB]),
    trial(2, [30 * GIB, 31 * GIB]),
    trial(8, [75 * GIB, 74 * GIB], {1: "backward"}),
    trial(4, [50 * GIB, 51 * GIB]),
)


def report(**changes: Any) -> SearchReport:
    values: dict[str, Any] = {
        "result": SearchResult(4, Status.NEXT_DOES_NOT_FIT, TRIALS),
        "before": Split(2, 4, 2),
        "split": Split(4, 4, 2),
        "strategy": "extrapolate",
        "row": RowSize(2048),
        "row_source": "max_seq_len of the tokenizer",
        "device": "H100",
        "headroom": 0.05,
        "seconds": 12.34,
        "samples": 1280,
        "lr": 2e-5,
        "limit": None,
    }
    return SearchReport(**{**values, **changes})
