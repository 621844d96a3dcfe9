"""What a process that traces tells of what it does arrives meanwhile, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.cli import plan_progress
from torchtune_adaptive.cli.plan_progress import TraceProgress, with_progress
from torchtune_adaptive.common.errors import NoPrediction
from torchtune_adaptive.planner import call_alone, processes, told, told_of
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides

PATIENCE = 300.0


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def tells_twice(folder: Path) -> str:
    with told.telling("model 1"):
        told.tell("one")
        (folder / "told").touch()
        until((folder / "heard").exists)
        told.tell("two ü" + 300 * "x")
        until((folder / "heard again").exists)
    return "done"


def tells_and_dies() -> None:
    told.tell("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_told_is_heard_at_once(tmp_path: Path) -> None:
    with processes("json") as run:
        answer = run(tells_twice, tmp_path)
        until(lambda: told_of(answer) == "one, model 1")
        (tmp_path / "heard").touch()
        until(lambda: told_of(answer).startswith("two ü" + 100 * "x"))
        assert len(told_of(answer)) < 250
        (tmp_path / "heard again").touch()
        assert answer.result(PATIENCE) == "done" and not told_of(answer)


def test_nothing_is_left_of_a_process_that_dies() -> None:
    with processes("json") as run:
        answer = run(tells_and_dies)
        with pytest.raises(NoPrediction, match="SIGKILL"):
            answer.result(PATIENCE)
        assert not told_of(answer) and not told_of(Future())


def test_a_process_of_its_own_is_heard_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_progress, "_IN_LINES", 0.01)

    def work() -> str:
        return call_alone(tells_slowly, timeout=PATIENCE)

    with without_torchvision():
        assert with_progress(work) == "done"
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert [*dict.fromkeys(lines)][:4] == [
        "tracing 1 of 1",
        "tracing 1 of 1: importing torch",
        "tracing 1 of 1: one",
        "tracing 1 of 1: two",
    ]
    assert not told_of()


def tells_slowly() -> str:
    for words in ("one", "two"):
        told.tell(words)
        time.sleep(1.0)
    return "done"


def test_a_line_on_a_terminal_does_not_wrap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    future: Future[None] = Future()
    with TraceProgress(2, lambda one: "forward pass, layer 3 of 5" * (one is future)) as progress:
        progress.follow(future, "the first answer")
        progress.follow(done := Future[None]())
        done.set_result(None)
    line = capsys.readouterr().err.split("\033[K")[-2].partition("\r")[0]
    assert line == "tracing 2 of 2 for the first answer: forward ..."


class Heard(list[str]):
    """Keeps all words."""

    words = property(fset=list.append)


def all_that_is_told(config: str, *changes: str) -> list[str]:
    cfg = with_overrides(load_config(config), changes)
    traces = plan_request(cfg, 1, memory=1 << 30, length=32).query().traces()
    heard: Any = Heard()
    told.listen(heard)
    traces.start_up(32)
    traces.step(3, 32)
    return list(dict.fromkeys(heard))


def of_step(layers: int, *where: str) -> list[str]:
    """What a step tells."""
    told = [
        "forward pass",
        *(f"forward pass, layer {one} of {layers}" for one in range(1, layers + 1)),
        *(f"backward pass, layer {one} of {layers}" for one in range(layers, 0, -1)),
        "optimizer",
    ]
    return [", ".join([one, *where]) for one in told]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_traces_tell_the_layer_of_how_many(checkpointed: bool) -> None:
    changes = ("device=cpu", f"enable_activation_checkpointing={checkpointed}")
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        few, many = (
            run(all_that_is_told, "tiny/full", f"model.num_layers={layers}", *changes)
            for layers in (2, 40)
        )
        assert few.result(PATIENCE) == [
            "building the model",
            *of_step(2, "first step"),
            *of_step(2, "3 rows"),
        ]
        models = [(4, "model 1 of 2 for 40 layers"), (5, "model 2 of 2 for 40 layers")]
        assert many.result(PATIENCE) == [
            "building the model",
            *(line for layers, model in models for line in of_step(layers, "first step", model)),
            "repeating their layers",
            *(line for layers, model in models for line in of_step(layers, "3 rows", model)),
        ]
