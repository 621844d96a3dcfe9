"""What is remembered of programs: the same question takes no run, as long as what was read is as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import H100, ROWS, on_part_of_h100, written
from torchtune_adaptive.planner.programs import Program, ProgramPlan, plan_program, process

pytestmark = [pytest.mark.runs]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The programs that are run."""
    found: list[str] = []
    call = process.call_alone

    def counted(work: Callable[..., Any], program: Program, *others: Any, timeout: float) -> Any:
        found.append(program.name)
        return call(work, program, *others, timeout=timeout)

    monkeypatch.setattr(process, "call_alone", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def planned(path: Path, *words: str, **others: Any) -> ProgramPlan:
    return plan_program(Program((str(path), *words), H100, **others), on_part_of_h100, timeout=120)


DATA = """
import json
from pathlib import Path

scale = json.loads(Path("data.json").read_text())["scale"]
if Path("other.json").exists():
    model.append(nn.Linear(2, 2).to(device))
"""


def test_it_is_run_again_once_something_that_it_read_is_different(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"scale": 1}))
    path = written(tmp_path, before=DATA)
    first = planned(path)
    assert planned(path).answers == first.answers and len(runs) == 1
    data.write_text(json.dumps({"scale": 1.5}))
    assert planned(path).answers == first.answers and len(runs) == 2, "data are different"
    planned(path, "--lr", "1")
    assert len(runs) == 3, "arguments are different"
    planned(path, cache=False)
    assert len(runs) == 4, "nothing is to be remembered"
    monkeypatch.setenv("SCALE", "2")
    planned(path)
    assert len(runs) == 5, "the environment is different"


def test_other_rows_follow_from_what_is_remembered(tmp_path: Path, runs: list[str]) -> None:
    path = written(tmp_path)
    planned(path, ceiling=64)
    found = planned(path, rows=64 + ROWS, ceiling=64)
    assert len(runs) == 1 and found.answers[0].peak.rows == 64 + ROWS
    anew = planned(path, rows=64 + ROWS, ceiling=64, cache=False)
    ours, other = found.answers[0].peak, anew.answers[0].peak
    assert ours.allocated == other.allocated
    assert ours.reserved == pytest.approx(other.reserved, rel=0.02)  # its first step had fewer rows


REMEMBERED = """
import sys
from torchtune_adaptive.planner import gpus, planned_gpu
from torchtune_adaptive.planner.programs import Program, remembered_plan

h100 = gpus.gpu("h100")
devices = lambda ranks: [(planned_gpu(h100, ranks, 0.05)[0], None)]
assert remembered_plan(Program((sys.argv[1],), h100, ceiling=64), devices) is not None
assert "torch" not in sys.modules
"""


def test_an_answer_that_is_remembered_takes_no_torch(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    path = written(tmp_path)
    planned(path, ceiling=64)
    subprocess.run([sys.executable, "-c", REMEMBERED, str(path)], check=True)


def test_what_is_kept_has_no_secrets(tmp_path: Path, runs: list[str]) -> None:
    planned(written(tmp_path), "--token", "hf_secret")
    files = [*(tmp_path / "cache").rglob("*.json")]
    assert files and not any("hf_secret" in path.read_text() for path in files)
