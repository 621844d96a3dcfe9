"""How far training is: lines in a file, a bar on a terminal, nothing where it should be quiet."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from torchtune_adaptive.recipe.train import display
from torchtune_adaptive.recipe.train.display import EpochDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def level() -> Iterator[logging.Logger]:
    ours = logging.getLogger("torchtune_adaptive")
    before, propagates = ours.level, ours.propagate
    ours.setLevel(logging.INFO)
    ours.propagate = True
    yield ours
    ours.setLevel(before)
    ours.propagate = propagates


def train(steps: int, seconds: float, monkeypatch: pytest.MonkeyPatch, done: int = 0) -> None:
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    shown = EpochDisplay(0, 2, total=steps, done=done)
    for step in range(done + 1, steps + 1):
        now += seconds
        shown.step(step, 100 + step, "loss 2.346, 5,321 tokens/s")
    shown.close()


def test_in_a_file_there_is_a_line_at_the_beginning_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(10, 8.0, monkeypatch)
    assert caplog.messages == [
        f"epoch 1 of 2, {step} of 10: step {100 + step}, loss 2.346, 5,321 tokens/s"
        for step in (1, 5, 9, 10)
    ]


def test_no_line_is_there_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(5, 1.0, monkeypatch, done=4)
    assert len(caplog.messages) == 1 and "5 of 5" in caplog.messages[0]


def test_on_a_terminal_there_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(10, 8.0, monkeypatch)
    said = terminal.getvalue()
    assert "epoch 1 of 2: 100%" in said and "loss 2.346, 5,321 tokens/s" in said
    assert "10/10" in said and not caplog.messages
    assert "\x1b[3" not in said, "no colors, so there is nothing for NO_COLOR to turn off"


def test_quiet_is_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: logging.Logger
) -> None:
    level.setLevel(logging.WARNING)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(3, 60.0, monkeypatch)
    assert not caplog.messages and not terminal.getvalue()
