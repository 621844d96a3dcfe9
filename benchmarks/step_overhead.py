"""Steps per second of our recipe beside torchtune's, at the same batch size, in pairs.

    python benchmarks/step_overhead.py [--pairs 5] [--steps 40] [--batch_size 8] [--kind full]
                                       [--tensor_parallel] [--packed]

Each pair runs torchtune's recipe and ours one after the other, in fresh processes on 2 ranks, and compares
their median step. Pairs alternate which goes first, so that a machine that slows down slows both. Our side
runs three times in each pair: without recovery; with recovery ready, as it is by default and after a search;
and as it is on a simulated device, where every operation is counted. With ``--tensor_parallel`` the 2 ranks
split each layer; otherwise FSDP shards the model. With ``--packed`` all rows have one length; otherwise each
micro-batch has that of its longest row, and tensor parallelism meets new shapes all the time.

Runs on the CPU; torchtune's recipe needs three of its lines replaced for that (see tests/helpers/recipes).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import recipes
from tests.helpers.ranks import run_ranks

WARM_UP = 5
"""Steps at the start that are not counted: the first ones allocate, and ours record."""

TENSOR_PARALLEL = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
}


class Clock(recipes.Recorder):
    """A metric logger that notes when each step was over."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        recipes.RECORDS.append({"time": time.perf_counter(), "processor": time.process_time()})


def seconds_per_step(whose: str, kind: str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds of each step, and of the processor in it, on the rank that logs."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = recipes.tiny_config(
            kind,
            folder,
            **{"metric_logger._component_": f"{__name__}.Clock", "epochs": 1, **changes},
        )
        run = recipes.run_ours if whose == "ours" else recipes.run_torchtunes
        records = run(kind, cfg)[WARM_UP:]
    return [
        (after["time"] - before["time"], after["processor"] - before["processor"])
        for before, after in pairwise(records)
    ]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "torchtune": ("torchtune's", {}),
    "ours, on_out_of_memory: raise": ("ours", {"adaptive_batching.on_out_of_memory": "raise"}),
    "ours, recovery ready": ("ours", {}),
    "ours, simulated device": ("ours", {"adaptive_batching.memory_limit": "8GiB"}),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=35)
    arguments.add_argument("--batch_size", type=int, default=8)
    arguments.add_argument("--kind", choices=["full", "lora"], default="full")
    arguments.add_argument("--clip", type=float, default=None, help="clip_grad_norm")
    arguments.add_argument("--tensor_parallel", action="store_true", help="only with --kind full")
    arguments.add_argument("--packed", action="store_true", help="rows of one length")
    asked = arguments.parse_args()
    base = {
        "batch_size": asked.batch_size,
        "max_steps_per_epoch": asked.steps,
        "clip_grad_norm": asked.clip,
        **(TENSOR_PARALLEL if asked.tensor_parallel else {}),
        **({"dataset.packed": True, "tokenizer.max_seq_len": 256} if asked.packed else {}),
    }
    medians: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for pair in range(asked.pairs):
        for way in list(WAYS) if pair % 2 == 0 else reversed(WAYS):
            whose, changes = WAYS[way]
            seconds, *_ = run_ranks(
                seconds_per_step, 2, whose, asked.kind, {**base, **changes}, join=False, timeout=300
            )
            times, of_processor = zip(*seconds, strict=True)
            medians[way].append((statistics.median(times), statistics.median(of_processor)))

    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; tiny Llama, {asked.kind}, "
        f"{'tensor parallel, ' if asked.tensor_parallel else ''}2 ranks, {asked.batch_size} rows each, "
        f"clip_grad_norm {asked.clip}; "
        f"{'packed, ' if asked.packed else ''}{asked.steps - WARM_UP} steps a run, {asked.pairs} pairs\n"
    )
    print(f"{'':30}{'steps/s':>9}" + f"{'torchtune / this, by pair':>30}{'of the processor':>30}")
    print(f"{'':30}{'median':>9}" + 2 * f"{'median':>14}{'quartiles':>16}")
    for way, pairs in medians.items():
        line = f"{way:30}{1 / statistics.median(seconds for seconds, _ in pairs):>9.2f}"
        for clock in (0, 1):
            both = zip(medians["torchtune"], pairs, strict=True)
            ratios = [theirs[clock] / ours[clock] for theirs, ours in both]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            line += f"{middle:>14.3f}{low:>10.3f} {high:.3f}"
        print(line)
    print("\nAbove 1: faster than torchtune's recipe.")


if __name__ == "__main__":
    main()
