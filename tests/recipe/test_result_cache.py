"""Cached results: exact, or not used; and never a reason to fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.common import cache as caching
from torchtune_adaptive.common.cache import Cache, cache_folder
from torchtune_adaptive.common.durable import atomically
from torchtune_adaptive.core.search.strategies import SearchResult, Status, Strategy
from torchtune_adaptive.core.search.trial import RankReport, SizeTrial
from torchtune_adaptive.recipe import tiny
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.search.sizing import InRows
from torchtune_adaptive.recipe.settings.adaptive import (
    BLOCK,
    block_keys,
    top_level_keys,
)
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.fingerprint import search_facts, step_facts
from torchtune_adaptive.recipe.settings.kind_table import KNOWN_KEYS

FACTS = {"model": {"layers": 2}, "row_length": 128}


def sizes_in(folder: Path) -> Cache[int]:
    return InRows.cache(str(folder))


@pytest.fixture(autouse=True)
def heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    caching._warn_once.cache_clear()
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
        '{"value": 8, "facts": FACTS}',
        '{"value": 16, "facts": FACTS, "checksum": CHECKSUM}',
        '{"value": 8, "facts": {}, "checksum": CHECKSUM}',
        "[" * 100_000,
        "\\udcff",
    ],
)
def test_a_damaged_file_is_a_miss_with_a_warning(
    content: str, tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    path = only_file(tmp_path)
    checksum = json.dumps(json.loads(path.read_text())["checksum"])
    content = content.replace("FACTS", json.dumps(FACTS)).replace("CHECKSUM", checksum)
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert cache.get(FACTS) is None
    assert "Ignoring cached batch size" in heard.text


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, "8", None, [8]])
def test_a_value_that_cannot_be_right_is_a_miss(
    value: Any, tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    anything: Cache[Any] = Cache(tmp_path / "batch_sizes", "value", lambda value: True)
    anything.put(FACTS, value)
    assert sizes_in(tmp_path).get(FACTS) is None
    assert "invalid value" in heard.text


def test_a_file_of_another_run_under_this_name_is_a_miss(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    path = only_file(tmp_path)
    cache.put({"model": "another"}, 8)
    (other,) = set((tmp_path / "batch_sizes").iterdir()) - {path}
    os.replace(other, path)
    assert cache.get(FACTS) is None
    assert "belongs to a different run" in heard.text


def _a_file_in_the_way(folder: Path, patch: pytest.MonkeyPatch) -> bool | str:
    (folder / "file").write_text("not a folder")
    return str(folder / "file" / "cache")


def _a_read_only_folder(folder: Path, patch: pytest.MonkeyPatch) -> bool | str:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    patch.setattr("tempfile.mkdtemp", refuse)
    return str(folder)


def _a_home_that_may_not_be_entered(folder: Path, patch: pytest.MonkeyPatch) -> bool | str:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    patch.setattr(Path, "read_text", refuse)
    patch.setattr(Path, "mkdir", refuse)
    patch.setenv("XDG_CACHE_HOME", "")
    patch.setattr(Path, "home", lambda: folder)
    return True


def _a_user_without_a_home(folder: Path, patch: pytest.MonkeyPatch) -> bool | str:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.setenv("XDG_CACHE_HOME", "")
    patch.setattr(Path, "home", unknown)
    return True


def _no_such_user(folder: Path, patch: pytest.MonkeyPatch) -> bool | str:
    return "~nobody_of_this_name/cache"


@pytest.mark.parametrize(
    "obstacle",
    [
        _a_file_in_the_way,
        _a_read_only_folder,
        _a_home_that_may_not_be_entered,
        _a_user_without_a_home,
        _no_such_user,
    ],
)
def test_a_run_continues_without_a_cache_and_says_so_once(
    obstacle: Callable[[Path, pytest.MonkeyPatch], bool | str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: pytest.LogCaptureFixture,
) -> None:
    setting = obstacle(tmp_path, monkeypatch)
    for _ in range(2):
        for cache in (
            InRows.cache(setting),
            Cache(cache_folder(setting, "b"), "b", lambda _: True),
        ):
            assert cache.get(FACTS) is None
            cache.put(FACTS, 8)
            assert cache.get(FACTS) is None
            assert cache.all() == []
    assert heard.text.count("Continuing without a cache in") == 1 == len(heard.records)


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    cache = sizes_in(tmp_path)
    cache.put(FACTS, 8)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    assert cache.get(FACTS) is None
    cache.put(FACTS, 8)
    assert "Ignoring cached batch size" in heard.text and "without a cache" in heard.text
    assert only_file(tmp_path) == path, "nothing is left behind"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    with pytest.raises(ZeroDivisionError), atomically(path) as temporary:
        assert temporary.write_text("half") / 0
    assert list(path.parent.iterdir()) == []
    with atomically(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    with atomically(path) as temporary:
        temporary.write_text("another")
        assert path.read_text() == "whole"
    assert path.read_text() == "another" and list(path.parent.iterdir()) == [path]


def test_a_folder_appears_whole_and_the_first_one_stays(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with (
            pytest.raises(OSError, match="not empty") if content == "second" else nullcontext(),
            atomically(tmp_path / "folder") as temporary,
        ):
            temporary.mkdir()
            (temporary / "file").write_text(content)
    assert (tmp_path / "folder" / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_the_tiny_model_is_made_elsewhere_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quickly(folder: Path) -> None:
        (folder / "data.json").write_text("[]")

    monkeypatch.setattr(tiny, "make", quickly)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tiny.assets().is_relative_to(tmp_path / "cache")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tiny.assets().is_relative_to(tmp_path / "tmp")
    _a_user_without_a_home(tmp_path, monkeypatch)
    assert tiny.assets() == tiny.assets()
    assert (tiny.assets() / "data.json").read_text() == "[]"


def test_without_a_folder_nothing_is_remembered() -> None:
    cache = InRows.cache(False)
    cache.put(FACTS, 8)
    assert cache.get(FACTS) is None


def test_the_folder_is_the_users_or_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    InRows.cache(True).put(FACTS, 8)
    assert list((tmp_path / "home").rglob("*.json"))
    InRows.cache(str(tmp_path / "mine")).put(FACTS, 8)
    assert list((tmp_path / "mine").rglob("*.json"))


def test_what_was_written_longest_ago_goes(tmp_path: Path) -> None:
    few: Cache[int] = Cache(tmp_path, "number", lambda n: True, most=3)
    for n in range(5):
        few.put({"n": n}, n)
        for path in tmp_path.iterdir():  # as if time had passed
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    assert [few.get({"n": n}) for n in range(5)] == [None, None, 2, 3, 4]


_PUT_MANY = """
import sys
from pathlib import Path
from torchtune_adaptive.common.cache import Cache
cache = Cache(Path(sys.argv[1]), "size", lambda size: True)
for _ in range(200):
    cache.put({"a": 1}, int(sys.argv[2]))
    assert cache.get({"a": 1}) in (8, 16)
"""


def test_two_jobs_at_once_leave_one_whole_result(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen([sys.executable, "-c", _PUT_MANY, str(tmp_path), size])
        for size in ("8", "16")
    ]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    assert Cache(tmp_path, "size", lambda size: True).get({"a": 1}) in (8, 16)
    assert len(list(tmp_path.iterdir())) == 1


def found_by(strategy: Strategy | Literal["predict"], folder: Path) -> SearchResult:
    """A search among 1, 2, 4 and 8, of which all fit and 4 is predicted."""
    return InRows(
        trial=a_trial,
        sizes=(1, 2, 4, 8),
        strategy=strategy,
        nothing_fits=AssertionError,
        about=FACTS,
        first=a_trial(1),
        predicted=lambda last: 4,
    ).find(Alone(), str(folder))  # type: ignore[arg-type]


def a_trial(size: int) -> SizeTrial:
    report = RankReport(10 * size, 10 * size, 0, failed_in=None, usable_bytes=100)
    return SizeTrial(size, 0.1, (report,))


def test_a_size_at_which_a_prediction_stopped_is_not_kept(tmp_path: Path) -> None:
    predicted = found_by("predict", tmp_path)
    assert (predicted.size, predicted.status) == (4, Status.PREDICTED)
    assert sizes_in(tmp_path).get(FACTS) is None
    searched = found_by("bisect", tmp_path)
    assert (searched.size, searched.status) == (8, Status.CEILING)
    assert sizes_in(tmp_path).get(FACTS) == 8
    assert found_by("predict", tmp_path).status is Status.REMEMBERED


CHANGES = [
    {"model.embed_dim": 128},
    {"policy_model": {"_component_": "x"}, "ppo_batch_size": 8},
    {"reward_and_value_model": {"_component_": "x"}},
    {"grpo_samples": 4},
    {"max_generated_tokens": 9},
    {"temperature": 0.7},  # divided logits are in memory, too
    {"top_k": 3},
    {"ppo_epochs": 2},  # then old log-probabilities are scored
    {"enable_kv_cache": True},
    {"model": {"_component_": "torchtune.models.llama2.lora_llama2", "lora_rank": 4}},
    {"dtype": "bf16"},
    {"device": "cuda"},
    {"enable_activation_checkpointing": True},
    {"enable_activation_offloading": True},
    {"ac_mode": "selective"},
    {"ac_option": 2},
    {"compile": True},
    {"loss._component_": "torch.nn.CrossEntropyLoss"},
    {"optimizer._component_": "torch.optim.SGD"},
    {"optimizer.fused": True},
    {"optimizer_in_bwd": True},
    {"gradient_accumulation_steps": 2},
    {"batch_size": 4},
    {"custom_sharded_layers": ["output"]},
    {"collate_fn": "torchtune.data.padded_collate_packed"},
    {"fsdp_cpu_offload": True},
    {"fsdp_reshard_after_forward": False},
    {"quantizer._component_": "torchtune.training.quantization.Int4WeightOnlyQATQuantizer"},
    {"kd_loss._component_": "torchtune.modules.loss.ForwardKLLoss"},
    {"teacher_model._component_": "torchtune.models.llama2.llama2_7b"},
    {"clip_grad_norm": None},
    {"cudnn_deterministic_mode": 1},
    {"tensor_parallel_dim": 2},
    {"data_parallel_replicate_dim": 2},
    {"data_parallel_shard_dim": 2},
    {"context_parallel_dim": 2},
    {"context_parallel_rotate_method": "alltoall"},
    {"tensor_parallel_plan._component_": "m.plan"},
    {"use_maximum_batch_size": False},
    {"batch_increase_function": "m.grow"},
    {"adaptive_batching.headroom": 0.1},
    {"adaptive_batching.memory_limit": "41MiB"},
    {"adaptive_batching.rounding": "none"},
    {"adaptive_batching.ceiling": 4},
    {"adaptive_batching.keep_global_batch": True},
    {"adaptive_batching.grow_past_memory": True},
    {"adaptive_batching.gradient_noise": "observe"},
    {"adaptive_batching.token_budget": 512},
    {"adaptive_batching.on_out_of_memory": "raise"},
    {"adaptive_batching.activation_checkpointing": "every_2"},
    {"adaptive_batching.recompute_loss": True},
    {"adaptive_batching.dropout": "sample"},
]
CANNOT_MATTER = [
    {"output_dir": "/elsewhere", "checkpointer.checkpoint_dir": "/elsewhere"},
    {"ref_checkpointer": {"checkpoint_dir": "/elsewhere"}},
    {"teacher_checkpointer": {"checkpoint_dir": "/elsewhere"}},
    {"kd_ratio": 0.1},
    {"fake_quant_after_n_steps": 9},
    {"resume_from_checkpoint": True},
    {"metric_logger.log_dir": "/elsewhere", "profiler": {"enabled": True}},
    {"log_every_n_steps": 5, "log_peak_memory_stats": True},
    {"search_result": {"batch_size": 8}},
    {"enable_async_checkpointing": True, "save_adapter_weights_only": True},
    {"seed": 7, "shuffle": False},
    {"epochs": 9, "max_steps_per_epoch": 3, "save_every_n_steps": 3},
    {"lr_scheduler.num_warmup_steps": 9, "optimizer.lr": 0.1},
    {
        "dataset.source": "other",
        "tokenizer.max_seq_len": 103,
    },  # the length of rows is a fact itself
    {"dataset_val": {"_component_": "x"}, "run_val_every_n_steps": 5, "batch_size_val": 2},
    {"assets": "/elsewhere", "my_notes": "hello"},
    {"adaptive_batching.search": "halve"},
    {"adaptive_batching.search_only": True, "adaptive_batching.cache": "/elsewhere"},
    {"adaptive_batching.num_workers": 2, "adaptive_batching.grow_back_after": 9},
    {"adaptive_batching.wait_for_memory": 9, "adaptive_batching.stop_timeout": 9},
    {"keep_last_n_checkpoints": 2, "adaptive_batching.sharded_checkpoints": "background"},
    {
        "adaptive_batching.snapshot_every_n_steps": 2,
        "adaptive_batching.snapshot_folder": "/elsewhere",
    },
    {"adaptive_batching.sample_order": "streaming"},
    {"adaptive_batching.lr_scaling": "sqrt", "adaptive_batching.beta2": "half_life"},
    {"adaptive_batching.resume_learning_rate": "config"},
    {"adaptive_batching.rank_timeout": 9, "adaptive_batching.step_timeout": 9},
    {"adaptive_batching.probe_length": 103},
    {"use_fastest_configuration": True, "adaptive_batching.may_change": "rounding"},
    {"adaptive_batching.speed_trials": 9},
    {"adaptive_batching.generation_batch_size": 4, "adaptive_batching.scoring_batch_size": 4},
    {"adaptive_batching.scoring_token_budget": 64},
    {"num_steps": 9, "save_every_n_epochs": 2, "forward_batch_size": 4},
    {"stop_token_ids": [1], "reward_functions": ["x.y"]},
    {
        "min_response_length": 9,
        "penalise_no_eos": True,
        "reward_penalty": -3,
        "whiten_rewards": True,
    },
    {"kl_coeff": 0.1, "gamma": 0.9, "lmbda": 0.9},
    {"value_checkpointer": {"checkpoint_dir": "/elsewhere"}},
    {"ref_policy_checkpointer": {"checkpoint_dir": "/elsewhere"}},
    {"reward_checkpointer": {"checkpoint_dir": "/elsewhere"}},
]
RUN = {
    "row": {"tokens": 103, "images": 0, "tiles": 0},
    "packed": False,
    "largest_candidate": 64,
    "ranks": 2,
    "device": "a",
    "capacity": 1000,
}


def changed(changes: dict[str, Any]) -> DictConfig:
    cfg = OmegaConf.load(find_config("tiny/full"))
    assert isinstance(cfg, DictConfig)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def facts_of(changes: dict[str, Any], **run: Any) -> dict[str, Any]:
    cfg = changed(changes)
    return search_facts(Asked.of(cfg, "full"), **{**RUN, **run})


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
    [
        {"row": {"tokens": 104, "images": 0, "tiles": 0}},
        {"row": {"tokens": 103, "images": 1, "tiles": 4}},
        {"packed": True},
        {"largest_candidate": 32},
        {"ranks": 3},
        {"device": "b"},
        {"capacity": 1200},
    ],
    ids=str,
)
def test_so_is_the_machine_and_the_data(run: dict[str, Any]) -> None:
    assert facts_of({}, **run) != facts_of({})


@pytest.mark.parametrize("changes", CANNOT_MATTER, ids=lambda changes: next(iter(changes)))
def test_what_cannot_change_the_result_is_not_a_fact(changes: dict[str, Any]) -> None:
    assert facts_of(changes) == facts_of({})


def test_a_few_pages_more_or_less_are_the_same_capacity() -> None:
    assert facts_of({}, capacity=1004) == facts_of({})


def test_every_key_is_above_in_one_of_the_lists() -> None:
    """A new one must be thought about."""
    listed = {key for changes in (*CHANGES, *CANNOT_MATTER) for key in changes}
    ours = {f"{BLOCK}.{key}" for key in block_keys()} | top_level_keys()
    theirs = KNOWN_KEYS - {BLOCK}
    assert ours | theirs <= listed | {key.split(".")[0] for key in listed}


def test_traces_hold_for_any_batch_size_and_any_settings_of_ours() -> None:
    same = {"batch_size": 4, "use_maximum_batch_size": False, "adaptive_batching.headroom": 0.2}
    assert step_facts(changed(same)) == step_facts(changed({}))
    for changes in ({"model.embed_dim": 128}, {"adaptive_batching.dropout": "sample"}):
        assert step_facts(changed(changes)) != step_facts(changed({}))
