"""How far estimates by arithmetic are from traced peaks, for torchtune's own configs.

    python benchmarks/estimate.py --minutes 120

Traced peaks are kept in ``docs/results/estimate.json`` as they are found, so it can be stopped, and goes on
where it was; what is printed compares all that are there. Each config is planned as its recipe runs it, on
one GPU or on eight, with rows of 2,048 tokens, at its batch size and at four times that. Configs that have
no estimate are not traced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from comparing import summary

from torchtune_adaptive.common import AdaptiveBatchingError, table
from torchtune_adaptive.planner import processes
from torchtune_adaptive.recipe import (
    PlanRequest,
    Query,
    check_method,
    estimated,
    load_config,
    plan_request,
    register,
    require_supported_versions,
    torchtune_recipes,
)

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "estimate.json"
HEADER = ("config", "GPUs", "rows", "estimate, GiB", "traced, GiB", "difference")
GPU, LENGTH, TIMES = "h200", 2048, (1, 4)
_LONGEST = 600.0
"""Seconds that the check of the tracing method may take."""


def plans() -> Iterator[PlanRequest]:
    """The plans of torchtune's configs that train a model on rows of text."""
    register()
    ranks = {
        config.name: 8 if recipe.supports_distributed else 1
        for recipe in torchtune_recipes()
        for config in recipe.configs
    }
    for name, number in sorted(ranks.items()):
        # Some are not for a recipe of ours, or need what is not installed.
        with suppress(AdaptiveBatchingError):
            cfg = load_config(name)
            yield plan_request(cfg, number, GPU, length=LENGTH, name=name)


def traced(query: Query) -> list[dict[str, int]]:
    """The peaks of a config. Call it in a process that does nothing else."""
    traces = query.traces()
    run = query.run(traces)
    rows = [times * query.rows for times in TIMES]
    found = [
        {"rows": each, "reserved": run.peak(each, query.length, query.device).reserved}
        for each in rows
    ]
    traces.remember()
    return found


def complete(minutes: float) -> None:
    """Trace what is missing, until the time is up."""
    kept = answers()
    require_supported_versions()
    with processes("torchtune_adaptive.recipe.plan.preload") as call:
        call(check_method, True).result(_LONGEST)
        missing = [one for one in plans() if one.name not in kept and estimated(one) is not None]
        names = {call(traced, plan.query()): plan.name for plan in missing}
        with suppress(TimeoutError):
            for done in as_completed(names, 60 * minutes):
                kept[names[done]] = done.result()
                RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
                print(names[done], file=sys.stderr, flush=True)


def answers() -> dict[str, list[dict[str, int]]]:
    """The traced peaks that are known, by config."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def compared() -> Iterator[tuple[PlanRequest, int, int, int]]:
    """A plan, its rows, and the bytes that are estimated and traced for them."""
    kept = answers()
    for plan in plans():
        for one in kept.get(plan.name, ()):
            about = estimated(plan, one["rows"])
            assert about is not None, plan.name
            yield plan, one["rows"], about.reserved, one["reserved"]


def errors() -> list[float]:
    """The differences, as shares of what is traced."""
    return [about / exact - 1 for *_, about, exact in compared()]


def report() -> Iterator[str]:
    """What is printed."""
    found = [*compared()]
    differences = [estimate / exact - 1 for *_, estimate, exact in found]
    lines = [
        (
            plan.name,
            str(plan.ranks),
            str(rows),
            *(f"{nbytes / 2**30:.2f}" for nbytes in (estimate, exact)),
            f"{difference:+.1%}",
        )
        for (plan, rows, estimate, exact), difference in zip(found, differences, strict=True)
    ]
    yield from table(HEADER, lines, right={1, 2, 3, 4, 5})
    yield ""
    yield summary(differences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="the most time that this takes")
    complete(parser.parse_args().minutes)
    print("\n".join(report()))
