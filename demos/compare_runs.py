"""Plot two runs together, and print how far apart their losses are.

python demos/compare_runs.py demo_output/undisturbed demo_output/disturbed
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

LINE = re.compile(r"Step (\d+) \| (.*)")


def records(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, from the newest log of torchtune's disk logger."""
    newest = max((run / "logs").glob("log_*.txt"), key=lambda path: path.stat().st_mtime)
    return {
        int(match[1]): {
            key: float(value) for key, value in (pair.split(":") for pair in match[2].split())
        }
        for match in map(LINE.match, newest.read_text().splitlines())
        if match
    }


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:3]]
    runs = {folder.name: records(folder) for folder in folders}
    plain, disturbed = runs.values()
    assert plain.keys() == disturbed.keys(), "the runs have different steps"
    apart = max(abs(plain[step]["loss"] - disturbed[step]["loss"]) for step in plain)
    last = disturbed[max(disturbed)]

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        above.plot(list(run), [record["loss"] for record in run.values()], style, label=name)
        below.step(
            list(run), [record["micro_batch_size"] for record in run.values()], style, where="mid"
        )
    above.set(ylabel="loss")
    above.legend()
    below.set(ylabel="rows in a micro-batch", xlabel="step", ylim=(0, None))
    path = folders[1] / "comparison.png"
    figure.savefig(path, dpi=120)
    print(
        f"{len(plain)} steps each, {last['retried_steps']:.0f} of them retried in the disturbed run; "
        f"the losses differ by at most {apart:.1e}. Plot: {path}"
    )


if __name__ == "__main__":
    main()
