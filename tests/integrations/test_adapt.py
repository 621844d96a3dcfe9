"""The command that runs a script with adaptive trainers, where it needs no trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def adapt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: it changes transformers."""
    return subprocess.run(
        [sys.executable, "-m", "torchtune_adaptive.adapt", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope.py"], "nope.py: there is no such script. A module is run by -m nope.py"),
        (["--headroom", "2", "script.py"], "headroom: 2"),
        (["--search", "random", "script.py"], "search: 'random'"),
        ([], "which script?"),
        (["--grow", "3", "script.py"], "unrecognized arguments: --grow"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = adapt(tmp_path, *arguments)
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr
    assert "ran" not in done.stdout


def test_a_script_without_a_trainer_runs_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv, __name__)")
    done = adapt(tmp_path, "script.py", "-m", "--headroom", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['script.py', '-m', '--headroom', '2'] __main__\n"
    assert "script.py has made no trainer of transformers or TRL" in done.stderr


def test_the_scripts_own_end_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    assert adapt(tmp_path, "script.py").returncode == 7


def test_a_child_that_trains_is_told_of_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import sys; print('trains', file=sys.stderr)")
    (tmp_path / "script.py").write_text(
        "import subprocess, sys; subprocess.run([sys.executable, 'child.py', '--steps', '3'])"
    )
    said = adapt(tmp_path, "script.py").stderr
    line = (
        "script.py starts child.py, whose trainers are not adaptive. Run "
        "python -m torchtune_adaptive.adapt child.py ... instead."
    )
    assert line in said and said.index(line) < said.index("trains\n")


def test_what_a_trainer_cannot_keep_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from torch import nn\n"
        "from transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments('out', auto_find_batch_size=True, report_to='none', use_cpu=True)\n"
        "Trainer(nn.Linear(2, 2), args)\n"
    )
    done = adapt(tmp_path, "script.py")
    assert done.returncode and "Traceback" not in done.stderr
    assert "python -m torchtune_adaptive.adapt: auto_find_batch_size: True is not" in done.stderr
