"""A run that is disturbed at random, again and again, and the same run left alone.

    python -m tests.helpers.soak --minutes 10 [--seed SEED]

Each attempt is on a number of ranks of its own, and ends in some way: a rank is killed, in a step or in a
save, or stopped until the others give it up, or is asked to stop, or its disk is full. Each saves in a way of
its own: gathered, sharded, or in the background. Memory runs out on the way. Every step that was ever trained
is compared, done again or not: its loss and its samples; at the end, the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from tests.helpers.killing import Fault, kill_at
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import RESUME, saved_weights
from torchtune_adaptive.core import StepDone, TrainStep
from torchtune_adaptive.recipe.train.loop import TrainingLoop

BEGAN = 4
"""The ranks of the run left alone."""
CHANGES: dict[str, Any] = {
    "batch_size": 3,
    "dataset.split": "train[:240]",
    "max_steps_per_epoch": None,
    "clip_grad_norm": 1.0,
    "save_every_n_steps": 5,
    "keep_last_n_checkpoints": 3,
    "adaptive_batching.rank_timeout": 10,
    "adaptive_batching.grow_back_after": 10,
}
STEPS_OF_EPOCH = 20
_LONGEST = 300.0
"""Seconds that an attempt may take."""


@dataclass(frozen=True)
class Plan:
    """What happens in an attempt."""

    ranks: int
    way: str
    """How it ends: one of ``WAYS``, or ``done``."""
    rank: int
    """The rank that it happens on."""
    after: int
    """The steps that are trained before."""
    operation: int
    """The operation on files in the next save, if it happens there."""
    memory: tuple[tuple[int, int], ...] = ()
    """Steps, counted in this attempt, and ranks that run out of memory in them."""
    sharded: bool | str = False
    """The setting ``sharded_checkpoints``."""


WAYS: dict[str, Callable[[Plan], object]] = {
    "killed": lambda plan: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda plan: os.kill(os.getpid(), signal.SIGSTOP),
    "asked to stop": lambda plan: os.kill(os.getpid(), signal.SIGTERM),
    "killed in a save": lambda plan: kill_at(plan.operation),
    "disk full": lambda plan: Fault().arm(3 * plan.operation, stays=True),
}
"""The ways in which an attempt may end, each with what makes it so."""


def plan_of(chance: random.Random, ranks: int) -> Plan:
    way = chance.choice([*WAYS])
    # Only rank 0 writes.
    rank = 0 if way in ("killed in a save", "disk full") else chance.randrange(ranks)
    memory = tuple((chance.randint(1, 10), chance.randrange(ranks)) for _ in range(2))
    sharded = chance.choice([False, True, "background"])
    return Plan(ranks, way, rank, chance.randint(2, 14), chance.randint(1, 40), memory, sharded)


def train(cfg: DictConfig, plan: Plan, trace: Path) -> None:
    """Take part in an attempt. Each step that this rank trains is written to a file."""
    rank = int(os.environ["RANK"])
    cfg.adaptive_batching.sharded_checkpoints = plan.sharded
    step, forward = TrainingLoop._step, TrainStep._forward
    trained, short = 0, 0

    def runs_out(self: TrainStep, batch: Any) -> None:
        nonlocal short
        if short:
            short -= 1
            raise torch.OutOfMemoryError("injected")
        forward(self, batch)

    def traced(self: TrainingLoop, epoch: int) -> StepDone:
        nonlocal trained, short
        trained += 1
        short = (trained, rank) in plan.memory
        done = step(self, epoch)
        samples = [sample for each in self._rows.loaded for sample in each.sample_ids]
        line = {"step": self.global_step, "loss": done.loss, "samples": samples}
        with (trace / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trained == plan.after and rank == plan.rank and plan.way in WAYS:
            WAYS[plan.way](plan)
        return done

    TrainingLoop._step, TrainStep._forward = traced, runs_out  # type: ignore[method-assign]
    run_ours("full", cfg)


@dataclass
class Trained:
    """What some attempts have trained, in the order in which they did."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    """Steps and their losses."""
    samples: list[tuple[int, list[int]]] = field(default_factory=list)
    """Steps and their samples, of those that all ranks have written."""

    def read(self, trace: Path, ranks: int) -> None:
        lines = [
            {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
            for path in sorted(trace.iterdir())
        ]
        seen = defaultdict(list)
        for of_rank in lines:
            for number, line in of_rank.items():
                seen[number].append(line)
        for number, of_step in sorted(seen.items()):
            self.losses += [(number, line["loss"]) for line in of_step]
            if len(of_step) == ranks:
                samples = sorted(sample for line in of_step for sample in line["samples"])
                self.samples.append((number, samples))


@dataclass(frozen=True)
class Comparison:
    """A disturbed run beside the one left alone."""

    attempts: int
    ways: dict[str, int]
    steps: int
    again: int
    """Steps that were trained once more."""
    loss: float
    """The largest distance between losses of a step."""
    weight: float
    """The largest distance between weights at the end."""
    seconds: float


def soak(
    seed: int,
    folder: Path,
    epochs: int,
    disturbances: int | None = None,
    say: Callable[[str], object] = print,
) -> Comparison:
    """Disturb a run until it is done.

    Args:
        disturbances: how many attempts are disturbed; the next one is left alone. By default all are.

    Raises:
        AssertionError: a step had other samples, an attempt hung, or the run did not get on.
    """
    started, chance = time.monotonic(), random.Random(seed)
    say(f"seed {seed}")
    alone, changes = Trained(), {**CHANGES, "epochs": epochs}
    last = f"epoch_{epochs - 1}"
    trace = folder / "trace"
    trace.mkdir(parents=True)
    left_alone = tiny_config("full", folder / "alone", **changes)
    run_ranks(train, BEGAN, left_alone, Plan(BEGAN, "done", 0, 0, 0), trace, join=False)
    alone.read(trace, BEGAN)
    loss_of, samples_of = dict(alone.losses), dict(alone.samples)
    assert len(samples_of) == epochs * STEPS_OF_EPOCH
    cfg = tiny_config("full", folder / "disturbed", **changes, **RESUME)
    disturbed, ways, attempts = Trained(), defaultdict[str, int](int), 0
    while not (folder / "disturbed" / last).exists():
        attempts += 1
        assert attempts < 3 * epochs * STEPS_OF_EPOCH, "it does not get on"
        # Until there is a checkpoint, each attempt is the run's beginning.
        saved = any((folder / "disturbed").glob("epoch_*"))
        plan = plan_of(chance, chance.randint(1, 5) if saved else BEGAN)
        if disturbances is not None and attempts > disturbances:
            plan = replace(plan, way="done")
        ways[plan.way] += 1
        trace = folder / f"trace {attempts}"
        trace.mkdir()
        others = [rank for rank in range(plan.ranks) if rank != plan.rank or plan.way != "stopped"]
        if not others:  # nobody is there to give it up
            continue
        ended = watch_ranks(
            train, plan.ranks, cfg, plan, trace, until_exit_of=others, timeout=_LONGEST, join=False
        )
        before = len(disturbed.losses)
        disturbed.read(trace, plan.ranks)
        reached = max((step for step, _ in disturbed.losses[before:]), default=0)
        codes = [each.exit_code for each in ended]
        say(f"{attempts}: {plan}, to step {reached}, exit codes {codes}")
        if not reached and not (folder / "disturbed" / last).exists():
            say("\n".join(each.said[-2000:] for each in ended))
    for number, samples in disturbed.samples:
        assert samples == samples_of[number], f"step {number} has other samples"
    one, other = saved_weights(folder / "alone" / last), saved_weights(folder / "disturbed" / last)
    assert one.keys() == other.keys() and one
    assert {step for step, _ in disturbed.losses} == loss_of.keys()
    return Comparison(
        attempts,
        dict(ways),
        len(loss_of),
        len(disturbed.samples) - len({step for step, _ in disturbed.samples}),
        max(abs(loss - loss_of[step]) for step, loss in disturbed.losses),
        max(float((one[name] - other[name]).abs().max()) for name in one),
        time.monotonic() - started,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    end, seed = time.monotonic() + 60 * asked.minutes, asked.seed
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            print(soak(seed, Path(folder), epochs=6), flush=True)
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
