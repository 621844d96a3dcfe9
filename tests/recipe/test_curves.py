"""The curves of a run: what is drawn, where it was resumed, and what a checkpoint keeps of it."""

from __future__ import annotations

from typing import Any

import pytest

from torchtune_adaptive.recipe.train import curves
from torchtune_adaptive.recipe.train.history import History, MarkKind, Point

pytest.importorskip("matplotlib")

MIB = 1 << 20


def history(steps: int = 60, rollouts: bool = False) -> History:
    """That of a run whose global batch grows from 16 to 32 rows at step 31."""
    found, samples = History(), 0
    for step in range(1, steps + 1):
        batch = 16 if step <= 30 else 32
        samples += batch
        values, seconds = {"loss": 6.0 / step}, {}
        if rollouts:
            values = {"reward": step / 100, "response length": 12.0, "KL": 0.1, **values}
            seconds = {"generation": 7.0, "scoring": 0.5, "rewards": 0.1, "training": 2.0}
        found.add(
            Point(step, samples, batch, 8, 1e-3, values, seconds, (20 + step % 5) * MIB, 40 * MIB)
        )
    return found


def drawn(figure: Any) -> Any:
    """A figure whose ticks and transformations are those of its picture."""
    figure.draw_without_rendering()
    return figure


def labels(found: History) -> list[str]:
    return [figure.axes[0].get_ylabel() for figure in curves.figures(found)]


def test_what_is_watched_comes_first() -> None:
    always = ["batch (rows)", "learning rate", "peak memory, rank 0 (MiB)"]
    assert labels(history()) == ["loss (nats/token)", *always]
    assert labels(history(rollouts=True)) == [
        *("reward (mean)", "response length (tokens)", "KL to the reference"),
        *("loss (nats/token)", "seconds by phase", *always),
    ]
    stacked = curves.figure(history(rollouts=True))
    assert [axes.get_ylabel() for axes in drawn(stacked).axes] == labels(history(rollouts=True))


def test_samples_are_below_and_steps_above() -> None:
    for figure in (*curves.figures(history()), curves.figure(history())):
        *_, below = drawn(figure).axes
        assert below.get_xlabel() == "samples trained on"
        (above,) = figure.axes[0].child_axes
        assert above.get_xlabel() == "step"
        for samples, steps in (((0, 1440), (0, 60)), ((480, 960), (30, 45))):
            figure.axes[0].set_xlim(samples)
            figure.draw_without_rendering()
            assert above.get_xlim() == pytest.approx(steps)


def test_no_peak_is_above_the_line_of_the_limit() -> None:
    *_, figure = curves.figures(history())
    limit, peak = figure.axes[0].lines
    assert limit.get_label() == "limit: 40 MiB" and {*limit.get_ydata()} == {40.0}
    assert max(peak.get_ydata()) == 24.0


def test_what_happened_is_marked_in_every_curve() -> None:
    found = history()
    found.mark(MarkKind.RESUMED, 640, "resumed at step 35")
    for step in (10, 20):
        found.mark(MarkKind.RETRIED, 16 * step, f"step {step} retried")
    found.mark(MarkKind.CHANGED, 320, "from step 20: micro-batch 8 -> 4")
    for figure in curves.figures(found):
        places = [float(line.get_xdata()[0]) for line in figure.axes[0].lines[-4:]]
        assert places == [320, 160, 320, 640]
    for figure in (*curves.figures(found), curves.figure(found)):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()][-3:] == [
            "from step 20: micro-batch 8 -> 4",
            "step retried (2 times)",
            "resumed at step 35",
        ]


def test_a_step_is_no_curve() -> None:
    assert curves.figures(history(1)) == [] and curves.figure(history(1)) is None


def test_a_checkpoint_keeps_it_and_no_more_than_can_be_seen() -> None:
    found = history(9_000)
    for step in range(1, 1_000):
        found.mark(MarkKind.RETRIED, 16 * step, f"step {step} retried")
    found.mark(MarkKind.RESUMED, 16, "resumed at step 1")
    state = found.state_dict()
    assert len(state["points"]) <= 2_000 and len(state["marks"]["step retried"]) == 100
    resumed = History()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.points[0].step == 1 and resumed.points[-1].step > 8_990
    gaps = {
        after.step - before.step
        for before, after in zip(resumed.points, resumed.points[1:], strict=False)
    }
    assert len(gaps) == 1, "thinned evenly"
    assert resumed.marks[MarkKind.RETRIED][-1] == (16 * 999, "step 999 retried")
    assert resumed.marks[MarkKind.RESUMED] == [(16, "resumed at step 1")]
