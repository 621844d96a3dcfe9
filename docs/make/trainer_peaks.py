"""``docs/results/trainers.md``: what steps of real trainers take, as run and as they had been described.

    python docs/make/trainer_peaks.py > docs/results/trainers.md

The numbers are in ``tests/data``, in ``trainer_peaks.json`` and ``trainer_kinds.json``, and
``test_program_trainers.py`` runs the cases.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchtune_adaptive.common import table

DATA = Path(__file__).parents[2] / "tests" / "data"
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

_KINDS = """\
## Each kind of trainer, adapter and optimizer

A Llama of 12 tiny layers in bfloat16 on an H100, with every trainer of TRL 1.16, every method of PEFT 0.21,
every optimizer that transformers 5.23 names, and ways to make batches. *Planned* runs a few layers, as
`tune-adaptive plan` does; *all layers* runs the same program with all of them. Of {count} kinds, {planned}
are planned.

    python -m tests.helpers.trainer_kinds found.jsonl

"""
_NOT = """
The other {} end with a line that says why. Most are errors of the libraries, which a GPU would not change:

"""


def page() -> str:
    """The page, as Markdown."""
    peaks = json.loads((DATA / "trainer_peaks.json").read_text())
    rows, near = [], 0
    for name, both in peaks.items():
        share = both["run"] / both["described"] - 1
        near += abs(share) < 0.001
        numbers = (f"{both['described']:,}", f"{both['run']:,}", f"{100 * share:+.2f} %")
        rows.append((name, *numbers))
    header = ("step", "described", "run", "difference")
    block = _block(table(header, rows, right={1, 2, 3}))
    return f"{_HEAD}{block}{_TAIL.format(count=len(peaks), near=near)}\n{_kinds()}"


def _kinds() -> str:
    """Kinds of training: what plans say, and runs with all layers; and what is not planned."""
    found = json.loads((DATA / "trainer_kinds.json").read_text())
    both = {name: peaks for name, peaks in found.items() if not isinstance(peaks, str)}
    rows = [
        (name, f"{planned:,}", f"{whole:,}", f"{100 * (planned / whole - 1):+.2f} %")
        for name, (planned, whole) in both.items()
    ]
    planned = _block(table(("kind", "planned", "all layers", "difference"), rows, right={1, 2, 3}))
    others = [(name, why) for name, why in found.items() if isinstance(why, str)]
    ends = _block(table(("kind", "ends with"), others))
    return f"{_KINDS.format(count=len(found), planned=len(both))}{planned}{_NOT.format(len(others))}{ends}"


def _block(lines: list[str]) -> str:
    text = "\n".join(f"  {line}".rstrip() for line in lines)
    return f"```\n{text}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
