"""Traces what ``docs/results/what_fits.json`` lacks, a model and method at a time.

python docs/make/trace_what_fits.py --minutes 60

Answers are kept as they are found, so it can be stopped, and goes on where it was. A case takes some seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from what_fits import ALIKE, CASES, LENGTHS, RANKS, RESULTS, Case, answers, key_of

from torchtune_adaptive.planner import processes
from torchtune_adaptive.recipe import (
    Query,
    check_method,
    load_config,
    on_devices,
    plan_request,
    register,
    require_supported_versions,
    with_overrides,
)

_LONGEST = 1800.0
"""Seconds after which a case that has no answer ends the script; what was found before it is kept."""


def query_of(case: Case, ranks: int, length: int) -> tuple[Query, list[Any]]:
    """The plan that a case asks for, and its devices."""
    cfg = with_overrides(load_config(case.config), (*case.overrides, *ALIKE))
    names = RANKS[ranks]
    plan = plan_request(cfg, ranks, names[0], length=length, name=case.config)
    return plan.query(), on_devices(plan, ",".join(names))


def answer(query: Query, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """What fits on each device, and how fast that is. Call it in a process that does nothing else."""
    traces = query.traces()
    run = query.run(traces)
    found = []
    for device, pace in devices:
        question = replace(query, device=device, pace=pace).question
        one = run.answer(replace(question, rows=None))
        found.append(
            {
                "gpu": device.name,
                "largest": one.largest,
                "verdict": one.verdict,
                "reserved": one.peak.reserved,
                "usable": device.usable_bytes,
                "margin": [device.band, device.band_above],
                "tokens_per_second_per_gpu": one.speed and one.speed.tokens_per_second_per_gpu,
                "speed_margin": one.speed and list(one.speed.band),
            }
        )
    traces.remember()
    return found


def complete(minutes: float) -> None:
    """Find the answers that are missing, until the time is up."""
    kept = answers()
    known = {key_of(row) for row in kept}
    begun = time.monotonic()
    require_supported_versions()
    register()
    with processes("torchtune_adaptive.recipe.plan.preload") as call:
        call(check_method, True).result(_LONGEST)
        for length in LENGTHS:
            for case, ranks in ((case, ranks) for case in CASES for ranks in RANKS):
                about = {"model": case.model, "method": case.method}
                about |= {"ranks": ranks, "length": length}
                if key_of(about) in known or time.monotonic() - begun > 60 * minutes:
                    continue
                query, devices = query_of(case, ranks, length)
                least = case.resident(ranks)
                started = time.monotonic()
                if all(least > device.usable_bytes for device, _ in devices):
                    found = [{"gpu": device.name, "largest": None} for device, _ in devices]
                else:
                    found = call(answer, query, devices).result(_LONGEST)
                kept.append({**about, "devices": found})
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
                print(about, f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120, help="the most time that this takes")
    complete(parser.parse_args().minutes)
