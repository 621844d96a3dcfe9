"""What arrives at torchtune's metric loggers: the config that is trained with, the search, the steps."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import refused
from torchtune_adaptive.recipe.train.metric_logger import MetricLogger

pytestmark = pytest.mark.runs

SEARCH = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "16MiB",
    "batch_size": 2,
    "max_steps_per_epoch": 2,
}


def run(folder: Path, **changes: Any) -> None:
    cfg = tiny_config("full", folder, **SEARCH, **changes)
    run_ranks(run_offline, 1, cfg, join=False)


def run_offline(cfg: Any) -> None:
    # The ranks share what the first one was forked with; nothing is to be sent anywhere.
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": cfg.output_dir,
    }
    os.environ |= {"WANDB_CACHE_DIR": cfg.output_dir, "WANDB_CONFIG_DIR": cfg.output_dir}
    run_ours("full", cfg)


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = "torchtune.training.metric_logging.TensorBoardLogger"
    run(tmp_path, **{"metric_logger._component_": logger})
    (folder,) = (tmp_path / "logs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    seen = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    found = json.loads((tmp_path / "batch_size_search.json").read_text())
    (size,) = seen["search/batch_size"]
    assert size.step == 0 and size.tensor_proto.float_val[0] == found["batch_size"] == 4
    assert seen["search/peak_memory_gib"][0].tensor_proto.float_val[0] > 0
    assert [event.step for event in seen["loss"]] == [1, 2]
    saved = OmegaConf.load(tmp_path / "torchtune_config.yaml")
    assert saved.batch_size == saved.search_result.batch_size == found["batch_size"]
    report = (tmp_path / "report.html").read_text()
    assert "state</th><td>finished" in report
    assert f"metrics</th><td>TensorBoardLogger, {tmp_path / 'logs'}<" in report


@pytest.mark.exhaustive
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    """Its file holds the records that are sent when the run is synchronized."""
    logger = "torchtune.training.metric_logging.WandBLogger"
    run(tmp_path, **{"metric_logger._component_": logger, "metric_logger.project": "test"})
    config, history = logged_offline(tmp_path)
    found = json.loads((tmp_path / "batch_size_search.json").read_text())
    assert json.loads(config["batch_size"]) == found["batch_size"] == 4
    assert json.loads(config["search_result"])["largest_batch_size"] == found["largest_batch_size"]
    assert [float(row["search/batch_size"]) for row in history if "search/batch_size" in row] == [
        found["batch_size"]
    ]
    assert sum("loss" in row for row in history) == 2


def logged_offline(folder: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The config and the rows of the history that an offline run of W&B has kept."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    config: dict[str, str] = {}
    history: list[dict[str, str]] = []
    for data in level_db_log(path.read_bytes(), header=7):
        record = Record()
        record.ParseFromString(data)
        for update in (record.config.update, record.run.config.update):
            config |= {each.key: each.value_json for each in update}
        if record.HasField("history"):
            items = record.history.item
            history.append({"/".join(i.nested_key) or i.key: i.value_json for i in items})
    return config, history


def level_db_log(data: bytes, header: int) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which W&B writes with a header of its own."""
    block, frame = 32768, struct.Struct("<IHB")
    at, parts = header, b""
    while at + frame.size <= len(data):
        if block - at % block < frame.size:  # the rest of a block is padding
            at += block - at % block
            continue
        _, size, kind = frame.unpack_from(data, at)
        parts += data[at + frame.size : at + frame.size + size]
        at += frame.size + size
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def test_what_a_logger_holds_back_is_written_however_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    disk = "torchtune.training.metric_logging.DiskLogger"
    kept = {"_component_": disk, "log_dir": str(tmp_path), "filename": "kept"}
    logger = MetricLogger(OmegaConf.create({"metric_logger": kept}))
    assert at_exit == [logger.close]
    logger.close()
    assert at_exit == []


def test_a_full_disk_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = "torchtune.training.metric_logging.DiskLogger"
    full = {"_component_": disk, "log_dir": str(tmp_path), "filename": "/dev/full"}
    logger = MetricLogger(OmegaConf.create({"metric_logger": full}))
    with caplog.at_level("WARNING"):
        for step in (1, 2):
            logger.log_dict({"loss": 1.0}, step=step)
        logger.close()
    (line,) = caplog.messages
    assert "not written any more" in line and "No space left" in line


def test_logs_that_cannot_begin_end_a_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk = "torchtune.training.metric_logging.DiskLogger"
    logs = {
        "metric_logger._component_": disk,
        "metric_logger.log_dir": str(tmp_path / "file" / "x"),
    }
    said = refused("ConfigError", "full", tmp_path / "out", 2, **logs)
    assert re.search(
        r"metric_logger: '.*DiskLogger' cannot write: .*Set metric_logger.log_dir", said
    )


class NotSetUp:
    """A logger of a service that knows no key."""

    def __init__(self, log_dir: str) -> None:
        raise RuntimeError("No API key configured.\n")


def test_a_service_that_is_not_set_up_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    logs = {"metric_logger._component_": f"{__name__}.NotSetUp"}
    said = refused("ConfigError", "full", tmp_path / "out", 2, **logs)
    assert "NotSetUp' cannot begin (RuntimeError: No API key configured). Set it up" in said


class NotSent:
    """A logger of a service that gives up in the middle of a run, with an exception of its own."""

    def __init__(self, log_dir: str) -> None: ...

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        raise RuntimeError("mailbox closed")

    def close(self) -> None:
        raise RuntimeError("mailbox closed")


def test_a_service_that_gives_up_ends_no_run(tmp_path: Path) -> None:
    logs = {"metric_logger._component_": f"{__name__}.NotSent"}
    cfg = tiny_config("full", tmp_path, max_steps_per_epoch=2, **logs)
    said = run_ranks(run_and_listen, 1, cfg, join=False)[0]
    (line,) = (each for each in said if "not written any more" in each)
    assert line == (
        "Metrics are not written any more (RuntimeError: mailbox closed). The run continues."
    )
    assert (tmp_path / "epoch_0").is_dir(), "it has come to its end"


def run_and_listen(cfg: Any) -> list[str]:
    """What a run logs."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("torchtune_adaptive").addHandler(Kept())
    run_ours("full", cfg)
    return said
