"""Plot two runs together, and print how far apart their losses are.

python demos/compare_runs.py demo_output/undisturbed demo_output/disturbed
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from torchtune_adaptive.common import plots

LINE = re.compile(r"Step (\d+) \| (.*)")


def records(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, from the newest log of torchtune's disk logger."""
    newest = max((run / "logs").glob("log_*.txt"), key=lambda path: path.stat().st_mtime)
    return {
        int(match[1]): {
            key: float(value) for key, value in (pair.split(":") for pair in match[2].split())
        }
        for match in map(LINE.match, newest.read_text().splitlines())
        if match and match[2].startswith("loss:")  # the search's result is logged, too
    }


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:3]]
    runs = {folder.name: records(folder) for folder in folders}
    plain, disturbed = runs.values()
    assert plain.keys() == disturbed.keys(), "the runs have different steps"
    apart = max(abs(plain[step]["loss"] - disturbed[step]["loss"]) for step in plain)
    how_far = f"differ by at most {apart:.1e}" if apart else "are equal, bit for bit"
    last = disturbed[max(disturbed)]

    figure = plots.new_figure(8, 6)
    assert figure is not None, "matplotlib is not installed"
    above, below = figure.subplots(2, 1, sharex=True)
    for (name, run), style, color in zip(
        runs.items(), ("-", "--"), (plots.BLUE, plots.RED), strict=True
    ):
        losses = [record["loss"] for record in run.values()]
        sizes = [record["micro_batch_size"] for record in run.values()]
        above.plot(list(run), losses, style, color=color, label=name)
        below.step(list(run), sizes, style, color=color, where="mid")
    above.set(ylabel="loss (nats/token)", title="Out of memory mid-run: the same losses")
    below.set(ylabel="micro-batch (rows)", xlabel="step", ylim=(0, None))
    for axis in (below.xaxis, below.yaxis):
        plots.whole_numbers(axis)
    for axes in (above, below):
        plots.tidy(axes)
    plots.legend_below(figure)
    path = plots.save(figure, folders[1] / "comparison.png")
    print(
        f"{len(plain)} steps each, {last['retried_steps']:.0f} of them retried in the disturbed run; "
        f"the losses {how_far}. Plot: {path}"
    )


if __name__ == "__main__":
    main()
