"""The command line of a recipe, up to where it begins to run."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.helpers.ranks import watch_ranks
from torchtune_adaptive.cli import command_line as cli
from torchtune_adaptive.cli.command_line import _run
from torchtune_adaptive.cli.recipe_argument import require_recipe
from torchtune_adaptive.common.errors import (
    ConfigError,
    OutOfMemoryElsewhere,
    RankLost,
    TrainingOutOfMemory,
)
from torchtune_adaptive.recipe import launch
from torchtune_adaptive.recipe.registry import find_config

REPOSITORY = Path(__file__).parents[2]


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> DictConfig:
    """The config that a recipe gets."""
    seen: list[DictConfig] = []
    monkeypatch.setattr(sys, "argv", ["recipe", *arguments])
    with pytest.raises(SystemExit) as ended:
        launch.recipe(seen.append)()
    assert ended.value.code is None
    return seen[0]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a=b", "a=b"),
        ("https://host/?a=b&c=d==", "https://host/?a=b&c=d=="),
        ("{x: 'y=z', n: 3}", {"x": "y=z", "n": 3}),
        ("[k=v, 1.5, null, true]", ["k=v", 1.5, None, True]),
        ("a=${output_dir}", "a=here"),
        ('"é=\\u003d"', "é=="),
    ],
)
def test_a_value_may_contain_equals_signs(
    written: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = parsed(
        monkeypatch, "--config", "tiny/full", f"my.key={written}", "output_dir=here", "seed=3"
    )
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    assert plain["my"]["key"] == expected
    assert (cfg.seed, cfg.output_dir) == (3, "here")


def test_the_last_override_wins_with_and_without_equals_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = parsed(monkeypatch, "--config=tiny/full", "a=x=y", "a=z", "b=z", "b=x=y", "~epochs")
    assert (cfg.a, cfg.b, "epochs" in cfg) == ("z", "x=y", False)


def test_what_was_imported_is_left_out_of_the_collections_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen = gc.get_freeze_count(), []
    imported: list[list[int]] = [[number] for number in range(10_000)]
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", "tiny/full"])
    with pytest.raises(SystemExit):
        launch.recipe(lambda _: seen.append(gc.get_freeze_count()))()
    assert seen[0] - before >= len(imported)


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_leaves_warnings(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = logging.getLogger("torchtune_adaptive")
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    cfg = parsed(monkeypatch, "--config", "tiny/full", flag, "seed=3")
    assert cfg.seed == 3 and ours.level == logging.WARNING


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("seed", "KEY=VALUE: 'seed' is not an override"),
        ("=3", "KEY=VALUE: '=3' is not an override"),
        ("seed={", "seed: '{' is not YAML"),
        ("seed==", "seed: '=' is not YAML"),
        ("seed=${a", "seed: '${a' is not YAML"),
        ("seed=!!binary aGk=", "seed: '!!binary aGk=' is of a type that no key takes"),
        ("adaptive_batching=[]", "adaptive_batching: '[]' cannot be set"),
        ("checkpointer.checkpoint_files={}", "checkpointer.checkpoint_files: '{}' cannot be set"),
        ("~nothing", "~KEY: '~nothing' removes what the config does not have"),
        ("~optimizer", "~KEY: '~optimizer' removes a component"),
        (
            "--batch_size=4",
            "is not an option of a recipe. What a config has is written batch_size=4",
        ),
        ("--batch-size", "written batch_size=VALUE"),
    ],
)
def test_what_is_no_override_is_an_error_of_one_line(
    override: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", "tiny/full", override])
    with pytest.raises(SystemExit) as ended:
        launch.recipe(lambda cfg: None)()
    assert ended.value.code == 1
    said = capsys.readouterr().err.strip()
    assert error in said and "\n" not in said


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epochs": 0}, "epochs: 0 is not valid"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload"),
        ({"serch": "halve", "adaptive_batching": {"serch": "halve"}}, "Did you mean search"),
        ({"token_budget": True}, "token_budget: True is in the wrong place"),
        (
            {
                "batch_increase_function": {
                    "_component_": "torchtune_adaptive.schedule.Linear",
                    "to": "many",
                }
            },
            "'many' must be a number >= 1",
        ),
        ({"batch_increase_function": "torchtune_adaptive.nothing"}, "batch_increase_function"),
    ],
)
def test_validate_checks_what_a_run_checks(
    changes: dict[str, Any], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = OmegaConf.load(find_config("tiny/full"))
    _run(["tune-adaptive", "validate", "tiny/full"])
    assert "well-formed" in capsys.readouterr().out
    mine = tmp_path / "mine.yaml"
    OmegaConf.save(OmegaConf.merge(good, changes), mine)
    with pytest.raises(ConfigError, match=error):
        _run(["tune-adaptive", "validate", str(mine)])


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (
            "optimzer=3 adaptive_batching.serch=1 adaptive_batching.headroom=5 batch_size=0 ~seed dataset=3 "
            "batch_increase_function=no.where optimizer.lr=much optimizer.rl=1 model.num_layer=3",
            "optimzer adaptive_batching.serch adaptive_batching.headroom batch_size seed dataset "
            "batch_increase_function optimizer.lr optimizer.rl model.num_layer",
        ),
        (
            "dtype=fp16 optimizer_in_bwd=True adaptive_batching.token_budget=True collate_fn=no.where",
            "dtype clip_grad_norm adaptive_batching.token_budget collate_fn",
        ),
    ],
    ids=["values", "combinations"],
)
def test_validate_says_all_that_is_wrong(
    overrides: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as last:
        _run(["tune-adaptive", "validate", "tiny/full", *overrides.split()])
    said = re.findall(r"^tune-adaptive: ConfigError: ([\w.]+): ", capsys.readouterr().err, re.M)
    assert {*said, last.value.key} >= {*wrong.split()}


def test_validate_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["tune-adaptive", "validate", "tiny/full", "batch_size=3", "~clip_grad_norm"])
    assert "well-formed" in capsys.readouterr().out
    for override, error in {
        "batch_size=0": "batch_size: 0 is not valid",
        "optimizer.learning_rate=1": "Did you mean optimizer.lr?",
        "save_steps=3": "it looks like save_every_n_steps",
        "batch_size": "'batch_size' is not an override",
    }.items():
        with pytest.raises(ConfigError) as raised:
            _run(["tune-adaptive", "validate", "tiny/full", override])
        assert error in str(raised.value)


FULL = "adaptive_full_finetune_distributed"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("find full_finetune_distributed --config tiny/full", f"does not search .* Use {FULL}"),
        (
            "find --nproc_per_node 2 lora_finetune_single_device --config tiny/full",
            "recipe: 'lora_finetune_single_device' .* Use adaptive_lora_finetune_distributed",
        ),
        ("find qat_distributed --config tiny/full", "Use adaptive_qat_distributed"),
        ("find eleuther_eval --config tiny/full", f"Use one of {FULL}, .* with your own"),
        ("find tiny/full", f"find: 'tiny/full' is a config.* find {FULL} --config tiny/full`"),
        (f"run {FULL} --config", "run: '--config' has no value. Give a config name"),
        ("run tiny/lora seed=1", "adaptive_lora_finetune_distributed --config tiny/lora`"),
        ("run --config tiny/qat", "run: '--config tiny/qat' names no recipe.* run adaptive_qat_"),
        ("run adaptive_full_finetune --config tiny/full", rf"Did you mean {FULL}\?"),
        ("run --nnodes 1 adaptive_lora --config x", "mean adaptive_lora_finetune_distributed"),
        ("run lora_finetune_distribute --config x", r"mean adaptive_lora_finetune_distributed\?"),
        ("run nothing --config tiny/full", f"recipe: 'nothing' is neither .* Ours are {FULL}"),
        ("run nothing.py --config tiny/full", "recipe: 'nothing.py' is neither"),
        (
            "run full_finetune_distributed --config tiny/full",
            f"use_maximum_batch_size: True changes nothing in torchtune's full.* Use {FULL}",
        ),
        (
            "run lora_finetune_distributed --config llama3_1/8B_lora use_fastest_configuration=True",
            "use_fastest_configuration: True .* Use adaptive_lora_finetune_distributed",
        ),
        (
            "run generate --config generation use_maximum_batch_size=True",
            "Remove use_maximum_batch_size",
        ),
        (
            "run full_finetune_distributed --config tiny/ful",
            "--config: 'tiny/ful' is neither a file",
        ),
    ],
)
def test_a_recipe_that_is_missing_or_wrong_is_said_with_what_to_type(words: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        _run(["tune-adaptive", *words.split()])
    assert "\n" not in str(raised.value) and "None" not in str(raised.value)


def test_other_recipes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("")
    for words in (
        "mine --config tiny/full",
        "mine.py --config tiny/full",
        "--nproc_per_node 2 full_finetune_distributed --config llama3_1/8B_full seed=1",
        "full_finetune_distributed",  # torchtune says what is missing
        f"--nnodes 2 {FULL} seed=1 --config tiny/full",
        "",
    ):
        require_recipe("run", words.split())


@pytest.mark.parametrize("traceback", [None, "Traceback (most recent call last): oh"])
def test_a_launched_run_that_fails_ends_with_its_reason_or_with_torchruns_report(
    traceback: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    more = {"timestamp": "1"} | ({"py_callstack": traceback} if traceback else {})
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "ConfigError: oh", "extraInfo": more}}))

    def fail(argv: list[str]) -> None:
        failures = {0: ProcessFailure(0, 9, -15, ""), 1: ProcessFailure(1, 123, 1, str(file))}
        raise ChildFailedError("recipe", failures)

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    if traceback:
        assert f"traceback : {traceback}" in said
    else:
        assert said.strip() == "tune-adaptive: rank 1: ConfigError: oh"


@pytest.mark.parametrize(
    ("error", "ranks", "leaves"),
    [
        (TrainingOutOfMemory("on this rank", everywhere=False), 2, True),
        (OutOfMemoryElsewhere("while saving"), 2, True),
        (RankLost("rank 1"), 2, True),
        (IndexError("a bug, of which nobody else knows"), 2, True),
        (TrainingOutOfMemory("on all ranks"), 2, False),
        (RankLost("none"), 1, False),
    ],
    ids=str,
)
def test_who_has_an_error_alone_does_not_end_with_the_others(
    error: Exception,
    ranks: int,
    leaves: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said_when_left: list[str] = []

    def fail(cfg: DictConfig) -> None:
        raise error

    def leave(status: int) -> None:
        said_when_left.append(capsys.readouterr().err)
        sys.exit(status)

    together: list[str] = []
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: together.append("left"))
    monkeypatch.setattr(launch.ending, "leave", leave)
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", "tiny/full"])
    with pytest.raises(SystemExit) as ended:
        launch.recipe(fail)()
    assert ended.value.code == 1
    assert together == ([] if leaves else ["left"])
    assert len(said_when_left) == leaves and all(str(error) in said for said in said_when_left)


def start(cwd: Path, *arguments: str, pythonpath: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m`` as torchrun starts a recipe, up to the versions' check."""
    program = "from torchtune_adaptive.recipe import shadowing; shadowing.stop_if_shadowed()"
    paths = [str(REPOSITORY), str(REPOSITORY / "recipes"), pythonpath]
    return subprocess.run(
        [sys.executable, *(arguments or ("-c", program))],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def crash() -> None:
    faulthandler.disable()  # that of the tests
    sys.argv = ["recipe", "--config", "tiny/full"]
    launch.recipe(lambda _: os.abort())()


def test_a_crash_in_native_code_says_where() -> None:
    (ended,) = watch_ranks(crash, 1, until_exit_of=[0], join=False)
    assert ended.exit_code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.said and "launch.py" in ended.said


@pytest.mark.parametrize("name", ["torch/__init__.py", "datasets.py"])
def test_a_file_that_hides_a_library_stops_the_run(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    done = start(tmp_path, "-m", "adaptive_full_finetune_distributed")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"{file} hides the library {Path(name).parts[0].removesuffix('.py')}")


def test_a_copy_of_a_recipe_is_named(tmp_path: Path) -> None:
    name = "adaptive_full_finetune_distributed"
    copy = tmp_path / f"{name}.py"
    copy.write_text(
        "import torchtune_adaptive.recipe.shadowing as s; s.stop_if_shadowed(); print('ran')"
    )
    done = start(tmp_path, "-m", name)
    assert done.stdout == "ran\n"
    assert done.stderr == f"Using {copy} in place of the installed {name}.\n"


def test_other_files_and_folders_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "datasets").mkdir()  # without an __init__.py
    (tmp_path / "meant").mkdir()
    (tmp_path / "meant" / "tqdm.py").write_text("")
    for cwd, path in ((tmp_path, ""), (REPOSITORY, ""), (tmp_path / "meant", "meant")):
        done = start(cwd, pythonpath=str(tmp_path / path) if path else "")
        assert (done.returncode, done.stderr) == (0, "")
