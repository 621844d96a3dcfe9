"""Real tokens per second with a token budget, beside other ways to fill the same memory.

    python benchmarks/token_budget.py [--lengths openhermes] [--limit 1GiB] [--steps 1] [--rounds 5]
    python benchmarks/token_budget.py --device cuda --steps 4     # Llama-3.2-1B, random weights, bf16
    python benchmarks/token_budget.py --ways fixed budget         # only these

All ways train the same model on the same rows, in steps of the same number of rows, on one rank, and none
may take more than the device's memory. What fits is found with this package's searches; then memory is not
counted any more where it is simulated, because counting takes time. Rounds go through all ways, in turning
order. On a GPU each way begins with an empty cache, and with a step that is not timed.

- fixed: the largest micro-batch of the longest rows, in shuffled order, each padded to its longest row
- sorted: the same size, with all rows sorted by length (which is not shuffled any more)
- packed: torchtune's PackedDataset, full rows, with the mask that keeps the rows in them apart; the
  largest micro-batch of these
- joined: the same without the mask, so that rows attend to those before them (another training)
- budget: this package's token budget, in shuffled order

"Real" tokens are those of rows, not of padding. On the CPU, one thread. Row lengths are log-normal, cut at
the longest row:

- alpaca: median 110 and longest 1304 tokens, as LitGPT's documentation prints for the cleaned dataset
  (tutorials/prepare_dataset.md); 95 % have no more than 240, read off the curve in alpaca-lora's
  lengths.ipynb. The mean of such rows is 123; that curve's is 128.
- openhermes: mean 224 tokens of an answer of OpenHermes-2.5, longest 2048, as quadmix publishes for its
  10,000 rows. How they spread is not published: sigma 1 is an assumption, as of other chat data.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_facts import tell
from torchtune import training
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2_1b
from torchtune.modules import TransformerDecoder
from torchtune.modules.loss import CEWithChunkedOutputLoss

from torchtune_adaptive.common import amount_of_memory
from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.rows.micro_batches import ByTokens
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import find_largest
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.search.in_tokens import find_budget, lengths_to_measure

ROWS, ROWS_IN_STEP = 2048, 128
WAYS = ("fixed", "sorted", "packed", "joined", "budget")
SMALL_VOCABULARY = 512


@dataclass(frozen=True)
class Lengths:
    """The lengths of rows: log-normal, cut at the longest."""

    median: float
    sigma: float
    longest: int


LENGTHS = {
    "alpaca": Lengths(110, math.log(240 / 110) / statistics.NormalDist().inv_cdf(0.95), 1304),
    "openhermes": Lengths(224 / math.exp(0.5), 1.0, 2048),
}

Row = dict[str, list[int]]
Batches = Iterator[list[dict[str, Any]]]


def make_rows(lengths: Lengths, vocabulary: int) -> list[Row]:
    numbers = random.Random(0)

    def row() -> Row:
        drawn = numbers.lognormvariate(math.log(lengths.median), lengths.sigma)
        length = min(lengths.longest, max(8, int(drawn)))
        tokens = [numbers.randrange(vocabulary) for _ in range(length)]
        return {"tokens": tokens, "labels": tokens}

    return [row() for _ in range(ROWS)]


class Bench:
    """A model with its step, and the rows that it is trained on."""

    def __init__(self, device: str, lengths: Lengths, limit: int | None) -> None:
        torch.manual_seed(0)
        self.longest, self.limit = lengths.longest, limit
        on_cpu = device == "cpu"
        with training.set_default_dtype(torch.float32 if on_cpu else torch.bfloat16):
            with torch.device(device):
                self.model = small_llama(lengths.longest) if on_cpu else llama3_2_1b()
        self.vocabulary = SMALL_VOCABULARY if on_cpu else 128_000
        self.rows = make_rows(lengths, self.vocabulary)
        self.model.set_num_output_chunks(8)
        self.memory = device_memory(torch.device(device), limit)
        self.ranks = Ranks()
        self.step = TrainStep(
            model=self.model,
            optimizers=[torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=not on_cpu)],
            objective=NextTokenPrediction(CEWithChunkedOutputLoss()),
            device=torch.device(device),
            memory=self.memory,
            ranks=self.ranks,
        )

    def probe(self) -> Probe:
        return Probe(
            step=self.step,
            accumulation=lambda size: 2,
            headroom=0.05,
            entering=lambda phase: None,
        )

    def largest(self, batch: Callable[[int], dict[str, Any]]) -> int:
        with self.probe() as probe:
            probe.prime(batch)
            size = find_largest(
                "extrapolate", range(1, ROWS_IN_STEP + 1), lambda rows: probe.trial(rows, batch)
            ).size
        assert size is not None, "not even one row fits; give it more memory (--limit)"
        return size

    def seconds(self, steps: list[list[dict[str, Any]]]) -> float:
        self.count_up_to(None)
        if self.step.device.type != "cpu":
            # What another way has cached does not fit this one, and its memory would come piece by piece.
            self.memory.release()
            self.take(steps[0])
        started = self.memory.clock()
        for step in steps:
            self.take(step)
        seconds = self.memory.clock() - started
        self.count_up_to(self.limit)
        return seconds

    def take(self, micro_batches: list[dict[str, Any]]) -> None:
        for batch in micro_batches:
            self.step.forward_backward(dict(batch))
        assert not self.step.apply().lost

    def count_up_to(self, limit: int | None) -> None:
        if isinstance(self.memory, SimulatedMemory):
            self.memory.limit = limit

    def longest_rows(self, size: int, length: int | None = None) -> dict[str, Any]:
        tokens = [number % self.vocabulary for number in range(length or self.longest)]
        return padded([{"tokens": tokens, "labels": tokens}] * size)


def small_llama(longest: int) -> TransformerDecoder:
    return llama3(
        vocab_size=SMALL_VOCABULARY,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=128,
        intermediate_dim=384,
        max_seq_len=longest,
    )


def padded(rows: list[Row]) -> dict[str, Any]:
    return padded_collate_sft(rows)  # type: ignore[arg-type, return-value]


def in_steps(order: list[int]) -> Iterator[list[int]]:
    while True:
        for start in range(0, len(order) - ROWS_IN_STEP + 1, ROWS_IN_STEP):
            yield order[start : start + ROWS_IN_STEP]


def fixed(bench: Bench, order: list[int], size: int) -> Batches:
    for step in in_steps(order):
        parts = [step[i : i + size] for i in range(0, len(step), size)]
        yield [padded([bench.rows[i] for i in part]) for part in parts]


def packed(bench: Bench, order: list[int], apart: bool = True) -> Batches:
    """As many packs in a step as have the tokens of its rows, on average."""
    packs = PackedDataset([bench.rows[i] for i in order], max_seq_len=bench.longest)  # type: ignore[arg-type]

    def collate(some: list[Any]) -> dict[str, Any]:
        if apart:
            return padded_collate_packed(some)
        # Without the mask, which would be made on the device.
        names = ("tokens", "labels", "input_pos")
        return {name: torch.stack([one[name] for one in some]) for name in names}

    size = bench.largest(lambda rows: collate([packs[0]] * rows))
    in_a_step = round(len(packs) * ROWS_IN_STEP / len(order))
    at = 0
    while True:
        if at + in_a_step > len(packs):
            at = 0
        step = [packs[i] for i in range(at, at + in_a_step)]
        at += in_a_step
        yield [collate(step[i : i + size]) for i in range(0, len(step), size)]


def budget(bench: Bench, order: list[int]) -> Batches:
    lengths = [len(row["tokens"]) for row in bench.rows]
    with bench.probe() as probe:
        probe.prime(bench.longest_rows)
        found, _ = find_budget(
            lambda rows, length: probe.trial(rows, lambda n: bench.longest_rows(n, length)),
            lengths_to_measure(lengths, bench.longest),
            ROWS_IN_STEP,
        )
    assert found is not None
    packer = ByTokens(found, np.array(lengths), padding_id=0, ignored=-100)
    for step in in_steps(order):
        portions = packer.portions(step, packer.budget.tokens, rank=0, ranks=1)
        yield [padded([bench.rows[i] for i in portion.sample_ids]) for portion in portions]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--lengths", choices=LENGTHS, default="alpaca")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--limit", help="memory of the device (default on a CPU: 1GiB)")
    arguments.add_argument("--steps", type=int, default=1, help="in a round")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    limit = asked.limit or ("1GiB" if asked.device == "cpu" else None)
    bytes_ = amount_of_memory("--limit", limit) if limit else None
    bench = Bench(asked.device, LENGTHS[asked.lengths], bytes_)
    rows = bench.rows
    shuffled = random.Random(1).sample(range(ROWS), ROWS)
    by_length = sorted(range(ROWS), key=lambda i: len(rows[i]["tokens"]))
    # Steps of like rows, in shuffled order, or a few rounds would see short rows only.
    steps = [by_length[i : i + ROWS_IN_STEP] for i in range(0, ROWS, ROWS_IN_STEP)]
    random.Random(2).shuffle(steps)
    size = bench.largest(bench.longest_rows)
    ways: dict[str, Batches] = {
        "fixed": fixed(bench, shuffled, size),
        "sorted": fixed(bench, [i for step in steps for i in step], size),
        "packed": packed(bench, shuffled),
        "joined": packed(bench, shuffled, apart=False),
        "budget": budget(bench, shuffled),
    }
    compare(bench, {way: ways[way] for way in WAYS if way in asked.ways}, asked, size)
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
            seconds = bench.seconds(steps)
            if number:
                speeds[way].append(real / seconds)
                counts[way].append(len(micro_batches))
                shares[way].append(1 - real / sum(b["tokens"].numel() for b in micro_batches))
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; a Llama of "
        f"{sum(p.numel() for p in bench.model.parameters()):,} parameters; {asked.lengths}, "
        f"{ROWS_IN_STEP} rows in a step, {bench.memory.capacity() / 2**30:.2f} GiB of {bench.memory.name}: "
        f"{size} rows of {bench.longest} tokens fit; {asked.rounds} rounds\n"
    )
    first = next(iter(ways))
    print(
        f"{'':8}{'real tokens/s':>14}{'padding':>9}{'micro-batches/step':>20}{f'way / {first}':>24}"
    )
    print(f"{'':8}{'median':>14}{'':>9}{'':>20}{'median (low to high)':>24}")
    for way, speed in speeds.items():
        ratios = [mine / theirs for mine, theirs in zip(speed, speeds[first], strict=True)]
        said = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        if way != first:
            tell(f"real tokens/s, {way} / {first}", said)
        print(
            f"{way:8}{statistics.median(speed):>14,.0f}{statistics.mean(shares[way]):>9.0%}"
            f"{statistics.mean(counts[way]) / asked.steps:>20.1f}"
            f"{said:>24}"
        )


def _real(batch: dict[str, Any]) -> torch.Tensor:
    """Tokens of rows. Rows here have no masked labels, so what is ignored is padding."""
    return (batch["labels"] != -100).sum()


if __name__ == "__main__":
    main()
