"""Checkpoints of the real Trainer under ``adaptive``: a run resumes from the newest that is whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
import torch
import transformers.trainer
from torch import nn
from transformers import Trainer, TrainerCallback

from tests.helpers.tiny_trainer import Net, Rows, arguments, losses
from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.transformers import adaptive

MANIFEST = ".checkpoint.json"
PLAIN = Adaptive(search=False)


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> None:
    """What is said is logged here."""
    caplog.set_level("INFO", "torchtune_adaptive")


class Dropping(Net):
    """Draws random numbers in each forward pass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), labels)


def trainer(folder: Path, kind: Any = None, net: Any = Net, **settings: Any) -> Any:
    callbacks = settings.pop("callbacks", None)
    saves = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    return (kind or adaptive(Trainer, PLAIN))(
        model=net(),
        args=arguments(folder, **saves | settings),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        callbacks=callbacks,
    )


def resumed(folder: Path, path: Any = True, **settings: Any) -> list[int]:
    """The steps that a run resumed from here has taken, and that it ends as one that nothing disturbed."""
    steps: list[int] = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    again = trainer(folder, callbacks=[Steps()], **settings)
    again.train(resume_from_checkpoint=path)
    whole = trainer(folder.with_name("whole"), save_strategy="no")
    whole.train()
    assert losses(again) == losses(whole)
    return steps


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


SPOILT: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut": ("optimizer.pt", cut, "optimizer.pt is truncated"),
    "removed": ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    "changed": ("model.safetensors", change, "model.safetensors is corrupted"),
    "no manifest, nor state": ("trainer_state.json", Path.unlink, "it was not saved to its end"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_the_newest_whole_one_is_resumed(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, spoil, why = SPOILT[case]
    folder = tmp_path / "run"
    trainer(folder, max_steps=4).train()
    spoil(folder / "checkpoint-4" / name)
    if case.startswith("no manifest"):
        (folder / "checkpoint-4" / MANIFEST).unlink()
    caplog.clear()
    assert resumed(folder, max_steps=4) == [4]
    [line] = [each for each in caplog.messages if "left out" in each]
    assert line.startswith(f"checkpoint-4 is left out: {why}")


def test_a_named_one_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    newest = tmp_path / "checkpoint-4"
    cut(newest / "optimizer.pt")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-4: optimizer\.pt is truncated .* remove its"
    ):
        trainer(tmp_path).train(resume_from_checkpoint=str(newest))
    assert resumed(tmp_path, str(tmp_path / "checkpoint-3")) == [4]
    with pytest.raises((ValueError, OSError), match="bogus"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "bogus"))


def test_where_each_is_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    for path in tmp_path.glob("checkpoint-*"):
        cut(path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-2: optimizer\.pt is truncated"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_without_any_the_trainer_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-old").mkdir()
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoints_of_the_plain_trainer_are_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, Trainer, max_steps=3).train()
    assert not any(tmp_path.rglob(MANIFEST))
    assert resumed(tmp_path) == [4]
    assert "left out" not in caplog.text
    assert (tmp_path / "checkpoint-4" / MANIFEST).stat().st_size
    trainer(tmp_path, Trainer, max_steps=5).train(resume_from_checkpoint=True)  # and the other way


class Killed(BaseException):
    pass


def kill(one: Any, step: int, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a run as a kill does in the save of a step: before its state is written, or older ones removed."""
    seen = 0

    def killing(own: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == step:
                raise Killed
            return own(*given, **named)

        return call

    with monkeypatch.context() as patch:
        if event == "rotation":
            own = transformers.trainer.rotate_checkpoints
            patch.setattr(transformers.trainer, "rotate_checkpoints", killing(own))
        else:
            patch.setattr(one, "_save_rng_state", killing(one._save_rng_state))
        with pytest.raises(Killed):
            one.train()


def test_a_run_killed_in_its_first_save_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kill(trainer(tmp_path / "run"), 1, "a file", monkeypatch)
    assert (tmp_path / "run/checkpoint-1/model.safetensors").exists()
    assert resumed(tmp_path / "run") == [1, 2, 3, 4]
    assert "checkpoint-1 is left out: it was not saved to its end" in caplog.text


@pytest.mark.parametrize("event", ["a file", "rotation"])
def test_older_ones_are_removed_when_the_new_one_is_sealed(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(trainer(tmp_path / "run", save_total_limit=1), 3, event, monkeypatch)
    whole = [
        path.parent.name for path in (tmp_path / "run").glob(f"*/{MANIFEST}") if path.stat().st_size
    ]
    assert sorted(whole) == ["checkpoint-2", "checkpoint-3"][: 1 if event == "a file" else 2]
    assert resumed(tmp_path / "run", save_total_limit=1) == [3, 4][0 if event == "a file" else 1 :]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / MANIFEST).write_bytes(b"")
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["checkpoint-1", "checkpoint-2"]


def test_what_a_callback_makes_of_a_checkpoint_is_whole(tmp_path: Path) -> None:
    class Rewrites(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json")
            path.write_text(json.dumps(json.loads(path.read_text())))

    trainer(tmp_path, max_steps=2, callbacks=[Rewrites()]).train()
    manifest = json.loads((tmp_path / "checkpoint-2" / MANIFEST).read_text())
    size = (tmp_path / "checkpoint-2" / "trainer_state.json").stat().st_size
    assert manifest["step"] == 2 and manifest["files"]["trainer_state.json"]["bytes"] == size
    assert resumed(tmp_path) == [3, 4]


def test_a_run_that_has_ended_takes_no_more_steps(tmp_path: Path) -> None:
    """Where a kill came behind its last checkpoint, the weights stay those that it ended with."""
    one = trainer(tmp_path)
    one.train()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and len(losses(again)) == 4
    assert torch.equal(again.model.layer.weight, one.model.layer.weight)


def test_weights_alone_are_sealed(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1, save_only_model=True).train()
    assert (
        "model.safetensors"
        in json.loads((tmp_path / "checkpoint-1" / MANIFEST).read_text())["files"]
    )
    assert not (tmp_path / "checkpoint-1" / "optimizer.pt").exists()


def test_what_is_uploaded_has_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded = []

    def upload(folder: str) -> None:
        uploaded.append(Path(folder, MANIFEST).stat().st_size)

    one = trainer(tmp_path, max_steps=2)
    monkeypatch.setattr(one, "_push_from_checkpoint", upload)
    one.args.push_to_hub = True
    one.train()
    assert len(uploaded) == 2 and all(uploaded)
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").glob(".*")) == [MANIFEST]


# --- told to end ------------------------------------------------------------------------------------


def told_in(where: str, step: int, one: Any) -> None:
    """Send the process the signal in a forward pass of training or evaluation, or when a step is lost."""
    manager, calls = SimpleNamespace(done=False), 0

    def tell(*_: Any) -> None:
        nonlocal calls
        calls += one.model.training is (where != "evaluation")
        ready = one.state.global_step == step and one.model.training is (where != "evaluation")
        if ready and not manager.done:
            manager.done = True
            os.kill(os.getpid(), signal.SIGTERM)
            for timer in threading.enumerate():
                if isinstance(timer, threading.Timer):
                    timer.join()
            if where == "retry":
                raise torch.OutOfMemoryError("out of memory (injected)")

    one.model.register_forward_pre_hook(tell)


@pytest.mark.parametrize(
    ("where", "step", "saved", "more"),
    [
        ("search", 0, 1, {}),
        ("a step", 1, 2, {}),
        ("retry", 1, 2, {}),
        ("evaluation", 2, 2, {}),
        ("a step", 1, 2, {"save_strategy": "epoch"}),
        ("a step", 1, 3, {"save_strategy": "best", "metric_for_best_model": "loss"}),
        ("evaluation", 2, 3, {"save_strategy": "best", "metric_for_best_model": "loss"}),
    ],
)
def test_a_signal_leaves_a_checkpoint_that_goes_on_equally(
    where: str,
    step: int,
    saved: int,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the model has dropout: the random numbers are those before the next step."""
    manager = "transformers.trainer_jit_checkpoint.CheckpointManager.__init__"
    monkeypatch.setattr(f"{manager}.__defaults__", (0,))  # it waits for three seconds
    before = signal.getsignal(signal.SIGTERM)
    options = Adaptive(memory_limit="64MiB") if where == "search" else PLAIN
    kind = adaptive(Trainer, options)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 10, **more}
    settings |= {"gradient_accumulation_steps": 2}
    made = lambda name, **named: trainer(tmp_path / name, kind, Dropping, **settings | named)  # noqa: E731
    undisturbed = made("whole", save_strategy="no")
    undisturbed.train()
    one = made("run", enable_jit_checkpoint=True)
    told_in(where, step, one)
    one.train()
    assert signal.getsignal(signal.SIGTERM) is before
    assert one.state.global_step == saved
    assert (tmp_path / f"run/checkpoint-{saved}" / MANIFEST).stat().st_size
    again = made("run")
    again.train(resume_from_checkpoint=True)
    expected = losses(undisturbed)
    assert len(expected) == 4
    # In a retry, micro-batches are smaller.
    assert losses(again) == (expected if where != "retry" else pytest.approx(expected, rel=1e-5))
