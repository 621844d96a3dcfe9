"""Remembered results: exact, or not used; and never a reason to fail."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.cache import Cache
from torchtune_adaptive.registry import find_config
from torchtune_adaptive.search.batch_size import facts, found_sizes
from torchtune_adaptive.settings.adaptive import AdaptiveSettings

FACTS = {"model": {"layers": 2}, "row_length": 128}


def sizes_in(folder: Path) -> Cache[int]:
    return found_sizes(str(folder))


@pytest.fixture(autouse=True)
def heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    return caplog


def only_file(folder: Path) -> Path:
    (path,) = (folder / "batch_sizes").iterdir()
    return path


def test_what_was_put_is_got(tmp_path: Path) -> None:
    cache = sizes_in(tmp_path / "made" / "on the way")
    assert cache.get(FACTS) is None
    cache.put(FACTS, 8)
    cache.put(FACTS, 16)
    assert cache.get(FACTS) == 16
    assert only_file(tmp_path / "made" / "on the way").suffix == ".json"


@pytest.mark.parametrize("change", [{"row_length": 129}, {"model": {"layers": 3}}, {"new": None}])
def test_any_other_fact_is_another_result(change: dict[str, Any], tmp_path: Path) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    assert cache.get({**FACTS, **change}) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"value": 8}',
        '{"value": "8", "facts": FACTS}',
        '{"value": 0, "facts": FACTS}',
    ],
)
def test_a_corrupt_file_is_a_miss_with_a_word(
    content: str, tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    only_file(tmp_path).write_text(content.replace("FACTS", json.dumps(FACTS)))
    assert cache.get(FACTS) is None
    assert "Not using the remembered batch size" in heard.text


def test_a_file_of_another_run_under_this_name_is_a_miss(tmp_path: Path) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    path = only_file(tmp_path)
    path.write_text(json.dumps({"value": 8, "facts": {"model": "another"}}))
    assert cache.get(FACTS) is None


def test_a_folder_that_cannot_be_written_is_said_and_no_more(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = sizes_in(tmp_path / "file" / "cache")
    cache.put(FACTS, 8)
    assert cache.get(FACTS) is None
    assert "is not remembered" in heard.text


def test_without_a_folder_nothing_is_remembered() -> None:
    cache = found_sizes(False)
    cache.put(FACTS, 8)
    assert cache.get(FACTS) is None


def test_the_folder_is_the_users_or_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found_sizes(True).put(FACTS, 8)
    assert list((tmp_path / "home").rglob("*.json"))
    found_sizes(str(tmp_path / "mine")).put(FACTS, 8)
    assert list((tmp_path / "mine").rglob("*.json"))


def test_what_was_written_longest_ago_goes(tmp_path: Path) -> None:
    few: Cache[int] = Cache(tmp_path, "number", lambda n: True, most=3)
    for n in range(5):
        few.put({"n": n}, n)
        for path in tmp_path.iterdir():  # as if time had passed
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    assert [few.get({"n": n}) for n in range(5)] == [None, None, 2, 3, 4]


def _put_many(folder: str, sizes: list[int]) -> None:
    for size in sizes:
        sizes_in(Path(folder)).put(FACTS, size)


def test_two_jobs_at_once_leave_one_whole_result(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=_put_many, args=(str(tmp_path), [size] * 200), daemon=True)
        for size in (8, 16)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=60)
        assert job.exitcode == 0
    assert sizes_in(tmp_path).get(FACTS) in (8, 16)
    assert only_file(tmp_path)


CHANGES = [
    {"model.embed_dim": 128},
    {"model": {"_component_": "torchtune.models.llama2.lora_llama2", "lora_rank": 4}},
    {"dtype": "bf16"},
    {"enable_activation_checkpointing": True},
    {"enable_activation_offloading": True},
    {"compile": True},
    {"loss._component_": "torch.nn.CrossEntropyLoss"},
    {"optimizer._component_": "torch.optim.SGD"},
    {"optimizer_in_bwd": True},
    {"gradient_accumulation_steps": 2},
    {"custom_sharded_layers": ["output"]},
    {"fsdp_cpu_offload": True},
    {"clip_grad_norm": None},
    {"adaptive_batching.headroom": 0.1},
    {"adaptive_batching.memory_limit": "41MiB"},
    {"adaptive_batching.rounding": "none"},
    {"adaptive_batching.ceiling": 4},
]
RUN = {"row_length": 103, "packed": False, "ranks": 2, "device": "a", "capacity": 1000}


def facts_of(changes: dict[str, Any], **run: Any) -> dict[str, Any]:
    cfg = OmegaConf.load(find_config("tiny/full"))
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return facts(cfg, AdaptiveSettings.from_config(cfg), **{**RUN, **run})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_everything_that_could_change_the_result_is_a_fact(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    cache = sizes_in(tmp_path)
    cache.put(facts_of({}), 8)
    assert cache.get(facts_of({})) == 8
    assert cache.get(facts_of(changes)) is None


@pytest.mark.parametrize(
    "run",
    [{"row_length": 104}, {"packed": True}, {"ranks": 3}, {"device": "b"}, {"capacity": 1200}],
    ids=str,
)
def test_so_is_the_machine_and_the_data(run: dict[str, Any]) -> None:
    assert facts_of({}, **run) != facts_of({})


def test_what_cannot_change_the_result_is_not_a_fact() -> None:
    same = facts_of({"seed": 7, "output_dir": "/elsewhere", "epochs": 9, "log_every_n_steps": 5})
    assert same == facts_of({})
    assert facts_of({}, capacity=1004) == facts_of({})  # a few pages more or less
