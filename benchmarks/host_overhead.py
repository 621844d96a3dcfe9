"""What `AdaptiveStep` asks of the host in a healthy step: beside a plain loop, in time and in counts.

    python benchmarks/host_overhead.py [--rounds 400] [--ranks 2 4]

Both train the same small model with the same arithmetic: losses and gradients are sums over all
micro-batches, divided once. In one process they take turns, step by step, and the time is that of the thread,
so other work on the machine slows both. Then counts of one step, which nothing else changes: functions that
Python calls, times that the host waits for numbers on the device (the optimizer's own included), requests to
a store, exchanges of the ranks on the host, and collectives. With ``--ranks``, so many processes shard the
model by FSDP.

Runs on the CPU. A layer has a width of 16, so a step is almost nothing but work on the host.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.library import Trained, collate, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.step_costs import Costs, costs_of, plain_loop

ROWS, LAYERS, WIDTH = 8, 12, 16
MICRO_BATCHES = (1, 4)


def loops(way: str, micro_batches: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A plain step and ours, each ready."""
    size, rows = ROWS // micro_batches, rows_of(ROWS, width=WIDTH)
    run, other = (Trained(way, layers=LAYERS, width=WIDTH) for _ in range(2))
    batches = lambda: (collate(rows[at : at + size]) for at in range(0, ROWS, size))  # noqa: E731
    plain = plain_loop(other.model, other.optimizer, other.forward, batches)
    both = plain, lambda: run.step(rows, collate, size)
    for take in both:
        for _ in range(20):  # the first ones allocate, and are recorded
            take()
    return both


def times_of(rounds: int, micro_batches: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the thread in each step of the plain loop and of ours, in turns."""
    plain, ours = loops("alone", micro_batches)
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()  # it would count for whoever comes when it runs
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            before = time.thread_time()
            (plain, ours)[which]()
            times[which].append(1000 * (time.thread_time() - before))
    gc.enable()
    return times


def costs(way: str, micro_batches: int) -> tuple[Costs, Costs]:
    plain, ours = loops(way, micro_batches)
    return costs_of(plain), costs_of(ours)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=400)
    arguments.add_argument("--ranks", type=int, nargs="*", default=[2])
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; {LAYERS} layers of width "
        f"{WIDTH}, {ROWS} rows, AdamW; {asked.rounds} rounds\n"
    )
    print(
        f"{'ms of the thread in a step':32}{'plain':>9}{'ours':>9}{'added: median':>16}{'quartiles':>16}"
    )
    for micro_batches in MICRO_BATCHES:
        plain, ours = times_of(asked.rounds, micro_batches)
        added = [b - a for a, b in zip(plain, ours, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        print(
            f"{_said(micro_batches):32}{statistics.median(plain):>9.2f}{statistics.median(ours):>9.2f}"
            f"{middle:>16.2f}{low:>9.2f} {high:.2f}"
        )
    names = [field.name.replace("_", " ") for field in fields(Costs)]
    print(f"\n{'in a step: plain / ours':32}" + "".join(f"{name:>16}" for name in names))
    for micro_batches in MICRO_BATCHES:
        _print_costs(f"1 rank, {_said(micro_batches)}", *costs("alone", micro_batches))
    for ranks in asked.ranks:
        for micro_batches in MICRO_BATCHES:
            found = run_ranks(costs, ranks, "fsdp", micro_batches, timeout=300)[0]
            _print_costs(f"{ranks} ranks, {_said(micro_batches)}", *found)


def _said(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _print_costs(label: str, plain: Costs, ours: Costs) -> None:
    pairs = ((getattr(plain, f.name), getattr(ours, f.name)) for f in fields(Costs))
    print(f"{label:32}" + "".join(f"{f'{a} / {b}':>16}" for a, b in pairs))


if __name__ == "__main__":
    main()
