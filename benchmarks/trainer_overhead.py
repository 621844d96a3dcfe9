"""What a step of TRL's trainers costs, plain and ours: calls, collectives, time; and collating rows.

    python benchmarks/trainer_overhead.py [--pairs 7] [--steps 12] [--rows_ms 4]

SFTTrainer and GRPOTrainer, plain and ours, take turns in the same processes, with micro-batches of the same
size: in one process, with ``DistributedDataParallel`` and with FSDP2 on 2 ranks. The loader's batches are as
large as micro-batches, or, of ours, smaller or larger, as after a search. Calls are those of functions in
Python and in C in one step, which no other work on the machine changes; the ratio of times is that of the
medians of a pair.

Then a costly collate function: it sleeps for each row, and 2 processes load data. Micro-batches are the
loader's batches, or smaller or larger, as a search would find them; the plain trainer's batches are as large.

Needs transformers, TRL and PEFT, which need other packages than torchtune: see tests/helpers/beside.py.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import trl  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as missing:
    sys.exit(
        f"trainer_overhead: {missing}. Run this with the Python of an environment that has transformers, TRL "
        "and PEFT, as make_environment of tests/helpers/beside.py makes it."
    )

from tests.integrations.real.trainers import Padding, make, on_ranks, texts, tokens
from tests.integrations.real.ways import FSDP2, fsdp2_on_cpu
from torchtune_adaptive.common import launcher
from torchtune_adaptive.core.private import groups_here, launches_of
from torchtune_adaptive.integrations import Adaptive

AS_CONFIGURED = Adaptive(search=False)


@dataclass(frozen=True)
class Way:
    """A trainer, and how it is spread over ranks."""

    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    options: Adaptive = AS_CONFIGURED
    size: int = 4
    """The rows of a micro-batch, and of a batch of the plain trainer; our loader has 4 in a batch."""
    kind: str = "sft"


WAYS = {
    "1 process": Way(),
    "DDP": Way(2),
    "FSDP2": Way(2, FSDP2),
    "FSDP2, in the last": Way(2, FSDP2, Adaptive(search=False, sync_each_batch=False)),
}
DIVIDED = {
    f"{name}, micro-batch {size}": Way(ranks, size=size)
    for size in (2, 8)
    for name, ranks in (("1 process", 1), ("DDP", 2))
}
"""Where micro-batches are not the loader's batches."""
GENERATING = {
    "GRPO, 1 process": Way(kind="grpo"),
    "GRPO, DDP": Way(2, kind="grpo"),
    "GRPO, FSDP2": Way(2, FSDP2, kind="grpo"),
}
COUNTED = 5
"""The step whose calls are counted: sequences of collectives are recorded before."""
WARM_UP = 6
"""Steps that are not timed: those in which the size is new to the processes that load data."""
LARGER = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
STEP = 16
"""Rows in a step of a process."""


@dataclass
class Seen:
    """What a training has asked of the host."""

    calls: list[int] = field(default_factory=lambda: [0, 0])
    """Of functions in Python, and in C, in a step."""
    collectives: tuple[int, int] = (0, 0)
    """In a step: of the trainer's groups, and of ours, which are on the host."""
    ends: list[float] = field(default_factory=list)
    """When each step was over."""
    collated: int = 0
    """Rows that the training process has collated after the steps that warm up."""

    @property
    def seconds(self) -> float:
        return statistics.median(b - a for a, b in pairwise(self.ends[WARM_UP - 1 :]))


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes what a training asks of the host, and gives micro-batches a size after the first step."""

    def __init__(self, counts: bool, size: int = 0) -> None:
        self.seen, self._counts, self._size = Seen(), counts, size
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        steps = getattr(self.trainer, "_adaptive_step", None)
        if steps is not None and self._size:
            steps._size = self._size  # what a search would have found
        if state.global_step == WARM_UP:
            Slow.rows.zero_()
        self.seen.ends.append(time.perf_counter())
        if self._counts and state.global_step == COUNTED:
            self._before = launched()
            calls = self.seen.calls

            def count(frame: Any, event: str, argument: Any) -> None:
                if event == "call":
                    calls[0] += 1
                elif event == "c_call":
                    calls[1] += 1

            sys.setprofile(count)
        elif self._counts and state.global_step == COUNTED + 1:
            sys.setprofile(None)
            theirs, ours = (b - a for a, b in zip(self._before, launched(), strict=True))
            self.seen.collectives = theirs, ours

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.collated = int(Slow.rows)


def launched() -> tuple[int, int]:
    """The collectives that the trainer's groups have launched, and those that ours have."""
    numbers = [0, 0]
    for group in groups_here():
        numbers[group.group_desc == launcher.OWN_GROUP] += launches_of(group) or 0
    return numbers[0], numbers[1]


class Slow(Padding):
    """A collate function that takes so long for each row, as decoding an image would."""

    seconds = 0.0
    rows = torch.zeros((), dtype=torch.int64)
    """Those that the training process has collated."""

    def __call__(self, rows: list[Any]) -> Any:
        time.sleep(self.seconds * len(rows))
        if get_worker_info() is None:
            self.rows += len(rows)
        return super().__call__(rows)


def run(kind: str, ours: Adaptive | None, steps: int, watch: Watch, **settings: Any) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"logging_steps": 1000, "max_steps": steps, "num_train_epochs": 100} | settings
        trainer = make(kind, ours, folder, callbacks=[watch], **settings)
        watch.trainer = trainer
        trainer.train()
        if ours is not None:
            trainer._adaptive_step._step.ranks.close()
        return watch.seen


def in_turns(pairs: int, train: Callable[[bool], Seen]) -> list[tuple[Seen, Seen]]:
    """Plain and ours, which alternate in going first."""
    seen = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        both = {ours: train(ours) for ours in order}
        seen.append((both[False], both[True]))
    return seen


def healthy_steps(
    way: Way, config: dict[str, Any], pairs: int, steps: int
) -> list[tuple[Seen, Seen]]:
    """The counts of a step of plain and ours, and then their times; of a Llama of this size."""
    column = "prompt" if way.kind == "grpo" else "text"
    settings = dict(way.settings, data=texts(column, count=128), config=config)
    if "fsdp" in settings:
        fsdp2_on_cpu()

    def train(ours: bool, counts: bool = False) -> Seen:
        rows = 4 if ours else way.size
        return run(
            way.kind,
            way.options if ours else None,
            steps,
            Watch(counts, way.size if ours and way.size != 4 else 0),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=STEP // rows,
            **settings,
        )

    counted = train(False, True), train(True, True)
    return [counted, *in_turns(pairs, train)]


def collating(size: int, milliseconds: float, pairs: int, steps: int) -> list[tuple[Seen, Seen]]:
    Slow.seconds = milliseconds / 1000

    def train(ours: bool) -> Seen:
        batch = 4 if ours else size
        return run(
            "trainer",
            Adaptive() if ours else None,
            steps,
            Watch(False, size),
            data=tokens(128, ragged=True),
            data_collator=Slow,
            dataloader_num_workers=2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=STEP // batch,
        )

    return in_turns(pairs, train)


TIMES = f"{'':24}{'plain, ms':>12}{'ours, ms':>12}{'time, ours / plain':>20}{'quartiles':>14}"


def times(pairs: list[tuple[Seen, Seen]]) -> str:
    """The milliseconds of a step of plain and of ours, and their ratio."""
    plain, ours = (1000 * statistics.median(pair[at].seconds for pair in pairs) for at in (0, 1))
    return f"{plain:12.0f}{ours:12.0f}{ratio(pairs).rjust(34)}"


def ratio(pairs: list[tuple[Seen, Seen]]) -> str:
    """The times of ours / plain: the median of pairs, and the quartiles."""
    ratios = [ours.seconds / plain.seconds for plain, ours in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:>14.3f}{low:>10.3f} {high:.3f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=12, help="steps that are timed")
    arguments.add_argument("--rows_ms", type=float, default=4.0, help="to collate a row")
    asked = arguments.parse_args()
    steps = WARM_UP + asked.steps

    def timed(way: Way, config: dict[str, Any]) -> list[tuple[Seen, Seen]]:
        seen: list[list[tuple[Seen, Seen]]]
        seen = on_ranks(healthy_steps, way.ranks, way, config, asked.pairs, steps, timeout=900)
        return seen[0]

    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; SFTTrainer, or GRPOTrainer "
        f"where it says so, tiny Llama, {STEP} rows a step in batches of 4; {asked.steps} steps a run, "
        f"{asked.pairs} pairs\n"
    )
    print(
        f"{'in a step: plain / ours':24}{'calls':>17}{'ours / plain':>14}{'collectives':>14}",
        end="",
    )
    print(f"{'on the host':>13}{'time, ours / plain':>20}{'quartiles':>12}", flush=True)
    for name, way in {**WAYS, **DIVIDED, **GENERATING}.items():
        counted, *pairs = timed(way, {})
        plain, ours = (sum(each.calls) for each in counted)
        theirs, own = ([each.collectives[at] for each in counted] for at in (0, 1))
        line = f"{name:24}{f'{plain} / {ours}':>17}{ours / plain:>14.2f}"
        line += f"{f'{theirs[0]} / {theirs[1]}':>14}{f'{own[0]} / {own[1]}':>13}"
        print(line + ratio(pairs).rjust(32), flush=True)

    print(f"\nthe same, a Llama of 11 million parameters\n\n{TIMES}", flush=True)
    for name, way in WAYS.items():
        _, *pairs = timed(way, LARGER)
        print(f"{name:24}" + times(pairs), flush=True)

    print(
        f"\nTrainer, {asked.rows_ms:g} ms to collate a row, {STEP} rows a step, loaded in batches of 4 by 2 "
        "processes\n"
    )
    print(TIMES, end="")
    print(f"{'rows collated in the training process':>40}", flush=True)
    for size in (4, 2, 8, 16):
        [pairs] = on_ranks(collating, 1, size, asked.rows_ms, asked.pairs, steps, timeout=900)
        collated = max(ours.collated for _, ours in pairs)
        print(f"{f'micro-batch {size}':24}{times(pairs)}{collated:>40}", flush=True)


if __name__ == "__main__":
    main()
