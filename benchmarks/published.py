"""Peaks of memory that others have published, and what the planner says of their runs.

    python benchmarks/published.py --predict             # writes docs/results/published.json; half an hour
    python benchmarks/published.py --predict --only bnb  # only rows with this in their names
    python benchmarks/published.py --again               # predicts once more, and keeps the first predictions
    python benchmarks/published.py                       # writes docs/results/published.md

``published_rows`` says what ran, and ``published_peaks`` what was measured, which no prediction reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_page import page
from published_peaks import PEAKS, RESERVED
from published_reserved import section
from published_rows import FMS_BF16, FMS_LATER, ROWS, TABLES, Row
from published_steps import folder_of

from torchtune_adaptive.common import AdaptiveBatchingError
from torchtune_adaptive.library.planning import Plan

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published.json"
_ROUNDING = 5e-4
"""Share by which two peaks of the same tensors differ at most, because blocks are rounded up."""
NUMBER = ("per_device_train_batch_size",)
NOT_OF_THE_OPTIMIZER = (
    "with plain kernels the peak is not the optimizer's, and what fused ones take is not planned"
)


def predicted(rows: Sequence[Row], under: Path) -> Iterator[dict[str, Any]]:
    """What the planner says of rows, or why it says nothing; ascending ones of the same run."""
    known: dict[int, Plan] = {}
    changes = False
    """Whether the peak changes with rows."""
    for row in sorted(rows, key=lambda row: row.rows):
        folder = folder_of(row.model, under)
        said: dict[str, Any] = {"table": row.table, "row": row.name}
        if row.fused and changes:
            yield {**said, "not_predicted": NOT_OF_THE_OPTIMIZER}
            continue
        try:
            for number in (row.rows, 1) if row.fused else (row.rows,):
                if number not in known:
                    known[number] = row.planned(folder, number, f"{under}/cache")
        except AdaptiveBatchingError as error:
            yield {**said, "not_predicted": str(error)}
            continue
        plan = known[row.rows]
        if row.fused and _differ(known[1].allocated, plan.allocated):
            changes = True  # with more rows, too
            yield {**said, "not_predicted": NOT_OF_THE_OPTIMIZER}
            continue
        yield {**said, "allocated": plan.allocated, "reserved": plan.peak, "parts": plan.parts}


def _differ(one: int, other: int) -> bool:
    """Whether two peaks are of different tensors."""
    return abs(one / other - 1) > _ROUNDING


def run_of(row: Row) -> tuple[str, ...]:
    """What rows have in common of which only the number of rows differs."""
    others = {name: value for name, value in row.settings.items() if name not in NUMBER}
    return (row.table, row.model, row.gpu, row.step.__name__, repr(others))


def predict(only: str, again: bool) -> None:
    """Write predictions of the rows, and keep those of others; ``again`` keeps first predictions beside."""
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    found = {(each["table"], each["row"]): each for each in known}
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in ROWS:
        if only in f"{row.table} {row.name}":
            runs.setdefault(run_of(row), []).append(row)
    with tempfile.TemporaryDirectory() as under, ThreadPoolExecutor(2) as pool:

        def of_run(run: list[Row]) -> None:
            for each in predicted(run, Path(under)):
                before = found.get((each["table"], each["row"]), {})
                if again and "allocated" in before:
                    later = {"again_reserved": each["reserved"]}
                    if _differ(each["allocated"], before.get("again", before["allocated"])):
                        later["again"] = each["allocated"]
                    found[each["table"], each["row"]] = before | later
                elif not again:
                    found[each["table"], each["row"]] = each
                said = each.get("allocated") or each["not_predicted"]
                print(f"{each['row']}: {said}", flush=True)

        list(pool.map(of_run, runs.values()))
    order = [(row.table, row.name) for row in ROWS]
    kept = sorted(found.values(), key=lambda each: order.index((each["table"], each["row"])))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    RESULT.write_text(json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")


def compared() -> str:
    """The page."""
    result = json.loads(RESULT.read_text())
    peaks = page(result, PEAKS, TABLES, (FMS_LATER, FMS_BF16))
    return peaks + section(result["rows"], RESERVED)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the rows anew")
    arguments.add_argument("--again", action="store_true", help="beside the first predictions")
    arguments.add_argument("--only", default="", help="part of the names of the rows to predict")
    asked = arguments.parse_args()
    if asked.predict or asked.again:
        predict(asked.only, asked.again)
    else:
        RESULT.with_suffix(".md").write_text(compared())


if __name__ == "__main__":
    main()
