"""What `Adaptive(fastest=True)` gains beside the plain trainer, which checkpoints every layer.

    python benchmarks/layers_checkpointed.py [--pairs 3] [--steps 6]

transformers' Trainer on a Llama of 8 layers, on a CPU with a simulated limit of memory: what a step takes
with all layers checkpointed, and a share of what the activations of all layers take besides. Plain, with
`gradient_checkpointing=True` as is TRL's default, and ours take turns in one process, with the same rows in
a step. The ratio is that of the median times of a step of a pair, so above 1 ours is faster. After the
search, tensors are not counted against the limit any more: a device does that by itself.

Needs transformers, TRL and PEFT, which need other packages than torchtune: see tests/helpers/beside.py.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import trl  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError as missing:
    sys.exit(
        f"layers_checkpointed: {missing}. Run this with the Python of an environment that has transformers, "
        "TRL and PEFT, as make_environment of tests/helpers/beside.py makes it."
    )

from tests.integrations.real.trainers import make, on_ranks
from torchtune_adaptive import find_batch_size
from torchtune_adaptive.integrations import Adaptive

LAYERS, ROWS, LENGTH, HEADROOM = 8, 8, 64, 0.05
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 1024}
SETTINGS = {
    "gradient_checkpointing": True,
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 100,
    "logging_steps": 1000,
    "optim": "sgd",
    "config": CONFIG,
}
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass
class Seen:
    """What a training has taken."""

    seconds: float
    """The median of a step."""
    micro_batch: int = 0
    checkpointed: int = LAYERS


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes when steps are over; after the first, tensors are not counted any more."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        steps = getattr(self.trainer, "_adaptive_step", None)
        if steps is not None and state.global_step == 1:
            steps._step.train_step.memory.running = nullcontext
        self.ends.append(time.perf_counter())


@contextmanager
def trained(options: Adaptive | None, steps: int) -> Iterator[tuple[Any, Seen]]:
    """A trainer that has trained, and what that has taken."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        more = {"callbacks": [watch], "data": rows(), "max_steps": steps}
        trainer = watch.trainer = make("trainer", options, folder, **more, **SETTINGS)
        trainer.train()
        seen = Seen(statistics.median(b - a for a, b in pairwise(watch.ends[1:])))
        if options is not None:
            step = trainer._adaptive_step._step
            seen.micro_batch, seen.checkpointed = step.micro_batch, step.layers.checkpointed
        yield trainer, seen


def rows() -> Any:
    draw = random.Random(0)
    ids = [[draw.randrange(3, 64) for _ in range(LENGTH)] for _ in range(64)]
    return Dataset.from_list(
        [{"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in ids]
    )


def peaks() -> list[int]:
    """The peaks of trials with all layers checkpointed, and with none."""
    with trained(Adaptive(memory_limit="1TiB", fastest=True), 3) as (trainer, _):
        steps = trainer._adaptive_step
        step, row = steps._step, steps._longest()
        del step.train_step.memory.running  # so that tensors are counted again
        found = []
        for count in (LAYERS, 0):
            step.checkpoint_layers(count)
            with steps.around(step):
                size = find_batch_size(
                    step, lambda n: steps._micro_batch([row] * n), ceiling=ROWS, accumulation=ROWS
                )
            reports = [each for trial in size.trials for each in trial.reports]
            found.append(max(each.peak_bytes for each in reports))
    return found


def compare(pairs: int, steps: int) -> list[tuple[float, list[tuple[Seen, Seen]]]]:
    """For each share of memory: plain and ours, which take turns."""
    all_of_them, none = peaks()
    found = []
    for share in SHARES:
        usable = all_of_them + share * (none - all_of_them)
        ours = Adaptive(
            memory_limit=int(1.02 * usable / (1 - HEADROOM)), headroom=HEADROOM, fastest=True
        )
        in_turns = []
        for pair in range(pairs):
            order = (None, ours) if pair % 2 == 0 else (ours, None)
            both = {}
            for one in order:
                with trained(one, steps) as (_, seen):
                    both[one is not None] = seen
            in_turns.append((both[False], both[True]))
        found.append((share, in_turns))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=3)
    arguments.add_argument(
        "--steps", type=int, default=6, help="steps of a run; the first is not timed"
    )
    asked = arguments.parse_args()
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; Llama of {LAYERS} layers, "
        f"{ROWS} rows a step; {asked.steps} steps a run, {asked.pairs} pairs\n"
    )
    print(f"{'memory for activations of':28}{'checkpointed':>14}{'micro-batch':>13}", end="")
    print(f"{'plain, ms':>11}{'speed, ours / plain':>21}{'range':>15}", flush=True)
    [found] = on_ranks(compare, 1, asked.pairs, asked.steps, timeout=1800)
    for share, pairs in found:
        ratios = [plain.seconds / ours.seconds for plain, ours in pairs]
        ours = pairs[-1][1]
        plain_ms = 1000 * statistics.median(plain.seconds for plain, _ in pairs)
        line = f"{f'{share:.2f} of all layers':28}{f'{ours.checkpointed} of {LAYERS}':>14}"
        line += f"{ours.micro_batch:>13}{plain_ms:>11.0f}{statistics.median(ratios):>21.3f}"
        print(line + f"{min(ratios):>10.3f} {max(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
