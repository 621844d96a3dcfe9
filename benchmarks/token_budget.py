"""Real tokens per second with a token budget, beside other ways to fill the same memory.

    python benchmarks/token_budget.py [--lengths instructions] [--limit 640] [--steps 1] [--rounds 5]

All ways train the same model on the same rows, in steps of the same number of rows, on one rank, and none
may take more than the simulated device's memory. What fits is found with this package's searches; then
memory is not counted any more, because counting takes time. Rounds go through all ways, in turning order.

- fixed: the largest micro-batch of the longest rows, in shuffled order, each padded to its longest row
- sorted: the same size, with all rows sorted by length (which is not shuffled any more)
- packed: torchtune's PackedDataset, full rows, with the mask that keeps the rows in them apart; the
  largest micro-batch of these
- budget: this package's token budget, in shuffled order

"Real" tokens are those of rows, not of padding. Runs on the CPU, on one thread. Row lengths are log-normal,
cut at 1024 tokens:

- instructions: median 274 and 90 % below 467 tokens, as published for recipe-nlg-alpaca, a dataset in
  Alpaca's format counted with Llama 3's tokenizer
- broad: median 150, sigma 1: short answers and long ones, as in chat data. An assumption, not a dataset.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.memory import SimulatedMemory
from torchtune_adaptive.probe import Probe
from torchtune_adaptive.search import search
from torchtune_adaptive.step import TrainStep
from torchtune_adaptive.token_budget import TokenPacker, find_budget, lengths_to_measure

LONGEST, VOCABULARY, ROWS, ROWS_IN_STEP = 1024, 512, 2048, 128
LENGTHS = {
    "instructions": (math.log(274), math.log(467 / 274) / statistics.NormalDist().inv_cdf(0.9)),
    "broad": (math.log(150), 1.0),
}

Row = dict[str, list[int]]
Batches = Iterator[list[dict[str, Any]]]


def make_rows(kind: str) -> list[Row]:
    numbers = random.Random(0)
    median, sigma = LENGTHS[kind]

    def row() -> Row:
        length = min(LONGEST, max(8, int(numbers.lognormvariate(median, sigma))))
        tokens = [numbers.randrange(VOCABULARY) for _ in range(length)]
        return {"tokens": tokens, "labels": tokens}

    return [row() for _ in range(ROWS)]


class Bench:
    """A model with its step, and the rows that it is trained on."""

    def __init__(self, rows: list[Row], limit: int) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.limit = limit
        self.model = llama3(
            vocab_size=VOCABULARY,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=128,
            intermediate_dim=384,
            max_seq_len=LONGEST,
        )
        self.model.set_num_output_chunks(8)
        self.memory = SimulatedMemory(limit)
        self.ranks = Ranks()
        self.step = TrainStep(
            model=self.model,
            optimizers=[torch.optim.AdamW(self.model.parameters(), lr=1e-4)],
            loss_fn=CEWithChunkedOutputLoss(),
            device=torch.device("cpu"),
            memory=self.memory,
            ranks=self.ranks,
            survive=True,
        )

    def probe(self, batch: Callable[[int], dict[str, Any]]) -> Probe:
        return Probe(
            step=self.step,
            batch=batch,
            accumulation=lambda size: 2,
            headroom=0.05,
            ranks=self.ranks,
            entering=lambda phase: None,
        )

    def largest(self, batch: Callable[[int], dict[str, Any]]) -> int:
        with self.probe(batch) as probe:
            probe.prime()
            size = search("extrapolate", range(1, ROWS_IN_STEP + 1), probe.trial).size
        assert size is not None, "not even one row fits; give it more memory (--limit)"
        return size

    def seconds(self, batches: Batches, steps: int) -> float:
        self.memory.limit = None
        started = time.perf_counter()
        for _ in range(steps):
            for batch in next(batches):
                self.step.forward_backward(dict(batch))
            assert not self.step.apply().lost
        self.memory.limit = self.limit
        return time.perf_counter() - started


def padded(rows: list[Row]) -> dict[str, Any]:
    return padded_collate_sft(rows)  # type: ignore[arg-type, return-value]


def longest_rows(size: int, length: int = LONGEST) -> dict[str, Any]:
    tokens = list(range(VOCABULARY)) * (length // VOCABULARY + 1)
    return padded([{"tokens": tokens[:length], "labels": tokens[:length]}] * size)


def in_steps(order: list[int]) -> Iterator[list[int]]:
    while True:
        for start in range(0, len(order) - ROWS_IN_STEP + 1, ROWS_IN_STEP):
            yield order[start : start + ROWS_IN_STEP]


def fixed(bench: Bench, order: list[int], size: int) -> Batches:
    for step in in_steps(order):
        parts = [step[i : i + size] for i in range(0, len(step), size)]
        yield [padded([bench.rows[i] for i in part]) for part in parts]


def packed(bench: Bench, order: list[int]) -> Batches:
    """As many packs in a step as have the tokens of its rows, on average."""
    packs = PackedDataset([bench.rows[i] for i in order], max_seq_len=LONGEST)  # type: ignore[arg-type]
    size = bench.largest(lambda rows: padded_collate_packed([packs[0]] * rows))
    in_a_step = round(len(packs) * ROWS_IN_STEP / len(order))
    at = 0
    while True:
        if at + in_a_step > len(packs):
            at = 0
        step = [packs[i] for i in range(at, at + in_a_step)]
        at += in_a_step
        yield [padded_collate_packed(step[i : i + size]) for i in range(0, len(step), size)]


def budget(bench: Bench, order: list[int]) -> Batches:
    lengths = [len(row["tokens"]) for row in bench.rows]
    length_now = LONGEST

    def probe_at(length: int) -> Probe:
        nonlocal length_now
        length_now = length
        return probe

    with bench.probe(lambda rows: longest_rows(rows, length_now)) as probe:
        probe.prime()
        found, _ = find_budget(probe_at, lengths_to_measure(lengths, LONGEST), ROWS_IN_STEP)
    assert found is not None
    packer = TokenPacker(found, lengths, padding_id=0, ignored=-100)
    for step in in_steps(order):
        portions = packer.portions(step, packer.largest, rank=0, ranks=1)
        yield [padded([bench.rows[i] for i in portion.sample_ids]) for portion in portions]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--lengths", choices=LENGTHS, default="instructions")
    arguments.add_argument("--limit", type=int, default=640, help="MiB of the simulated device")
    arguments.add_argument("--steps", type=int, default=1, help="in a round")
    arguments.add_argument("--rounds", type=int, default=5)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    rows = make_rows(asked.lengths)
    bench = Bench(rows, asked.limit << 20)
    shuffled = random.Random(1).sample(range(ROWS), ROWS)
    by_length = sorted(range(ROWS), key=lambda i: len(rows[i]["tokens"]))
    # Steps of like rows, in shuffled order, or a few rounds would see short rows only.
    steps = [by_length[i : i + ROWS_IN_STEP] for i in range(0, ROWS, ROWS_IN_STEP)]
    random.Random(2).shuffle(steps)
    size = bench.largest(longest_rows)
    ways: dict[str, Batches] = {
        "fixed": fixed(bench, shuffled, size),
        "sorted": fixed(bench, [i for step in steps for i in step], size),
        "packed": packed(bench, shuffled),
        "budget": budget(bench, shuffled),
    }
    compare(bench, ways, asked, size)
    dist.destroy_process_group()


def compare(bench: Bench, ways: dict[str, Batches], asked: argparse.Namespace, size: int) -> None:
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    counts: dict[str, list[int]] = {way: [] for way in ways}
    shares: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(asked.rounds + 1):  # the first one warms up
        for way in list(ways) if number % 2 else reversed(ways):
            steps = [next(ways[way]) for _ in range(asked.steps)]
            micro_batches = [batch for step in steps for batch in step]
            real = sum(int(_real(batch)) for batch in micro_batches)
            seconds = bench.seconds(iter(steps), asked.steps)
            if number:
                speeds[way].append(real / seconds)
                counts[way].append(len(micro_batches))
                shares[way].append(1 - real / sum(b["tokens"].numel() for b in micro_batches))
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; a Llama of "
        f"{sum(p.numel() for p in bench.model.parameters()):,} parameters; {asked.lengths}, "
        f"{ROWS_IN_STEP} rows in a step, {asked.limit} MiB: {size} rows of {LONGEST} tokens fit; "
        f"{asked.rounds} rounds\n"
    )
    print(f"{'':8}{'real tokens/s':>14}{'padding':>9}{'micro-batches/step':>20}{'way / fixed':>24}")
    print(f"{'':8}{'median':>14}{'':>9}{'':>20}{'median (low to high)':>24}")
    for way, speed in speeds.items():
        ratios = [mine / theirs for mine, theirs in zip(speed, speeds["fixed"], strict=True)]
        print(
            f"{way:8}{statistics.median(speed):>14,.0f}{statistics.mean(shares[way]):>9.0%}"
            f"{statistics.mean(counts[way]) / asked.steps:>20.1f}"
            f"{statistics.median(ratios):>10.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _real(batch: dict[str, Any]) -> torch.Tensor:
    """Tokens of rows. Rows here have no masked labels, so what is ignored is padding."""
    return (batch["labels"] != -100).sum()


if __name__ == "__main__":
    main()
