"""``docs/results/trainers.md``: what steps of real trainers take, as run and as they had been described.

    python docs/make/trainer_peaks.py > docs/results/trainers.md

The numbers are in ``tests/data/trainer_peaks.json``, and ``test_program_trainers.py`` runs the cases.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchtune_adaptive.common import table

PEAKS = Path(__file__).parents[2] / "tests" / "data" / "trainer_peaks.json"
_HEAD = """\
# What steps of trainers take, as run and as described

Peaks of tensors that `tune-adaptive plan --hf` predicts for small models on an H100, in bytes, in two ways.
*Described* are plans of the way before, which wrote down what transformers 5.23, TRL 1.16, PEFT 0.21,
accelerate 1.15 and bitsandbytes 0.50 do; these had been compared with the real trainers on simulated memory,
and were within 0.1 %. *Run* are those of now: the trainer itself runs on a GPU that is not there. Neither ran
on a GPU.

    python -m pytest tests/planner/test_program_trainers.py --exhaustive

"""
_TAIL = """
Of {count} cases, {near} are within 0.1 % of each other. The others are FSDP2 with adapters: the description
gathers the last norm and the head together, but accelerate finds no norm in PEFT's model, so it shards the
head alone, and TRL gathers that. What is run is what real ranks do. Why DPO takes more has not been found.
"""


def page() -> str:
    """The page, as Markdown."""
    peaks = json.loads(PEAKS.read_text())
    rows, near = [], 0
    for name, both in peaks.items():
        share = both["run"] / both["described"] - 1
        near += abs(share) < 0.001
        numbers = (f"{both['described']:,}", f"{both['run']:,}", f"{100 * share:+.2f} %")
        rows.append((name, *numbers))
    header = ("step", "described", "run", "difference")
    lines = "\n".join(f"  {line}".rstrip() for line in table(header, rows, right={1, 2, 3}))
    return f"{_HEAD}```\n{lines}\n```\n{_TAIL.format(count=len(peaks), near=near)}"


if __name__ == "__main__":
    print(page(), end="")
