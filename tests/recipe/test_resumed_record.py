"""What a resumed run leaves on record: what was used, where it went on, the whole run and this part of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.runs import RESUME, train

pytestmark = pytest.mark.runs

SEARCHED: dict[str, Any] = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "12MiB",
    "batch_size": 1,
    "max_steps_per_epoch": 4,
    "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
    "optimizer.weight_decay": 0.1,
}


def facts(folder: Path) -> dict[str, str]:
    """The rows of the report's summary."""
    summary = (folder / "report.html").read_text().partition("<h2>Search")[0]
    return dict(re.findall(r"<th>([^<]*)</th><td>([^<]*)</td>", summary))


def drawn(folder: Path, **changes: Any) -> None:
    """Run in one process, with the curves in the report."""
    pytest.importorskip("matplotlib")
    train("full", folder, draws=True, **changes)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_record_of_a_resumed_run_is_true(ranks: int, tmp_path: Path) -> None:
    train("full", tmp_path, ranks, **SEARCHED)
    assert "resumed from" not in facts(tmp_path)
    others = {"seed": 5, "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.3, "shuffle": False}
    drawn(tmp_path, **{**SEARCHED, **others, "max_steps_per_epoch": 9}, **RESUME, epochs=3)
    config: Any = OmegaConf.load(tmp_path / "torchtune_config.yaml")
    assert (config.seed, config.shuffle, config.max_steps_per_epoch) == (1, True, 4)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.epochs) == (3e-3, 0.1, 3)
    shown = facts(tmp_path)
    assert shown["resumed from"] == "epoch_0 at step 4" and shown["steps"] == "12"
    part = shown["since it was resumed"]
    assert part.startswith("steps 5 to 12: 8 steps in ") and "loss" in part
    first = float(shown["loss"].split(" -&gt; ")[0])
    assert first > 5.8 > float(part.partition("loss ")[2].split(" -&gt; ")[0]), "of the whole run"
    curve = (tmp_path / "report.html").read_text()
    assert ">resumed at step 4<" in curve and "limit: 12 MiB" in curve
    assert shown["model"].endswith("parameters") and "rows" in shown["data"]
    assert Path(shown["metrics"]).parent == tmp_path / "logs"
    events = [*map(json.loads, (tmp_path / "batch_size_events.jsonl").read_text().splitlines())]
    (resumed,) = (each for each in events if each["reason"] == "resumed from epoch_0")
    assert resumed["step"] == 4
    kept = {line.split()[0] for line in resumed["changes"] if "(the checkpoint" in line}
    assert kept == {
        *("seed", "shuffle", "max_steps_per_epoch", "optimizer.lr", "optimizer.weight_decay")
    }
    for line in resumed["changes"]:
        assert line.split(" (")[0].replace("->", "-&gt;") in (tmp_path / "report.html").read_text()
    found = json.loads((tmp_path / "batch_size_search.json").read_text())
    logged = max((tmp_path / "logs").iterdir()).read_text()
    assert found["global_batch_size"] == float(re.findall(r" global_batch_size:(\S+)", logged)[-1])


def test_a_run_can_be_resumed_twice_and_knows_all_of_itself(tmp_path: Path) -> None:
    changes = {**SEARCHED, "use_maximum_batch_size": False, "max_steps_per_epoch": 2}
    for epochs in (1, 2, 3):
        drawn(tmp_path, **changes, epochs=epochs, resume_from_checkpoint=epochs > 1)
    shown = facts(tmp_path)
    assert shown["steps"] == "6" and "mean of the first and last 3 steps" in shown["loss"]
    assert shown["since it was resumed"].startswith("steps 5 to 6: 2 steps in ")
    assert ">resumed (2 times)<" in (tmp_path / "report.html").read_text()
