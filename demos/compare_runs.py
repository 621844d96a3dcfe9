"""Plot two runs together, and print how far apart their losses are.

python demos/compare_runs.py demo_output/undisturbed demo_output/disturbed
"""

from __future__ import annotations

import json
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


def before(run: dict[int, dict[str, float]], step: int) -> float:
    """The steps that had been retried before this one."""
    return run[step - 1]["retried_steps"] if step - 1 in run else 0


def checkpointed(folder: Path, last_step: int) -> list[tuple[int, int]]:
    """The first and last steps of each time in which the run checkpointed all layers."""
    lines = (folder / "batch_size_events.jsonl").read_text().splitlines()
    changes = [event for event in map(json.loads, lines) if "activation_checkpointing" in event]
    ends = [event["step"] - 1 for event in changes[1:]] + [last_step]
    return [
        (event["step"], end)
        for event, end in zip(changes, ends, strict=True)
        if event["activation_checkpointing"][1] == "all"
    ]


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:3]]
    runs = {folder.name: records(folder) for folder in folders}
    plain, disturbed = runs.values()
    assert plain.keys() == disturbed.keys(), "the runs have different steps"
    apart = max(abs(plain[step]["loss"] - disturbed[step]["loss"]) for step in plain)
    how_far = f"differ by at most {apart:.1e}" if apart else "are equal, bit for bit"
    last = disturbed[max(disturbed)]

    figure = plots.new_figure(8, 5)
    assert figure is not None, "matplotlib is not installed"
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for (name, run), style, color in zip(
        runs.items(), ("-", "--"), (plots.BLUE, plots.RED), strict=True
    ):
        used = [100 * (1 - record["memory_unused_share"]) for record in run.values()]
        above.plot(list(run), [record["loss"] for record in run.values()], style, color=color)
        below.plot(list(run), used, style, color=color, label=name)
    retried = [
        step for step in disturbed if disturbed[step]["retried_steps"] > before(disturbed, step)
    ]
    above.plot(
        retried,
        [disturbed[step]["loss"] for step in retried],
        "kv",
        ms=9,
        ls="",
        label="retried step",
    )
    for begin, end in checkpointed(folders[1], last_step=max(disturbed)):
        for axes in (above, below):
            axes.axvspan(
                begin, end, color=plots.ORANGE, alpha=0.2, lw=0, label="all layers checkpointed"
            )
    above.set(ylabel="loss (nats/token)", title="Out of memory mid-run: the same losses")
    below.set(ylabel="memory used (%)", xlabel="step", ylim=(0, 100))
    plots.whole_numbers(below.xaxis)
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
