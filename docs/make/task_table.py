"""``docs/results/tasks.md``, made by running its cells: tasks and losses, the plain trainer beside ours.

python docs/make/task_table.py

It takes minutes, in the environment of ``make_environment`` in ``tests/helpers/beside.py``, with scipy and
sentence-transformers beside it. What cells said is kept in ``tasks.json``. In ``tests/integrations/real``,
``tasks.py`` and ``sentences.py`` have what is trained, and ``each_task.py`` what a cell compares.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "results" / "tasks.json"
PAGE = KEPT.with_suffix(".md")
PACKAGES = ("torch", "transformers", "accelerate", "sentence-transformers")
WAYS = ("as it is", "search", "memory lost")
_HEAD = """# Tasks and losses beside the plain trainer

What transformers' example scripts train, and the losses of sentence-transformers, each with the plain trainer
and with `adaptive(...)` of it: small models with random weights, in one process on a CPU, batches of 4 rows,
2 in a step. Weights, losses, gradient norms and learning rates are compared and, *as it is*, all that is
logged; with sentence-transformers, an evaluation after it, too. {count}

With {versions}.

- *as it is*: no search. *search*: it may find micro-batches of at most 2 rows. *memory lost*: twice, in the
  third step.
- *equal*: to the bit. *1e-6*: the largest difference is at most that; of numbers beyond 1, it is relative.
- *divided*: *yes*, a micro-batch is collated from rows; *parts*, it is a part of a batch as the loader made
  it, because the collate function draws random numbers, or a row's loss follows how it is padded; *no*, a
  [loss or layer is of the whole batch](../trainers.md#what-is-not-divided), so that batches stay as they are.
"""
_PARTS = {"tasks": "transformers' Trainer", "losses": "sentence-transformers"}


def kept() -> dict[str, Any]:
    """The versions of packages, and what the cells of each task said."""
    return dict(json.loads(KEPT.read_text()))


def count(kept: dict[str, Any]) -> str:
    """How many there are, and how far the worst of them is off."""
    rows = [row for part in _PARTS for row in kept[part].values()]
    worst = max(float(row[way]) for row in rows for way in WAYS if row[way] != "equal")
    whole = sum(row["divided"] == "no" for row in rows)
    return f"All {len(rows)} agree within {worst:.0e}, {whole} of them in whole batches.".replace(
        "e-0", "e-"
    )


def page(kept: dict[str, Any]) -> str:
    """The page, as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
    parts = [_HEAD.format(versions=versions, count=count(kept))]
    why = [
        *dict.fromkeys(row["why"] for part in _PARTS for row in kept[part].values() if row["why"])
    ]
    for part, title in _PARTS.items():
        parts += [f"## {title}\n", f"| | {' | '.join(WAYS)} | divided |", "|---|---|---|---|---|"]
        for name, row in kept[part].items():
            note = f" ({why.index(row['why']) + 1})" if row["why"] else ""
            cells = " | ".join(row[way] for way in WAYS)
            parts.append(f"| {name} | {cells} | {row['divided']}{note} |")
        parts.append("")
    parts += [f"({number}) {each}\n" for number, each in enumerate(why, start=1)]
    return "\n".join([*parts, "    python docs/make/task_table.py\n"])


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.integrations.real.each_task import outcome
    from tests.integrations.real.sentences import LOSSES
    from tests.integrations.real.tasks import TASKS

    made: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}}
    for part, names in (("tasks", TASKS), ("losses", LOSSES)):
        made[part] = {}
        for name in names:
            made[part][name] = outcome(name)
            print(name, made[part][name], flush=True)
    KEPT.write_text(json.dumps(made, indent=1) + "\n")
    PAGE.write_text(page(made))


if __name__ == "__main__":
    main()
