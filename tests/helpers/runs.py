"""Whole runs on ranks of their own, and whether two of them are the same."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, saved_weights, tiny_config

Record = dict[str, float]
Records = list[Record]

SHORT = {"save_every_n_steps": 2, "max_steps_per_epoch": 4, "epochs": 2}
ASYNCHRONOUS = {"enable_async_checkpointing": True, "max_steps_per_epoch": 2, "epochs": 3}
ALL_KEPT = {"keep_last_n_checkpoints": 9}
"""With their recipe states, so that a run can be resumed in its middle when it has ended."""
RESUME = {"resume_from_checkpoint": True}
MACHINE = {
    *("tokens_per_second_per_gpu", "memory_unused_share"),
    *("generation_seconds", "scoring_seconds", "reward_seconds", "training_seconds"),
    "done_again",
}
"""What is logged of the machine and of earlier attempts, and differs from run to run."""

BIN = Path(sys.executable).parent
"""The folder with the console scripts of this environment."""

_made: dict[str, tuple[Path, Records]] = {}


def train(kind: str, folder: Path, ranks: int = 1, draws: bool = False, **changes: Any) -> Records:
    """Run our recipe for the tiny config of a kind, with changes; what it logged."""
    cfg = tiny_config(kind, folder, **changes)
    return run_with(partial(run_ours, draws=draws), kind, cfg, ranks)


def run_with(run: Callable[..., Records], kind: str, cfg: DictConfig, ranks: int) -> Records:
    """Run a recipe, ours or torchtune's; what rank 0 logged."""
    records, *_ = run_ranks(run, ranks, kind, cfg, join=False)
    return records  # type: ignore[no-any-return]


def undisturbed(kind: str, ranks: int = 1, **changes: Any) -> tuple[Path, Records]:
    """The folder and the log of a run to compare others with; the same run is made only once.

    The folder is not to be changed.
    """
    key = repr((kind, ranks, sorted(changes.items())))
    if key not in _made:
        folder = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
        _made[key] = folder, train(kind, folder, ranks, **changes)
    return _made[key]


def start(
    command: Sequence[str | Path], folder: Path, log: Path, **environment: str
) -> subprocess.Popen[str]:
    """Start a command in a session of its own; what it prints goes to a file."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def free_port() -> int:
    """A port that nothing listens on (the store that found it is gone when this returns)."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def refused(error: str, kind: str, folder: Path, ranks: int = 1, **changes: Any) -> str:
    """What a run ends with that cannot start, or cannot go on: an error of this name."""
    with pytest.raises(AssertionError, match=f"{error}: ") as raised:
        train(kind, folder, ranks, **changes)
    return str(raised.value)


def named_checkpoint(kind: str, saved: str = "epoch_0") -> dict[str, Any]:
    """What resumes a run from a checkpoint by the names of its files, as torchtune has to be told."""
    named: dict[str, Any] = {
        **RESUME,
        "checkpointer.recipe_checkpoint": f"{saved}/recipe_state.pt",
    }
    if "lora" in kind:
        named["checkpointer.adapter_checkpoint"] = f"{saved}/adapter_model.pt"
    else:
        named["checkpointer.checkpoint_files"] = [f"{saved}/model-00001-of-00001.safetensors"]
    return named


def assert_found_by_trying(
    train: Callable[..., Records], folder: Path, searches: Sequence[str], **changes: Any
) -> None:
    """Each search finds, on four ranks, what trying every size finds; rows are as long as the longest."""
    changes |= {
        "tokenizer.max_seq_len": 32,
        "dataset.train_on_input": True,
        "adaptive_batching.memory_limit": "4.5MiB",
        "adaptive_batching.headroom": 0,
        "adaptive_batching.rounding": "none",
        "adaptive_batching.on_out_of_memory": "raise",
        "max_steps_per_epoch": 2,
    }
    found = set()
    for search in searches:
        asked = {"use_maximum_batch_size": True, "adaptive_batching.search": search}
        found.add(train("full", folder / search, 4, **changes, **asked)[0]["micro_batch_size"])
    size = 1
    while size <= max(found):
        train("full", folder / f"{size}", 4, **changes, batch_size=size)
        size += 1
    with pytest.raises(AssertionError, match="TrainingOutOfMemory: "):
        train("full", folder / "next", 4, **changes, batch_size=size)
    assert found == {size - 1} and size > 3


def logged(folder: Path, rel: float = 0.0) -> dict[int, float]:
    """The loss of each step, which is the same, within ``rel``, in each attempt that came to it."""
    found: dict[int, float] = {}
    for log in (folder / "out" / "logs").iterdir():
        for step, loss in re.findall(r"Step (\d+) \|.*?(?<!_)loss:(\S+)", log.read_text()):
            first = found.setdefault(int(step), float(loss))
            assert first == pytest.approx(float(loss), rel=rel, abs=0.0), step
    return found


def stopped_after(step: int, whole: Path, folder: Path) -> Path:
    """What a run leaves that is stopped after a step: a whole run's folder without what came later."""
    shutil.copytree(whole, folder, symlinks=True)
    for saved in folder.glob("*epoch_*"):
        number = re.search(r"_step_(\d+)$", saved.name)
        if number is None or int(number[1]) > step:
            shutil.rmtree(saved)
    return folder


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def assert_same_records(records: Records, expected: Records) -> None:
    """Two runs have logged the same to the bit, the speed of the machine apart."""
    for one, other in zip(records, expected, strict=True):
        differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        assert differing <= MACHINE, {key: (one.get(key), other.get(key)) for key in differing}


def assert_same_end(resumed: Records, whole: Records) -> None:
    """A resumed run has logged to the bit what the undisturbed one did from there on."""
    assert_same_records(resumed, whole[len(whole) - len(resumed) :])


def assert_same_steps(records: Records, expected: Records, rel: float = 1e-5) -> None:
    """The same samples in the same steps; sums are rounded in another order."""
    for one, other in zip(records, expected, strict=True):
        assert one.keys() - {"done_again"} == other.keys() - {"done_again"}
        for key in one.keys() & {"step", "global_batch_size", "samples_seen", "lr"}:
            assert one[key] == other[key], key
        for key in one.keys() & {"loss", "val_loss"}:
            assert one[key] == pytest.approx(other[key], rel=rel), key
        if "grad_norm" in one:
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * rel)


def after(step: int, records: Records) -> Records:
    """What was logged after a step, and its validation."""
    return [record for record in records if record["step"] > step]


def assert_same_weights(
    one: Path, other: Path, rtol: float | None = 0.0, atol: float | None = 0.0
) -> None:
    """Two folders have the same weights: to the bit, or within a tolerance (None is torch's)."""
    expected, found = saved_weights(one), saved_weights(other)
    assert expected and expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
        )


def assert_equal(their: Record, our: Record) -> None:
    """We have logged all that torchtune has, and the same to the bit."""
    for key in their.keys() - MACHINE:
        assert our[key] == their[key], (key, their, our)


def assert_near(their: Record, our: Record) -> None:
    """We have logged all that torchtune has, and the same to rounding."""
    for key in their.keys() - MACHINE:
        assert our[key] == pytest.approx(their[key], rel=1e-5, abs=0.0), (key, their, our)


def assert_torchtunes(
    kind: str,
    folder: Path,
    changes: dict[str, Any],
    ranks: int = 2,
    *,
    run_theirs: Callable[..., Records] = run_torchtunes,
    run_ours: Callable[..., Records] = run_ours,
    assert_same: Callable[[Record, Record], None] = assert_equal,
    rtol: float | None = 0.0,
    atol: float | None = 0.0,
) -> Records:
    """Run torchtune's recipe and ours, and compare what they logged and saved; what ours logged."""
    theirs = _reference(run_theirs, kind, tiny_config(kind, folder / "theirs", **changes), ranks)
    ours = run_with(run_ours, kind, tiny_config(kind, folder / "ours", **changes), ranks)
    assert len(theirs) == len(ours) > 0
    for their, our in zip(theirs, ours, strict=True):
        assert_same(their, our)
    assert_same_weights(folder / "theirs", folder / "ours", rtol, atol)
    return ours


def _reference(
    run_theirs: Callable[..., Records], kind: str, cfg: DictConfig, ranks: int
) -> Records:
    """What torchtune's own recipe logged.

    It has a second try if torch aborts one of its processes: seen once in thousands of runs, in a thread
    of gloo while torchtune gathered a checkpoint, with nothing of ours in that process but the logger.
    """
    try:
        return run_with(run_theirs, kind, cfg, ranks)
    except AssertionError as error:
        if f"exit code {-signal.SIGABRT}" not in str(error):
            raise
    return run_with(run_theirs, kind, cfg, ranks)
