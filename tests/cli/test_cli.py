"""The command line: what is quick, what is printed where, and with which status it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtune_adaptive import __version__
from torchtune_adaptive.cli.command_line import _run
from torchtune_adaptive.common.cache import cached_files, user_cache
from torchtune_adaptive.recipe.registry import torchtune_recipes

QUICK = (
    ["--version"],
    ["--help"],
    ["ls"],
    ["cache", "show"],
    ["find", "--help"],
    ["plan", "--help"],
    ["plan", "--list-gpus"],
    ["plan", "tiny/ful"],
    ["validate", "tiny/ful"],
    ["run", "adaptive_ful_finetune", "--config", "tiny/full"],
    ["run", "--nproc_per_node", "2", "adaptive_full_finetune_distributed", "--config", "tiny/ful"],
    ["find", "adaptive_full_finetune_distributed", "--config", "tiny/ful"],
)


def test_quick_commands_do_not_import_torch() -> None:
    """Nor do what names no recipe or no config, and plans whose traces are remembered, in this process: it
    only asks others."""
    program = (
        "import sys\n"
        "from torchtune_adaptive.cli.command_line import _run\n"
        "from torchtune_adaptive.common import AdaptiveBatchingError\n"
        f"for command in {QUICK!r}:\n"
        "    try:\n"
        "        _run(['tune-adaptive', *command])\n"
        "    except (SystemExit, AdaptiveBatchingError):\n"
        "        pass\n"
        "    imported = {'torch', 'torchtune'} & sys.modules.keys()\n"
        "    assert not imported, (command, imported)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, capture_output=True)


def test_the_version_also_as_a_module() -> None:
    command = [sys.executable, "-m", "torchtune_adaptive", "--version"]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout == f"tune-adaptive {__version__}\n"


def test_who_has_read_enough_gets_no_traceback() -> None:
    """As ``tune-adaptive ls | head -1`` does, once head has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchtune_adaptive", "ls"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=300, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_help_of_plan_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _run(["tune-adaptive", "plan", "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    commands = [
        line for line in examples.splitlines() if line.startswith("    tune-adaptive plan ")
    ]
    assert len(commands) >= 3


@pytest.mark.parametrize("command", ["find", "plan", "cache", "run", "cat", "cp", "validate"])
def test_a_command_without_arguments_prints_its_own_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(["tune-adaptive", command])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith(f"usage: tune-adaptive {command}")
    assert "tune run" not in said.err and "tune ls" not in said.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(["tune-adaptive", "--help"])
    assert not ended.value.code
    said = capsys.readouterr().out
    for command in ("find", "plan", "cache", "run", "ls", "cat", "cp", "validate", "download"):
        assert f"\n    {command} " in said


def test_the_registry_is_torchtunes_own() -> None:
    from torchtune._recipe_registry import get_all_recipes

    assert torchtune_recipes() is get_all_recipes()


def test_the_cache_is_shown_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = user_cache()
    assert base is not None
    for kind in ("traces", "tiny_1"):
        (base / kind).mkdir(parents=True)
        (base / kind / "some.json").write_text(2048 * " ")
    (base / "traces" / "array.npy").write_text(3072 * " ")
    _run(["tune-adaptive", "cache", "show"])
    assert ["traces", "2", "5", "KiB"] in map(str.split, capsys.readouterr().out.splitlines())
    _run(["tune-adaptive", "cache", "clear"])
    assert "Removed" in capsys.readouterr().out
    assert not any(cached_files(base).values())
    assert (base / "tiny_1" / "some.json").exists()  # no value of an earlier run
