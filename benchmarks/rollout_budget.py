"""Useful tokens per second of scoring and training a rollout: token budgets beside padded micro-batches.

    python benchmarks/rollout_budget.py [--limit 1GiB] [--rounds 5]
    python benchmarks/rollout_budget.py --device cuda    # Llama-3.2-1B, random weights, bf16

One rank scores the rows of a rollout with a reference and then trains a policy on them in one step of GRPO,
with both models and the optimizer's state in memory. Sizes are found for each phase by this package's
searches, under the same limit; then memory is not counted any more where it is simulated, because counting
takes time. Rounds go through all ways, in turning order, and each has a rollout of its own.

- padded: the largest micro-batch of the longest rows, in the order of the rollout, padded to its longest row
- budget: this package's token budgets, one for each phase
- single: a micro-batch for each row, without padding; any size that fits may be set by hand

"Useful" tokens are those of rows, not of padding. On the CPU, one thread.

Responses are log-normal and cut at 1024 tokens, fitted to the first step of a GRPO run of Qwen2.5 on
mathematics (8 samples of 256 prompts) whose log is in the documentation of py-inference-scheduler
(integration/verl/README.md): a mean of 424.5 tokens, and 7.4 % of them cut. That gives a median of 348, and
sigma 0.744. Prompts have a mean of 111 and a minimum of 42 tokens there, and are log-normal here, between 42
and 256 tokens. Its longest has 994; leaving such out is to the advantage of "padded".
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2_1b
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.common import amount_of_memory
from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.rows.micro_batches import ByRows, ByTokens, MicroBatches
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import find_largest
from torchtune_adaptive.core.search.trial import SizeTrial
from torchtune_adaptive.core.step.phase import Phase
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.rollout.losses import GRPOObjective
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row, collate, known, longest_rows
from torchtune_adaptive.recipe.rollout.score import Scoring
from torchtune_adaptive.recipe.search.in_tokens import find_budget, lengths_to_measure

PROMPTS, SAMPLES = 16, 8
SHORTEST_PROMPT, LONGEST_PROMPT, CAP = 42, 256, 1024
LONGEST = LONGEST_PROMPT + CAP
RESPONSE = (math.log(348.5), 0.744)
PROMPT = (math.log(100.0), 0.45)
PHASES = ("scoring", "training")


@dataclass(frozen=True)
class Way:
    """How each phase divides its rows, in micro-batches of which size."""

    scoring: tuple[MicroBatches, int]
    training: tuple[MicroBatches, int]


def rollout(seed: int, vocabulary: int) -> list[Row]:
    numbers = random.Random(seed)
    rows = []
    for prompt in range(PROMPTS):
        drawn = int(numbers.lognormvariate(*PROMPT))
        tokens = [0] * min(max(drawn, SHORTEST_PROMPT), LONGEST_PROMPT)
        for sample in range(SAMPLES):
            length = min(max(int(numbers.lognormvariate(*RESPONSE)), 1), CAP)
            response = torch.tensor([numbers.randrange(vocabulary) for _ in range(length)])
            index = prompt * SAMPLES + sample
            advantage = torch.full((length,), numbers.gauss(0, 1))
            rows.append(Row(index, tokens, torch.empty(0), response=response, advantages=advantage))
    return rows


class Bench:
    """A policy with its step, and a reference that scores."""

    def __init__(self, device: str, limit: int | None) -> None:
        torch.manual_seed(0)
        self.limit, on_cpu = limit, device == "cpu"
        with training.set_default_dtype(torch.float32 if on_cpu else torch.bfloat16):
            with torch.device(device):
                self.model = small_llama() if on_cpu else llama3_2_1b()
        reference = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.vocabulary = 512 if on_cpu else 128_000
        self.memory, self.ranks = device_memory(torch.device(device), limit), Ranks()
        self.step = TrainStep(
            model=self.model,
            optimizers=[torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=not on_cpu)],
            objective=GRPOObjective(LogProbs(self.model), frozen=(reference,)),
            device=torch.device(device),
            memory=self.memory,
            ranks=self.ranks,
        )
        scoring = Scoring(0, torch.device(device), {"reference": LogProbs(reference)})
        self.scoring: Phase[Any, Any] = Phase("scoring", self.step, scoring, shape=len)

    def ways(self) -> dict[str, Way]:
        """All ways, of sizes that were found by trials in one snapshot."""
        probe = Probe(
            step=self.step,
            accumulation=lambda size: 2,
            headroom=0.05,
            entering=lambda phase: None,
        )
        with probe:
            probe.prime(lambda size: collate(rows_of(size, LONGEST), 0))
            trials: list[Callable[[int, int], SizeTrial]] = [
                lambda size, length: probe.trial_of(self.scoring, size, rows_of(size, length)),
                lambda size, length: probe.trial(size, lambda n: collate(rows_of(n, length), 0)),
            ]
            padded, budgets = zip(*map(_found, trials), strict=True)
        rows = ByRows("none")
        return {
            "padded": Way(*((rows, size) for size in padded)),
            "budget": Way(*((ByTokens.of_own_rows(each, 0, 0), each.tokens) for each in budgets)),
            "single": Way((rows, 1), (rows, 1)),
        }

    def seconds(self, way: Way, rows: list[Row]) -> tuple[float, float]:
        """Of scoring and of training."""
        lengths = [[row.length for row in rows]]
        self.count_up_to(None)
        self.memory.release()
        divided, size = way.scoring
        self.scoring.begin(size)
        started = self.memory.clock()
        scores = self.scoring.of_rows(rows, lambda done, n: divided.divide(lengths, n, 0, done))
        for row, found in zip(rows, scores, strict=True):
            row.reference = found["reference"]
        scored = self.memory.clock()
        self.memory.release()
        divided, size = way.training
        begun = self.memory.clock()
        for part in divided.divide(lengths, size, 0):
            self.step.forward_backward(collate([rows[at] for at in part], 0))
        assert not self.step.apply().lost
        ended = self.memory.clock()
        self.count_up_to(self.limit)
        return scored - started, ended - begun

    def count_up_to(self, limit: int | None) -> None:
        if isinstance(self.memory, SimulatedMemory):
            self.memory.limit = limit


def _found(trial: Callable[[int, int], SizeTrial]) -> tuple[int, Any]:
    """The rows and the budget that fit."""
    most = PROMPTS * SAMPLES
    size = find_largest("extrapolate", range(1, most + 1), lambda n: trial(n, LONGEST)).size
    budget, _ = find_budget(trial, lengths_to_measure([LONGEST_PROMPT], LONGEST), most)
    assert size is not None and budget is not None, "not even one row fits; raise --limit"
    return size, budget


def rows_of(number: int, length: int) -> list[Row]:
    prompt = min(LONGEST_PROMPT, length - 1)
    return longest_rows(number, prompt, length - prompt)


def small_llama() -> TransformerDecoder:
    return llama3(
        vocab_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=128,
        intermediate_dim=384,
        max_seq_len=LONGEST,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--limit", help="memory of the device (default on a CPU: 1GiB)")
    arguments.add_argument("--rounds", type=int, default=5)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit = asked.limit or ("1GiB" if asked.device == "cpu" else None)
    bench = Bench(asked.device, amount_of_memory("--limit", limit) if limit else None)
    ways = bench.ways()
    for name in ("padded", "budget"):
        for phase in PHASES:
            divided, size = getattr(ways[name], phase)
            said = divided.budget.measured if isinstance(divided, ByTokens) else f"{size} rows"
            print(f"{name}, {phase}: {said}", flush=True)
    compare(bench, ways, asked.rounds)
    dist.destroy_process_group()


def compare(bench: Bench, ways: dict[str, Way], rounds: int) -> None:
    speeds: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    padding: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    responses: list[int] = []
    for number in range(rounds + 1):  # the first one warms up
        rows = rollout(number, bench.vocabulary)
        useful = sum(row.length for row in rows)
        responses += [len(known(row.response)) for row in rows]
        for name in list(ways) if number % 2 else reversed(ways):
            seconds = bench.seconds(ways[name], rows)
            if number:
                speeds[name].append(tuple(useful / each for each in (*seconds, sum(seconds))))
                padding[name].append(tuple(padded(ways[name], phase, rows) for phase in PHASES))
            said = ", ".join(f"{each:.1f} s" for each in seconds)
            print(f"round {number}, {name}: {said}", flush=True)
    cut = sum(length == CAP for length in responses) / len(responses)
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; policy and reference of "
        f"{sum(p.numel() for p in bench.model.parameters()):,} parameters; {PROMPTS} x {SAMPLES} rows, "
        f"{bench.memory.capacity() / 2**30:.2f} GiB of {bench.memory.name}; {rounds} rounds; responses of "
        f"{statistics.mean(responses):.0f} tokens on average, {cut:.1%} of them cut at {CAP}\n"
    )
    for column, phase in enumerate((*PHASES, "both")):
        print(f"{phase:10}{'useful tokens/s':>16}{'padding':>9}{'way / padded':>28}")
        for name, speed in speeds.items():
            mine = [each[column] for each in speed]
            theirs = [each[column] for each in speeds["padded"]]
            ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
            share = f"{statistics.mean(p[column] for p in padding[name]):.0%}" if column < 2 else ""
            print(
                f"  {name:8}{statistics.median(mine):>16,.0f}{share:>9}"
                f"{statistics.median(ratios):>12.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def padded(way: Way, phase: str, rows: list[Row]) -> float:
    """The share of padding in what is computed."""
    divided, size = getattr(way, phase)
    lengths = [row.length for row in rows]
    parts = divided.divide([lengths], size, 0)
    return 1 - sum(lengths) / sum(len(part) * max(lengths[at] for at in part) for part in parts)


if __name__ == "__main__":
    main()
