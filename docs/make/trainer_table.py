"""``docs/results/trainer_table.md``, made by running its cells: the plain trainer and ours, on two ranks.

python docs/make/trainer_table.py

It takes minutes, in the environment of ``make_environment`` in ``tests/helpers/beside.py``, with bitsandbytes
beside it for QLoRA: ``pip install --no-deps bitsandbytes``. What the cells said is kept in
``trainer_table.json``. What a setting is, and what a cell compares, is in
``tests/integrations/real/beside_plain.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "results" / "trainer_table.json"
PAGE = KEPT.with_suffix(".md")
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")
WAYS = {"ddp": "DDP", "fsdp2": "FSDP2"}
TRAINERS = {
    "trainer": "Trainer",
    "sft": "SFT",
    "dpo": "DPO",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
}
SETTINGS = {
    "one batch in a step": "float32, all weights, no activation checkpointing; so are the others, unless "
    "they say so",
    "bf16, checkpointing": "autocast and activation checkpointing, which are TRL's defaults",
    "LoRA": "by PEFT",
    "QLoRA": "weights of 4 bits by bitsandbytes, on the CPU as well; bf16",
    "packing": "rows without padding, TRL's `bfd`",
    "compile": "`torch_compile` with the backend `eager`: what Dynamo makes of it, without a compiler; no "
    "search",
    "evaluation": "after every second step",
    "resume": "from the checkpoint of the second step, each from its own",
    "callbacks": "a callback of the user's that notes steps, gradients and metrics, and evaluates and stops "
    "where nothing else would",
    "accumulation": "4 batches in a step; FSDP2 reduces the gradients of each micro-batch, and accelerate "
    "their sum",
    "accumulation, reduced once": "`Adaptive(sync_each_batch=False)`: FSDP2 reduces as accelerate does",
    "accumulation, larger": "the search finds larger micro-batches, so sums have another order; compared are "
    "weights, losses, gradient norms and learning rates, not [metrics of batches](../trainers.md#limits)",
    "experts": "a tiny Qwen3-MoE with its auxiliary loss, and 2 batches in a step, which are [not divided]"
    "(../trainers.md#what-is-not-divided)",
    "loss of a batch": "`aot` of DPO, `kto` of KTO and `bnpo` of GRPO, which are not divided either",
}
_WITH_A_LOSS_OF_A_BATCH = ("dpo", "kto", "grpo")
_HEAD = """# Each trainer beside the plain one

Each cell was run on a CPU, on 2 processes: the plain trainer and `adaptive(...)` of it train a tiny Llama,
and on each process their weights, and all that they log but times, are compared. A search comes before the
first step, except in *compile*. In all rows but *accumulation, larger* it finds the micro-batch that the
plain trainer has. Memory does not run out.

With {versions}.

- *equal*: to the bit. *1e-6*: the largest difference is at most that; of numbers beyond 1, it is relative.
- *-*: there is no such setting, or it has no effect. *not tried*: it needs a package that was missing.

KTO has the loss `apo_zero_unpaired`, but in the last row, because its default is [not
divided](../trainers.md#what-is-not-divided).
"""
_TAIL = """
On CPUs with AVX-512 BF16, bitsandbytes packs 4-bit weights in an evaluation, for good, for a kernel through
which no gradient passes: the plain trainer learns nothing after it. No GPU does that, and here it is switched
off. `bnb_4bit_compute_dtype` is bfloat16.

Nothing here has run on a GPU. What happens when memory is lost is in the
[tests](../../tests/integrations/real), not in this table.

    python docs/make/trainer_table.py
"""


def cells() -> Iterator[tuple[str, str, str]]:
    """The trainer, the way and the setting of each cell that is no dash."""
    for way in WAYS:
        for setting in SETTINGS:
            for trainer in TRAINERS:
                dash = (
                    (setting == "packing" and trainer != "sft")
                    or (setting == "accumulation, reduced once" and way != "fsdp2")
                    or (setting == "loss of a batch" and trainer not in _WITH_A_LOSS_OF_A_BATCH)
                )
                if not dash:
                    yield trainer, way, setting


def kept() -> dict[str, Any]:
    """The versions of packages, and what each cell said."""
    return dict(json.loads(KEPT.read_text()))


def page(kept: dict[str, Any]) -> str:
    """The page, as Markdown."""
    said = {tuple(row["cell"]): row for row in kept["cells"]}
    unknown = {*said} - {*cells()}
    assert not unknown, unknown
    why = [*dict.fromkeys(row["why"] for row in kept["cells"] if row["why"])]

    def word(*cell: str) -> str:
        if cell not in {*cells()}:
            return "-"
        row = said.get(cell, {"outcome": "not tried", "why": ""})
        return row["outcome"] + (f" ({why.index(row['why']) + 1})" if row["why"] else "")

    versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
    parts = [_HEAD.format(versions=versions)]
    for way, name in WAYS.items():
        parts += [f"## {name}\n", "| | " + " | ".join(TRAINERS.values()) + " |"]
        parts.append("|---|" + "---|" * len(TRAINERS))
        for setting in SETTINGS:
            row = [word(trainer, way, setting) for trainer in TRAINERS]
            if {*row} != {"-"}:
                parts.append(f"| {setting} | {' | '.join(row)} |")
        parts.append("")
    parts += [f"({number}) `{each}`\n" for number, each in enumerate(why, start=1)]
    parts += ["## The settings\n", *(f"- *{name}*: {text}" for name, text in SETTINGS.items())]
    return "\n".join(parts) + "\n" + _TAIL


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.integrations.real.beside_plain import outcome

    installed = [name for name in PACKAGES if find_spec(name)]
    found = []
    for cell in cells():
        if cell[2] == "QLoRA" and "bitsandbytes" not in installed:
            continue
        word, why = outcome(*cell)
        print(*cell, word, why, sep=", ", flush=True)
        found.append({"cell": cell, "outcome": word, "why": why})
    made = {"versions": {name: version(name) for name in installed}, "cells": found}
    rows = ",\n".join(json.dumps(row) for row in found)
    KEPT.write_text(f'{{"versions": {json.dumps(made["versions"])},\n"cells": [\n{rows}\n]}}\n')
    PAGE.write_text(page(made | {"cells": json.loads(json.dumps(found))}))


if __name__ == "__main__":
    main()
