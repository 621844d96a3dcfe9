"""``docs/what-fits.md``: what a first question to ``tune-adaptive plan`` is about, answered.

python docs/make/what_fits.py --predict    # traces what docs/results/what_fits.json lacks
python docs/make/what_fits.py > docs/what-fits.md

Rows are kept as they are found, so that tracing can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.planner import TracedRun, processes
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

RESULTS = Path(__file__).parents[1] / "results" / "what_fits.json"
LENGTHS = (2048, 8192)
ALIKE = ("enable_activation_checkpointing=True", "gradient_accumulation_steps=1")
"""Overrides of every config, whose own values differ from model to model."""
_GPUS = {"4090": "RTX 4090", "a100-80": "A100 80 GB", "h100": "H100"}
_RANKS = {1: tuple(_GPUS), 8: ("h100",)}
"""The GPUs that are planned, by their number."""
_GIB = 1 << 30
_BYTES = {"QLoRA": 0.5, "LoRA": 2, "full": 8}
"""Bytes of a parameter that stay in memory, at the least: its weight, and its gradient and AdamW's state."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: str
    method: str
    config: str
    overrides: tuple[str, ...]
    billions: float
    """Parameters of the model."""

    def words(self) -> str:
        """The config and its overrides, as they are typed."""
        return " ".join((self.config, *self.overrides, *ALIKE))

    def resident(self, ranks: int) -> float:
        """Bytes that stay in a GPU's memory, at the least."""
        return self.billions * 1e9 * _BYTES[self.method] / ranks


def _cases() -> Iterator[Case]:
    models: tuple[tuple[str, str, float], ...] = (
        ("Llama 3.2 1B", "llama3_2/1B", 1.24),
        ("Llama 3.1 8B", "llama3_1/8B", 8.03),
        ("Llama 3.2 3B", "llama3_2/3B", 3.21),
        ("Qwen2.5 7B", "qwen2_5/7B", 7.62),
        ("Llama 3.3 70B", "llama3_3/70B", 70.6),
        ("Qwen2.5 32B", "qwen2_5/32B", 32.8),
    )
    on_gpus = {"llama3_3/70B": ("fsdp_cpu_offload=False",)}
    no_full = {
        "qwen2_5/32B": (
            "qwen2_5/7B_full",
            "model._component_=torchtune.models.qwen2_5.qwen2_5_32b_instruct",
        )
    }
    for model, name, billions in models:
        config, *others = no_full.get(name, (f"{name}_full",))
        full = (*others, *on_gpus.get(name, ()))
        yield Case(model, "QLoRA", f"{name}_lora", ("model.quantize_base=True",), billions)
        yield Case(model, "LoRA", f"{name}_lora", (), billions)
        yield Case(model, "full", config, full, billions)


CASES = tuple(_cases())


def query_of(case: Case, ranks: int, length: int) -> tuple[Query, list[Any]]:
    """The plan that a case asks for, and its devices."""
    cfg = with_overrides(load_config(case.config), (*case.overrides, *ALIKE))
    names = _RANKS[ranks]
    plan = plan_request(cfg, ranks, names[0], length=length, name=case.config)
    return plan.query(), on_devices(plan, ",".join(names))


def answers(query: Query, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """What fits on each device, and how fast that is. Call it in a process that does nothing else."""
    traces = query.traces()
    run = TracedRun(traces, query.length)
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


def _predict(minutes: float) -> None:
    """Find what is missing, until the time is up."""
    kept: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    known = {_key(row) for row in kept}
    begun = time.monotonic()
    require_supported_versions()
    register()
    with processes("torchtune_adaptive.recipe.plan.preload") as call:
        call(check_method, True).result()
        for case in CASES:
            for ranks, length in ((ranks, length) for ranks in _RANKS for length in LENGTHS):
                about = {"model": case.model, "method": case.method}
                about |= {"ranks": ranks, "length": length}
                if _key(about) in known or time.monotonic() - begun > 60 * minutes:
                    continue
                query, devices = query_of(case, ranks, length)
                least = case.resident(ranks)
                started = time.monotonic()
                if all(least > device.usable_bytes for device, _ in devices):
                    found = [{"gpu": device.name, "largest": None} for device, _ in devices]
                else:
                    found = call(answers, query, devices).result()
                kept.append({**about, "devices": found})
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
                print(about, f"{time.monotonic() - started:.0f} s", flush=True)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "method", "ranks", "length"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="trace what is missing")
    parser.add_argument("--minutes", type=float, default=120, help="the most time that this takes")
    given = parser.parse_args()
    if given.predict:
        _predict(given.minutes)
