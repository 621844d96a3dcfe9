"""Throughputs that others have published, and the speeds that the planner predicts for their runs.

    python benchmarks/published_speeds.py --predict  # writes docs/results/published_speeds.json; ten minutes
    python benchmarks/published_speeds.py            # writes docs/results/published_speeds.md

``published_rows`` says what ran. Runs with fused kernels are planned with those of Liger that do the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_rows import FMS_ROWS, POWER, Row
from published_speeds_page import page
from published_steps import folder_of
from published_throughputs import THROUGHPUTS

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published_speeds.json"
_FUSED = {
    "rope": True,
    "rms_norm": True,
    "swiglu": False,
    "cross_entropy": True,
    "fused_linear_cross_entropy": False,
}


def rows() -> Iterator[Row]:
    """The runs; of PowerLM with fused kernels, throughputs were not taken down."""
    for row in (one.row() for one in FMS_ROWS):
        if not row.fused or row.model != POWER:
            yield row


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a row's step, with its kernels."""
    if not row.fused:
        return row.settings
    in_head = "Liger" in row.name
    kernels = {**_FUSED, "cross_entropy": not in_head, "fused_linear_cross_entropy": in_head}
    return {**row.settings, "use_liger_kernel": True, "liger_kernel_config": kernels}


def predict() -> None:
    """Write the predictions of all rows."""
    found = []
    with tempfile.TemporaryDirectory() as under:
        for row in rows():
            said: dict[str, Any] = {"table": row.table, "row": row.name}
            planned = replace(row, settings=settings_of(row))
            folder = folder_of(row.model, Path(under))
            plan = planned.planned(folder, row.rows, f"{under}/cache")
            assert plan.speed is not None
            each, fits = plan.speed.tokens_per_second_per_gpu, plan.peak <= plan.usable_bytes
            found.append({**said, "predicted": round(each), "band": plan.speed.band, "fits": fits})
            print(f"{row.table}: {row.name}: {each:,.0f}", flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    RESULT.write_text(json.dumps({"versions": versions, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the rows anew")
    if arguments.parse_args().predict:
        predict()
    else:
        RESULT.with_suffix(".md").write_text(page(json.loads(RESULT.read_text()), THROUGHPUTS))
