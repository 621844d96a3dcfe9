"""Runs whose ranks die, and which a launcher starts again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.helpers.killing import Fatal, deadly
from tests.helpers.recipes import tiny_config
from tests.helpers.runs import (
    BIN,
    RESUME,
    assert_same_weights,
    logged,
    losses,
    start,
    undisturbed,
)
from torchtune_adaptive.recipe.checkpoints.folder import last_saved
from torchtune_adaptive.recipe.settings.kind_table import KINDS


@contextmanager
def launched(
    folder: Path,
    fatal: Sequence[Fatal],
    *options: str,
    program: str = "tune",
    ranks: str = "2",
    kind: str = "full",
    **changes: Any,
) -> Iterator[subprocess.Popen[str]]:
    """A run whose attempts end as ``fatal`` says, each with the next one; those that follow are left alone.
    What it prints is in ``said``."""
    cfg = tiny_config(kind, folder / "out", **changes, **RESUME)
    cfg.metric_logger._component_ = "torchtune.training.metric_logging.DiskLogger"
    cfg.dataset.rows = cfg.dataset._component_
    cfg.dataset._component_ = "tests.helpers.killing.deadly_rows"
    OmegaConf.save(cfg, folder / "run.yaml")
    command = [BIN / program, "run", "--nproc_per_node", ranks, *options]
    command += [KINDS[kind].recipe, "--config", "run.yaml"]
    run = start(command, folder, folder / "said", **deadly(fatal))
    try:
        yield run
    finally:
        run.terminate()
        run.wait(timeout=300)


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def wait_until(
    text: str, folder: Path, times: int = 1, run: subprocess.Popen[Any] | None = None
) -> None:
    """Wait until a run has said something so often; fail once it has ended, if that is the ``run`` given."""
    end = time.monotonic() + 300
    while said(folder).count(text) < times:
        assert time.monotonic() < end and (run is None or run.poll() is None), said(folder)
        time.sleep(0.05)


def assert_undisturbed(folder: Path, kind: str = "full", ranks: int = 2, **changes: Any) -> None:
    """The run has trained what one that nothing disturbs does: all losses and weights are the same."""
    whole, records = undisturbed(kind, ranks, **changes)
    assert logged(folder) == dict(enumerate(losses(records), 1))
    end = Path(last_saved(whole)).name  # rollouts end in the middle of an epoch
    assert_same_weights(whole / end, folder / "out" / end)
