"""The steps of a run, as far as its summary and its plot show them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtune_adaptive.common import counted, duration, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_NAME = "training.png"
_POINTS = 1000  # of a plot; more would not be seen
_WINDOW = 5  # steps


@dataclass
class Course:
    """Steps, with their seconds and losses: all of a run's, or some that follow each other."""

    steps: int = 0
    seconds: float = 0.0
    """Seconds from the first step to the end, saving included."""
    first: list[float] = field(default_factory=list)
    """The losses of the first steps. A summary averages some, since that of one step is noisy."""
    last: list[float] = field(default_factory=list)
    """Those of the last ones."""

    def add(self, loss: float) -> None:
        """Add a step."""
        self.steps += 1
        self.first = [*self.first, loss][:_WINDOW]
        self.last = [*self.last, loss][-_WINDOW:]

    def __add__(self, later: Course) -> Course:
        return Course(
            self.steps + later.steps,
            self.seconds + later.seconds,
            [*self.first, *later.first][:_WINDOW],
            [*self.last, *later.last][-_WINDOW:],
        )

    def loss_text(self) -> str:
        """The loss at the beginning and at the end."""
        window = max(1, min(_WINDOW, self.steps // 2))  # of different steps
        first, last = sum(self.first[:window]) / window, sum(self.last[-window:]) / window
        what = "first and last step"
        if window > 1:
            what = f"mean of the first and last {window} steps"
        return f"{first:.4g} -> {last:.4g} ({what})"

    def text(self) -> str:
        seconds = duration(self.seconds)
        return f"{counted(self.steps, 'step')} in {seconds}; loss {self.loss_text()}"


class Point(NamedTuple):
    """A step, as far as it is plotted."""

    samples: int
    """Samples used since the run began."""
    global_batch: int
    micro_batch: int
    lr: float
    loss: float
    peak_bytes: int | None
    """The peak of memory; None where it is not measured."""


class History:
    """The steps of a run, thinned out as they become many.

    Args:
        loss_unit: the unit that the loss is a mean over.
    """

    def __init__(self, loss_unit: str = "token") -> None:
        self._loss_label = f"loss (nats/{loss_unit})"
        self._points: list[Point] = []
        self._every = 1
        self._seen = 0

    def add(self, point: Point) -> None:
        if self._seen % self._every == 0:
            self._points.append(point)
        self._seen += 1
        if len(self._points) > 2 * _POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def state_dict(self) -> dict[str, Any]:
        return {
            "points": [list(point) for point in self._points],
            "every": self._every,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._points = [Point(*point) for point in state["points"]]
        self._every, self._seen = state["every"], state["seen"]

    def figure(self) -> Figure | None:
        """Batch, learning rate, loss and memory over samples, where there is something to see."""
        if len(self._points) < 2 or (figure := plots.new_figure(7, 8)) is None:
            return None
        samples, global_batch, micro_batch, lr, loss, peaks = zip(*self._points, strict=True)
        most = max(peak or 0 for peak in peaks)
        panels = figure.subplots(3 + bool(most), 1, sharex=True)
        batches, rates, losses = panels[:3]
        figure.suptitle("Training: batch, learning rate, loss" + (", memory" if most else ""))
        batches.step(samples, global_batch, where="pre", color=plots.BLUE, label="global batch")
        batches.step(
            samples,
            micro_batch,
            where="pre",
            color=plots.ORANGE,
            linestyle="--",
            label="micro-batch",
        )
        batches.set(ylabel="batch (rows)", ylim=(0, 1.1 * max(global_batch)))
        plots.whole_numbers(batches.yaxis)
        batches.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        rates.plot(samples, lr, color=plots.BLUE)
        rates.set(ylabel="learning rate", ylim=(0, None))
        losses.plot(samples, loss, color=plots.BLUE)
        losses.set(ylabel=self._loss_label)
        if most:
            unit, bytes_each = plots.memory_unit(most)
            panels[3].plot(samples, [(peak or 0) / bytes_each for peak in peaks], color=plots.BLUE)
            panels[3].set(ylabel=f"peak memory ({unit})", ylim=(0, None))
        for axes in panels:
            plots.tidy(axes)
        figure.align_ylabels(panels)
        panels[-1].set(
            xlabel="samples trained on (memory: of rank 0)" if most else "samples trained on"
        )
        plots.whole_numbers(panels[-1].xaxis)
        return figure
