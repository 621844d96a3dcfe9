"""Where a run can be killed while it saves: ``ckpt-chaos`` kills it there, and starts it again.

    python benchmarks/killed_while_saving.py CASE... [--points 400]
    python benchmarks/killed_while_saving.py CASE --judged FOLDER    # a run of the tool that there is already

``ckpt-chaos`` counts the operations on files that a command does in its output folder. It kills a copy of the
command at each, or at some that are spread evenly, and starts it again. Files are left half written as well,
where Python, torch or safetensors wrote them. A point *passes* if the run that is started again ends with the
same weights, and resumes from the newest checkpoint that was complete; of trainers, losses and gradient norms
are compared, too. It *fails* if it cannot be started again, *diverges* if it ends with other weights, and has
*lost work* if it resumes from an older checkpoint. The run that nothing kills is not counted.

Each run trains a tiny model for four steps on a CPU and saves after two of them. Trainers need transformers
and TRL, recipes torchtune; cases are added to what the page has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import chaos

PAGE = Path(__file__).parents[1] / "docs" / "results" / "killed_while_saving.md"
CASES: dict[str, tuple[str, ...]] = {
    "Trainer": ("trainer", "plain"),
    "`adaptive(Trainer)`": ("trainer", "adaptive"),
    "Trainer, 2 ranks": ("trainer", "plain"),
    "`adaptive(Trainer)`, 2 ranks": ("trainer", "adaptive"),
    "SFTTrainer": ("sft", "plain"),
    "`adaptive(SFTTrainer)`": ("sft", "adaptive"),
    "recipe": ("gathered",),
    "recipe, sharded, 2 ranks": ("sharded",),
    "recipe, in the background, 2 ranks": ("in the background",),
}
VERDICTS = {
    "PASS": "passes",
    "HARD_FAIL": "fails",
    "SILENT_DIVERGENCE": "diverges",
    "LOST_WORK": "lost work",
}


def measured(case: str, points: int, folder: Path) -> dict[str, str]:
    given = CASES[case]
    options: dict[str, Any] = {"max_points": points, "ranks": 2 if "2 ranks" in case else 1}
    own, run = (
        (chaos.OF_TRAINERS, chaos.trainer) if len(given) == 2 else (chaos.OF_RECIPES, chaos.recipe)
    )
    with chaos.served(folder, *own) as jobs:
        return run(jobs, folder / "work", *given, **options)


def page(found: dict[str, dict[str, int]], versions: dict[str, str]) -> str:
    about, _, rest = str(__doc__).partition("\n\n")
    commands, _, what = rest.partition("\n\n")
    rows = [
        f"| {case} | {sum(counts.values())} | "
        + " | ".join(str(counts.get(verdict, 0)) for verdict in VERDICTS)
        + " |"
        for case in CASES
        if (counts := found.get(case))
    ]
    title = about.replace("``", "`")
    said = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    return "\n".join(
        [
            "# Killed while saving",
            "",
            title,
            "",
            commands,
            "",
            what.replace("``", "`").strip(),
            "",
            f"With {said}.",
            "",
            f"| | points | {' | '.join(VERDICTS.values())} |",
            f"|---|{'--:|' * (1 + len(VERDICTS))}",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--points", type=int, default=400)
    parser.add_argument("--judged", type=Path)
    options = parser.parse_args()
    data = PAGE.with_suffix(".json")
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            verdicts = (
                chaos.judged(options.judged)
                if options.judged
                else measured(case, options.points, Path(folder))
            )
        control, *points = verdicts.values()
        assert control == "PASS", verdicts
        known = json.loads(data.read_text()) if data.exists() else {"found": {}, "versions": {}}
        known["found"][case] = dict(Counter(points))
        names = ["ckpt-chaos", "torch"]
        names += ["transformers", "trl"] if len(CASES[case]) == 2 else ["torchtune"]
        known["versions"] |= {name: version(name) for name in names}
        data.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text(page(known["found"], known["versions"]))


if __name__ == "__main__":
    main()
