"""What a run says of its steps at the end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.helpers.ranks import Alone
from torchtune_adaptive.core.device.memory import Usage
from torchtune_adaptive.core.rows.micro_batches import MicroBatch
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.recipe.train.history import Course, MarkKind
from torchtune_adaptive.recipe.train.metrics import Logging, Metrics, Summary, Trained

GIB = 1 << 30


def metrics_of(losses: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Of steps that take so long, on two ranks, with 100 predicted tokens each."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    usage = Usage(22 * GIB, 0, 0)
    memory = SimpleNamespace(measured=True, capacity=lambda: 80 * GIB, usage=lambda: usage)
    memory.watch, memory.last_step = (lambda: None), usage
    logged: list[dict[str, float]] = []
    logger = SimpleNamespace(log_dict=lambda record, step: logged.append(record))
    environment = SimpleNamespace(ranks=Alone(2))
    metrics = Metrics(Logging(logger, 1, False), environment, memory, watch_memory=False)  # type: ignore[arg-type]
    for number, loss in enumerate(losses, start=1):
        now[0] += seconds
        memory.last_step = Usage((20 + number % 3) * GIB, 0, 0)
        outcome = SimpleNamespace(loss=loss, weight=100, gradient_norm=None, metrics={})
        loaded = [MicroBatch((0, 1), 60)]
        split = Split(2, 1, 2)
        metrics.record(number, 4 * number, split, outcome, 0.1, loaded, {})  # type: ignore[arg-type]
    assert all(record["tokens_per_second_per_gpu"] == 50 / seconds for record in logged)
    now[0] += 10  # for saving
    return metrics


def lines_of(summary: Summary | None, split: Split, sample: str = "row") -> list[str]:
    trained = Trained(split, 20, 3, may_change=False, history=None, summary=summary, sample=sample)
    return trained.lines()


def test_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = metrics_of([6.0] * 10 + [2.0] * 10, 0.5, monkeypatch)
    summary = metrics.summary("batch_size=2")
    assert summary is not None
    assert lines_of(summary, Split(2, 1, 2)) == [
        "Trained 20 steps in 20.0 s; loss 6 -> 2 (mean of the first and last 5 steps).",
        "200 tokens/s (100 per rank), peak memory 22 of 80 GiB, 3 steps retried.",
        "Last global batch: 4 rows (micro-batch 2 x accumulation 1 x 2 ranks).",
        "Memory ran out, and steps take less since. Next time: batch_size=2",
    ]
    pairs = lines_of(replace(summary, next_time=""), Split(1, 1, 1), "pair")
    assert pairs[-1] == "Last global batch: 1 pair (micro-batch 1 x accumulation 1 x 1 rank)."


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([3.0], "3 -> 3 (first and last step)"),
        ([3.0, 2.0, 1.0], "3 -> 1 (first and last step)"),
        ([4.0, 2.0, 9.0, 1.0, 1.0], "3 -> 1 (mean of the first and last 2 steps)"),
    ],
)
def test_first_and_last_steps_are_different_ones(
    losses: list[float], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = metrics_of(losses, 1.0, monkeypatch).summary()
    assert isinstance(summary, Summary) and summary.part.text().endswith(f"; loss {text}")


@pytest.mark.parametrize("parts", [(1, 19), (3, 4, 13), (10, 10), (2, 1, 1)])
def test_the_parts_of_a_run_come_to_the_whole(parts: tuple[int, ...]) -> None:
    losses = [float(number) for number in range(sum(parts))]
    whole, run = Course(seconds=2.0 * len(parts)), Course()
    for loss in losses:
        whole.add({"loss": loss}, {"training": 1.0})
    for steps in parts:
        part = Course(seconds=2.0)
        for _ in range(steps):
            part.add({"loss": losses.pop(0)}, {"training": 1.0})
        run = run + part
    assert run == whole and run.text() == whole.text()


def test_a_resumed_run_tells_the_whole_from_this_part(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = metrics_of([6.0, 5.0], 0.5, monkeypatch).state_dict()
    assert saved is not None and saved["course"]["steps"] == 2
    metrics = metrics_of([3.0, 2.0], 0.5, monkeypatch)
    metrics.resume(2, 8, saved)
    lines = lines_of(metrics.summary(), Split(2, 1, 2))
    assert lines[:2] == [
        "Trained 2 steps in 11.0 s; loss 3 -> 2 (first and last step).",
        "The whole run: 4 steps in 22.0 s; loss 5.5 -> 2.5 (mean of the first and last 2 steps).",
    ]
    assert [point.step for point in metrics.history.points] == [1, 2], "those before it"
    assert metrics.history.marks[MarkKind.RESUMED] == [(8, "resumed at step 2")]
    metrics.resume(2, 8, {**saved, "form": 0})  # of another version
    assert metrics.run is None
    metrics.resume(2, 8, None)  # of a checkpoint that does not say
    unknown = metrics.summary()
    assert unknown is not None and unknown.run is None and metrics.state_dict() is None
    said = lines_of(unknown, Split(2, 1, 2))
    assert [line for line in said if "loss" in line] == lines[:1]


def rollouts_of(metrics: Metrics, names: tuple[str, str, str], now: list[float]) -> None:
    """Two rollouts of two steps each, of which the first one has the time of the rollout before it."""
    reward, length, kl = names
    for number in range(1, 5):
        spent = {"generation": 6.0, "scoring": 1.0, "rewards": 0.5} if number % 2 else {}
        now[0] += sum(spent.values()) + 0.5
        more = {reward: number / 10, length: 16.0, kl: 0.01 * number, "successes": 0.0}
        more |= {"generation_seconds": 6.0, "scoring_seconds": 1.0, "reward_seconds": 0.5}
        outcome = SimpleNamespace(loss=0.25, weight=100, gradient_norm=None, metrics={})
        metrics.record(number, 8, Split(2, 1, 2), outcome, 0.1, [MicroBatch((0,), 9)], more, spent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names", [("rewards", "response_lengths", "kl_loss"), ("scores", "response_lengths", "kl")]
)
def test_rollouts_say_what_they_are_judged_by(
    names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, now = metrics_of([], 1.0, monkeypatch), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    metrics.begin()
    rollouts_of(metrics, names, now)
    assert metrics.said() == ("reward 0.4, response length 16, KL 0.04, loss 0.25, 200 tokens/s")
    lines = lines_of(metrics.summary(), Split(2, 1, 2))
    assert lines[0] == (
        "Trained 4 steps in 17.0 s; reward 0.15 -> 0.35, response length 16 -> 16, "
        "KL 0.015 -> 0.035, loss 0.25 -> 0.25 (mean of the first and last 2 steps)."
    )
    assert lines[1] == (
        "Time by phase: generation 12.0 s (71%), scoring 2.0 s (12%), rewards 1.0 s (6%), "
        "training 2.0 s (12%)."
    )
    seconds = {"generation": 6.0, "scoring": 1.0, "rewards": 0.5, "training": 0.5}
    assert [point.seconds for point in metrics.history.points] == [seconds] * 4


def test_a_limit_is_never_below_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process has given back memory since the run began."""
    metrics = metrics_of([3.0, 2.0], 1.0, monkeypatch)
    assert [point.peak_bytes for point in metrics.history.points] == [21 * GIB, 22 * GIB]
    assert [point.limit_bytes for point in metrics.history.points] == [21 * GIB, 22 * GIB]
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    metrics.measure_limit()
    rollouts_of(metrics, ("rewards", "response_lengths", "kl_loss"), now)
    assert metrics.history.points[-1].limit_bytes == 80 * GIB


def test_no_steps_no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_of([], 1.0, monkeypatch).summary() is None
    assert lines_of(None, Split(2, 1, 2)) == []
