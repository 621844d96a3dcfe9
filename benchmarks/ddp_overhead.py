"""What a step of replicas costs beside plain `DistributedDataParallel`: in time, in counts and in memory.

    python benchmarks/ddp_overhead.py [--pairs 12]

Both train the same model of 300 tensors on 2 ranks, with the same micro-batches and optimizer. In one set of
processes they take turns, step by step, and the ratio of each pair is that of their times, so other work on
the machine slows both. Counts are those of one step, which nothing else changes: the collectives of the
device's group and their bytes, the exchanges on the host, and the functions that Python calls. Memory is what
a process of its own has in use at most, beyond what it has before there is a model.

Runs on the CPU, with gloo.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.ranks import run_ranks
from tests.helpers.step_costs import costs_of
from torchtune_adaptive import AdaptiveStep

LAYERS, WIDTH, LENGTH, ROWS = 25, 288, 8, 4
ACCUMULATION = (1, 4)
WARM_UP = 4
"""Steps that are not counted: the first ones allocate, and are recorded."""
Step = Callable[[], object]


def wrapped(**options: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0) for _ in range(LAYERS))
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [*torch.randn(ROWS, LENGTH, WIDTH, generator=generator)]


def plain_step(accumulation: int, **options: bool) -> Step:
    model, given = wrapped(**options), rows()
    optimizer, size = torch.optim.SGD(model.parameters(), lr=1e-4), ROWS // accumulation

    def take() -> None:
        for at in range(0, ROWS, size):
            with nullcontext() if at + size == ROWS else model.no_sync():
                loss = model(torch.stack(given[at : at + size])).square().mean() / accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take


def our_step(accumulation: int) -> Step:
    model, given = wrapped(), rows()

    def forward(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), batch.numel()

    step = AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=1e-4), forward)
    return lambda: step(given, torch.stack, ROWS // accumulation)


def both(accumulation: int) -> tuple[Step, Step]:
    """A plain step and ours, each ready."""
    steps = plain_step(accumulation), our_step(accumulation)
    for take in steps:
        for _ in range(WARM_UP):
            take()
    return steps


def ratios(pairs: int, accumulation: int) -> list[float]:
    """Ours to plain, in time, of each pair of steps."""
    steps, found = both(accumulation), []
    gc.disable()  # it would count for whoever comes when it runs
    for pair in range(pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            steps[which]()
            seconds[which] = time.perf_counter() - started
        found.append(seconds[1] / seconds[0])
    return found


def counts(accumulation: int) -> list[tuple[int, int, int, float]]:
    """Of a plain step and of ours: collectives, exchanges on the host, calls, and MiB that are reduced."""
    found = []
    for take in both(accumulation):
        costs = costs_of(take)
        found.append((costs.collectives, costs.agreements, costs.calls, _reduced(take) / (1 << 20)))
    return found


def _reduced(take: Step) -> int:
    """Bytes that a step reduces; all are as large as a float32, but a few in the exchange of a step."""
    with torch.profiler.profile(record_shapes=True) as profile:
        take()
    launches = [event for event in profile.events() if event.name == "gloo:all_reduce"]
    return sum(4 * math.prod(shape) for event in launches for shape in event.input_shapes)


def memory(kind: str, accumulation: int) -> tuple[float, float]:
    """Megabytes that a process has in use at most, and those of the model's gradients."""
    before = _most()
    options = {"gradient_as_bucket_view": True} if kind == "plain, with views" else {}
    take = our_step(accumulation) if kind == "ours" else plain_step(accumulation, **options)
    for _ in range(WARM_UP):
        take()
    return (_most() - before) / 1000, sum(p.nbytes for p in wrapped().parameters()) / 1e6


def _most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB, as Linux has it


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=12)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; {12 * LAYERS} tensors, "
        f"2 ranks, {ROWS} rows of {LENGTH} x {WIDTH}; {asked.pairs} pairs\n"
    )
    print(f"{'time, ours to plain DDP':32}{'median':>10}{'quartiles':>16}")
    for accumulation in ACCUMULATION:
        found = run_ranks(ratios, 2, asked.pairs, accumulation, timeout=900)[0]
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{_said(accumulation):32}{middle:>10.3f}{low:>10.3f} {high:.3f}")
    names = ("collectives", "on the host", "calls", "MiB reduced")
    print(f"\n{'in a step: plain / ours':32}" + "".join(f"{name:>18}" for name in names))
    for accumulation in ACCUMULATION:
        plain, ours = run_ranks(counts, 2, accumulation, timeout=300)[0]
        pairs = (f"{_short(a)} / {_short(b)}" for a, b in zip(plain, ours, strict=True))
        print(f"{_said(accumulation):32}" + "".join(f"{pair:>18}" for pair in pairs))
    kinds = ("plain", "plain, with views", "ours")
    print(f"\n{'MB in use at most':32}" + "".join(f"{kind:>20}" for kind in kinds))
    for accumulation in ACCUMULATION:
        found = [run_ranks(memory, 2, kind, accumulation, timeout=300)[0] for kind in kinds]
        print(f"{_said(accumulation):32}" + "".join(f"{most:>20.0f}" for most, _ in found))
    print(f"{'gradients':32}{found[0][1]:>20.0f}")


def _said(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _short(number: float) -> str:
    return f"{number:.1f}" if isinstance(number, float) else str(number)


if __name__ == "__main__":
    main()
