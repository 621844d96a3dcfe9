"""The attempts of a run: what the next one knows of those before, and when one more is in vain."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.runs import RESUME, train
from torchtune_adaptive.common.errors import NoProgress
from torchtune_adaptive.recipe.train import attempts as attempts_module
from torchtune_adaptive.recipe.train.attempts import ATTEMPTS_NAME, Attempt, Attempts
from torchtune_adaptive.recipe.train.metric_logger import MetricLogger

ON_TWO = Attempt(2, "a launcher", "epoch_0_step_5", last_sign=100.0)


def begun(folder: Path, now: Attempt, step: int, *trained: int, resumes: bool = True) -> Attempts:
    """An attempt that has trained some steps, and is then killed."""
    attempts = Attempts(folder, now, resumes)
    attempts.begin_after(step)
    for number in trained:
        attempts.reached(number)
    attempts.close()
    return attempts


def test_an_attempt_says_what_is_done_again(tmp_path: Path) -> None:
    first = begun(tmp_path, ON_TWO, 0, *range(1, 8))
    assert first.facts() is None
    second = begun(tmp_path, replace(ON_TWO, ranks=1), 5, 6, 7, 8)
    facts = second.facts()
    assert facts is not None and facts.pop("seconds_since_last_step") >= 0
    assert facts == {"attempt": 2, "ranks": [2, 1], "steps_again": "steps 6-7"}
    said = "attempt 2 on 1 rank (2 before), from step 5; steps 6-7 again; "
    assert second.text().startswith(said) and second.text().endswith(" s after the last step")
    assert [*map(second.is_done_again, (5, 7, 8))] == [True, True, False]
    third = begun(tmp_path, Attempt(1, "another launcher", "epoch_0_step_8"), 8)
    assert third.text() == "attempt 3 on 1 rank, from step 8"
    assert third.now.again == 2 and third.now.run == first.now.run
    fourth = begun(tmp_path, Attempt(1, "another launcher", None), 0, resumes=True)
    assert fourth.text().startswith("attempt 4 on 1 rank, from the beginning; steps 1-8 again")


def test_attempts_that_come_to_no_checkpoint_end_the_run(tmp_path: Path) -> None:
    for _ in range(3):
        begun(tmp_path, ON_TWO, 5, 6, 7)
    with pytest.raises(NoProgress, match=r"3 attempts in a row have begun from epoch_0_step_5, "):
        Attempts(tmp_path, ON_TWO, True)
    assert begun(tmp_path, replace(ON_TWO, launch="by hand"), 5).now.in_vain == 1
    assert begun(tmp_path, replace(ON_TWO, launch="by hand", ranks=1), 5).now.in_vain == 2
    saved = replace(ON_TWO, launch="by hand", checkpoint="epoch_0_step_6")
    assert begun(tmp_path, saved, 6).now.in_vain == 1
    # Snapshots have brought it further since.
    assert [begun(tmp_path, saved, step).now.in_vain for step in (6, 8, 10, 10)] == [2, 1, 1, 2]


def test_attempts_that_never_save_count_as_well(tmp_path: Path) -> None:
    """A restart of a run that does not resume is another attempt; the same command by hand is another run."""
    for number in (1, 2, 3):
        attempt = begun(tmp_path, Attempt(2, "a launcher"), 0, 1, 2, resumes=False)
        assert attempt.now.number == number
    with pytest.raises(NoProgress, match="from the beginning, with no checkpoint"):
        Attempts(tmp_path, Attempt(2, "a launcher"), False)
    assert begun(tmp_path, Attempt(2, "by hand"), 0, resumes=False).facts() is None
    for _ in range(5):
        assert begun(tmp_path, Attempt(2), 0).now.in_vain == 1, "no launcher starts it again"


def test_a_request_to_stop_is_no_attempt_in_vain(tmp_path: Path) -> None:
    for _ in range(5):
        attempts = Attempts(tmp_path, ON_TWO, True)
        attempts.saved_when_stopped()
        attempts.close()


def test_what_had_nothing_to_do_was_no_attempt(tmp_path: Path) -> None:
    only = Attempts(tmp_path, ON_TWO, True)
    only.forget()
    assert not (tmp_path / ATTEMPTS_NAME).exists()
    begun(tmp_path, ON_TWO, 0, 1, 2)
    Attempts(tmp_path, ON_TWO, True).forget()
    assert Attempts(tmp_path, ON_TWO, True).now.number == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"ranks": 2, "newer": 1}'])
def test_a_damaged_file_says_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS_NAME).write_bytes(content)
    assert begun(tmp_path, ON_TWO, 0).facts() is None


def test_a_disk_that_is_full_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(tmp_path, ON_TWO, True)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    attempts.saved_when_stopped()
    attempts.reached(3)
    attempts.reached(4)
    attempts.close()
    assert attempts.now.reached == 4


def test_steps_are_noted_once_a_second_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write, now = list[int](), os.pwrite, 100.0
    monkeypatch.setattr(
        attempts_module, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    )
    monkeypatch.setattr(os, "pwrite", lambda *what: (written.append(1), write(*what))[1])
    attempts = Attempts(tmp_path, ON_TWO, True)
    attempts.begin_after(0)
    begun_with = len(written)
    for step in range(1, 33):
        now += 0.125
        attempts.reached(step)
    assert len(written) - begun_with == 4
    attempts.reached(33)
    attempts.close()
    assert json.loads((tmp_path / ATTEMPTS_NAME).read_text())["reached"] == 33


def test_a_path_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a longer text is not read as a part of a shorter one."""
    of_long_path, now = replace(ON_TWO, checkpoint="/" + 2000 * "x"), 100 / 3
    monkeypatch.setattr(
        attempts_module, "time", SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    )
    attempts = Attempts(tmp_path, of_long_path, True)
    attempts.reached(6)
    now = 200.0
    attempts.reached(7)
    attempts.close()
    assert begun(tmp_path, of_long_path, 5, 6).now.number == 2
    assert begun(tmp_path, ON_TWO, 5, 6).now.number == 3, "after a shorter one"


def test_the_file_is_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins may be killed before it has written."""
    begun(tmp_path, ON_TWO, 0, 1, 2)
    monkeypatch.setattr(Attempts, "_note", lambda *_, **__: None)
    Attempts(tmp_path, ON_TWO, True)
    monkeypatch.undo()
    assert begun(tmp_path, ON_TWO, 0).now.number == 2


class _Wandb(SimpleNamespace):
    """The package, as far as torchtune uses it."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.run: Any = None
        self.updates: list[bool] = []
        self.config = SimpleNamespace(
            update=lambda _, allow_val_change: self.updates.append(allow_val_change)
        )

    def init(self, **how: Any) -> Any:
        self.begun.append(how)
        self.run = SimpleNamespace(_label=lambda repo: None)
        return self.run

    def save(self, *_: object, **__: object) -> None: ...

    def finish(self) -> None:
        self.run = None


@pytest.mark.parametrize("given", [{}, {"id": "mine", "resume": "must"}])
def test_the_run_of_wandb_goes_on(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    block = {"_component_": "torchtune.training.metric_logging.WandBLogger", **given}
    cfg = OmegaConf.create({"metric_logger": block, "output_dir": str(tmp_path)})
    cfg.checkpointer = {"checkpoint_dir": str(tmp_path)}
    for _ in range(2):
        attempts = Attempts(tmp_path, ON_TWO, True)
        logger = MetricLogger(cfg, attempts.now.run)
        logger.log_config(cfg)
        logger.close()
        del logger  # torchtune's ends the run of W&B then
    first, second = wandb.begun
    expected = given or {"id": attempts.now.run, "resume": "allow"}
    for how in (first, second):
        assert {key: how[key] for key in ("id", "resume")} == expected
    assert wandb.updates == [True, True], "W&B refuses a batch size that has changed otherwise"


@pytest.mark.runs
def test_a_resumed_run_says_what_it_does_again(tmp_path: Path) -> None:
    changes = {"max_steps_per_epoch": 4, "save_every_n_steps": 2}
    train("full", tmp_path, **changes, epochs=1)
    state = json.loads((tmp_path / ATTEMPTS_NAME).read_text())
    assert (state["number"], state["reached"]) == (1, 4)
    train("full", tmp_path, **changes, epochs=1, **RESUME)  # finished: nothing to do
    state["reached"] = 6
    (tmp_path / ATTEMPTS_NAME).write_text(json.dumps(state))
    records = train("full", tmp_path, **changes, epochs=2, **RESUME)
    again = [record["step"] for record in records if record.get("done_again")]
    assert again == [5, 6]
    events = [*map(json.loads, (tmp_path / "batch_size_events.jsonl").read_text().splitlines())]
    (attempt,) = (event for event in events if "attempt" in event)
    assert attempt["reason"] == "attempt 2 on 1 rank, from step 4; steps 5-6 again"
    assert (attempt["step"], attempt["attempt"], attempt["steps_again"]) == (4, 2, "steps 5-6")
    assert "2; 2 steps trained again in all" in (tmp_path / "report.html").read_text()
