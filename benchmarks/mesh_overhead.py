"""What recovery costs in a steady step on a mesh: beside the same step without it, and beside plain torch.

    python benchmarks/mesh_overhead.py [--way tensor] [--rounds 40] [--steps 10] [--ranks 2 4 8 16]

Three loops train the same tiny decoder on the same rows: plain torch, `TrainStep` without recovery, and
`TrainStep` with recovery ready, whose collectives have been recorded. They take turns in one set of
processes, some steps at a time, and a ratio compares blocks of one round. So a machine that does other work
slows all three. Besides the time of a step, that of the processor is shown, which leaves out waiting, and
the number of calls of Python's functions, which nothing else changes. Then what an agreement of the ranks on
the host takes: waited for at once, or begun before other work and waited for after it.

Runs on the CPU. A layer has a width of 16, so a step is almost nothing but work on the host.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import context_parallel
from tests.helpers.decoder import batch
from tests.helpers.mesh import OnMesh, context_of, objective_of, spread
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core import Ranks

WAYS = ("fsdp", "tensor", "sequence", "loss", *context_parallel.WAYS)
LOOPS = ("plain torch", "without recovery", "recovery ready")
ROWS = 2
Seconds = dict[str, list[tuple[float, float]]]
"""Seconds of a step and of the processor in it, on one rank: for each loop, one pair a round."""
Calls = dict[str, int]
"""Calls of Python's functions in a step of each loop, which no other work on the machine changes."""


def shape_of(way: str, ranks: int) -> tuple[int, int, int]:
    """The mesh: FSDP over all ranks or, in other ways, over the groups of two that split rows or layers."""
    return (1, ranks, 1) if way == "fsdp" else (1, ranks // 2, 2)


def plain_loop(way: str, run: OnMesh) -> Callable[[], None]:
    """The loop that one would write: it sums tokens and loss over all ranks, as torchtune's does."""
    model = spread(way, run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    objective = objective_of(way)
    weight = objective.weight(run.rows)

    def take_step() -> None:
        loss = objective.summed_loss(model, run.rows, weight)
        loss.backward()
        tokens, whole = torch.tensor(weight), loss.detach().clone()
        dist.all_reduce(tokens)
        dist.all_reduce(whole)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(run.ranks.size / tokens.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take_step


def measure(
    way: str, shape: tuple[int, int, int], rounds: int, steps: int
) -> tuple[Seconds, Calls]:
    with context_of(way, shape):
        runs = [OnMesh(way, shape, survive=each, clip_grad_norm=None) for each in (False, True)]
        for run in runs:
            run.rows = run.part_of(batch(ROWS, 32, seed=run.place))
        takes = (plain_loop(way, runs[0]), *(lambda run=run: run.take(ROWS) for run in runs))
        loops = dict(zip(LOOPS, takes, strict=True))
        for take in loops.values():
            for _ in range(5):  # the first ones allocate, and are recorded
                take()
        assert not runs[1].step.collectives.recording
        seconds: Seconds = {name: [] for name in loops}
        for number in range(rounds):
            turn = number % len(LOOPS)
            for name in (*LOOPS[turn:], *LOOPS[:turn]):
                dist.barrier()
                before = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    loops[name]()
                after = time.perf_counter(), time.process_time()
                wall, processor = ((b - a) / steps for a, b in zip(before, after, strict=True))
                seconds[name].append((wall, processor))
        return seconds, {name: calls_in(take) for name, take in loops.items()}


def calls_in(take_step: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(take_step)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--way", choices=WAYS, action="append")
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--steps", type=int, default=10, help="of a loop in a round")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2])
    asked = arguments.parse_args()
    for ranks in asked.ranks:
        compare(asked.way or WAYS, ranks, asked.rounds, asked.steps)
    print("\nAbove 1: faster.")


def compare(ways: Sequence[str], ranks: int, rounds: int, steps: int) -> None:
    """Print what the loops take on so many ranks, and an agreement."""
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; tiny decoder, "
        f"{ranks} ranks, {ROWS} rows of 32 tokens each; {rounds} rounds of {steps} steps of each loop\n"
    )
    print(f"{'':16}{'':18}{'ms/step':>9}{'plain torch / this':>26}{'without recovery / this':>27}")
    print(f"{'':16}{'':18}{'median':>9}" + 2 * f"{'median':>12}{'quartiles':>14}")
    for way in ways:
        shape = shape_of(way, ranks)
        seconds, calls = run_ranks(measure, ranks, way, shape, rounds, steps, timeout=560)[0]
        for what, at in (("time", 0), ("processor", 1)):
            of = {name: [each[at] for each in seconds[name]] for name in LOOPS}
            for name in LOOPS:
                ratios = "".join(_compared(of[other], of[name]) for other in LOOPS[:2])
                label = f"{way}, {what}" if name == LOOPS[0] else ""
                print(f"{label:28}{name:18}{1000 * statistics.median(of[name]):>9.2f}{ratios}")
        print(f"{way}, calls in a step: " + ", ".join(f"{each} {calls[each]}" for each in LOOPS))
    at_once, after_work, work = run_ranks(agree, ranks, 20 * rounds, timeout=560)[0]
    print(
        f"an agreement of {ranks} ranks, in ms: {at_once:.2f} if waited for at once, {after_work:.2f} if "
        f"{work:.2f} of other work lies between"
    )


def agree(rounds: int) -> tuple[float, float, float]:
    """Milliseconds that a rank waits for an agreement: at once, after other work, and what that takes."""
    ranks, product = Ranks(), torch.ones(256, 256)
    times: tuple[list[float], ...] = ([], [], [])
    for number in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        end = ranks.begin_spread(number)
        if number % 2:
            begun = time.perf_counter()
            while time.perf_counter() - begun < 0.001 * ranks.size:
                torch.mm(product, product)
            worked = time.perf_counter() - begun
            times[2].append(worked)
            started += worked
        end()
        times[number % 2].append(time.perf_counter() - started)
    ranks.close()
    return tuple(1000 * statistics.median(each) for each in times)  # type: ignore[return-value]


def _compared(others: list[float], these: list[float]) -> str:
    ratios = [other / this for other, this in zip(others, these, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:>12.3f}{low:>8.3f} {high:.3f}"


if __name__ == "__main__":
    main()
