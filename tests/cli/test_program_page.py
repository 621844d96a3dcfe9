"""The page of a program: what it shows is what ``plan`` says, whatever is chosen on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hugging_face import LLAMA_1B
from tests.helpers.hugging_face import written as written_model
from tests.helpers.pages import plan_of, used
from tests.helpers.planning import asked
from tests.helpers.programs import written
from torchtune_adaptive.cli import program_page
from torchtune_adaptive.cli.plan_options import NO_ANSWER, plan_command
from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.library import transformers_step
from torchtune_adaptive.planner import Answer, gpus, programs
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.programs.request import About, OnGpus, Program, ProgramPlan, Seen
from torchtune_adaptive.planner.step_table import OnDevice, StepTable

SIZES = (1, 8, 64)


@pytest.mark.runs
@pytest.mark.alternating
def test_a_page_shows_what_plan_says(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    exhaustive: bool,
    shard: int,
) -> None:
    """Of one GPU, so that few questions are asked; each of them, or one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "a page.html"
    line = [str(written(tmp_path)), "--nodes", "1x1", "--gpu", "rtx3070-8gb", "--rows", "48"]
    assert plan_command(asked([*line, "--html", str(page)])) == 0
    assert f"Page: {page}\n" in capsys.readouterr().err
    noted = used(page, 'slide(3); pick("length", 0); slide(the("rows").max)')
    assert len({one["command"] for one in noted}) == 4
    for one in noted[1:] if exhaustive else [noted[1 + shard % 3]]:
        said = plan_of(one, capsys)
        assert one["verdict"] == said["verdict"]
        assert one["summary"] == [said["peak"]["reserved"], said["device"]["usable_bytes"]]
        assert said["peak"]["parts"].items() <= one["parts"].items()
        if one["verdict"] == "FITS":
            assert one["speed"][0] == pytest.approx(said["tokens_per_second_per_gpu"], rel=1e-6)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A program that has a plan and tables without a run; what the futures do can be changed."""
    about = About(Seen(8, 512, 8), notes=(programs.CHECKPOINTED,))
    answers: dict[str, Any] = {"about": about, "finished": lambda ranks: True, "fails_on": 2}

    @contextmanager
    def processes(_: str) -> Iterator[Callable[..., Any]]:
        yield lambda: None

    def tabulate(_: Any, program: Program, devices: OnGpus, rows: Any) -> Future[Any]:
        future: Future[Any] = Future()
        ranks = program.ranks or 1
        if ranks == answers["fails_on"]:
            future.set_exception(NoPrediction("it cannot be run"))
        elif answers["finished"](ranks):
            peaks = [Peak(n, 1, n, n, n << 30, {"gradients": n}, "", "") for n in SIZES]
            found = [OnDevice(one, 5, peaks, [None] * 3) for one, _ in devices(ranks)]
            future.set_result((StepTable(SIZES, found), None))
        return future

    def plan(program: Program, devices: OnGpus) -> ProgramPlan:
        peak = Peak(8, 1, 8, 8, 8 << 30, {}, "", "")
        known = [Answer(one, peak, 5, None, "FITS") for one, _ in devices(program.ranks or 1)]
        return ProgramPlan(known, program.ranks or 1, 1, answers["about"])

    monkeypatch.setattr(program_page, "processes", processes)
    monkeypatch.setattr(programs, "tabulate", tabulate)
    monkeypatch.setattr(programs, "remembered_plan", plan)
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: name)
    return answers


def facts_of(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        re.search(r'id="facts">(.*?)</script>', page.read_text())[1]  # type: ignore[index]
    )
    return found


@pytest.mark.usefixtures("run")
def test_what_is_typed_for_a_choice_of_a_trainer(tmp_path: Path) -> None:
    folder, page = written_model(tmp_path, LLAMA_1B), tmp_path / "p.html"
    line = ["--hf", str(folder), "--trainer", "SFTTrainer", "--method", "lora"]
    words = ["r=16", "per_device_train_batch_size=8", "--seq-len", "512", "--html", str(page)]
    assert plan_command(asked([*line, "--gpu", "a100-80gb", *words])) == 0
    facts = facts_of(page)
    assert facts["command"] == (
        f"tune-adaptive plan --hf {folder} --trainer SFTTrainer --method lora r=16"
    )
    assert facts["rows_key"] == "per_device_train_batch_size"
    alike = {gpus.gpu(one["name"]).capability for one in facts["devices"]}
    assert alike == {gpus.gpu("a100-80gb").capability}, "others may take other branches"
    assert facts["devices"][0] == {"name": "a100-80gb", "words": "--gpu a100-80gb"}
    choices = [(one["length"], one["ranks"], one["overrides"]) for one in facts["choices"]]
    assert choices == [
        (512, 1, ""),
        (512, 1, "gradient_checkpointing=false"),
        *((length, 1, "") for length in (256, 1024)),
        *((512, ranks, "") for ranks in (4, 8)),
    ]
    assert facts["missing"] == ["2 GPUs: it cannot be run"]


@pytest.mark.usefixtures("run")
def test_what_is_typed_for_a_choice_of_a_script(tmp_path: Path) -> None:
    path, page = str(written(tmp_path)), tmp_path / "p.html"
    assert plan_command(asked([path, "--lr", "1", "--html", str(page), "--gpu", "h100"])) == 0
    facts = facts_of(page)
    assert facts["command"] == f"tune-adaptive plan {path} --lr 1"
    assert facts["rows_key"] == "--rows"
    choices = [(one["length"], one["ranks"], one["overrides"]) for one in facts["choices"]]
    assert choices == [
        *((length, 1, "") for length in (512, 256, 1024)),
        *((512, ranks, "") for ranks in (4, 8)),
    ]


@pytest.mark.parametrize("waits", [0, 1])
def test_an_interrupted_page_has_what_is_known_or_there_is_none(
    waits: int, tmp_path: Path, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Progress(program_page.TraceProgress):
        left = waits

        def wait(self, *futures: Future[Any]) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(program_page, "TraceProgress", Progress)
    run["finished"] = lambda ranks: waits and ranks != 4
    path, page = str(written(tmp_path)), tmp_path / "p.html"
    assert plan_command(asked([path, "--html", str(page)])) == 0
    assert page.exists() == bool(waits)
    if waits:
        assert facts_of(page)["missing"] == ["2 GPUs: it cannot be run", "4 GPUs: not finished"]


def test_there_is_none_without_a_loader(
    tmp_path: Path, run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run["about"] = run["about"]._replace(seen=None)
    path, page = str(written(tmp_path)), tmp_path / "p.html"
    assert plan_command(asked([path, "--html", str(page)])) == NO_ANSWER
    assert "no DataLoader makes the batches" in capsys.readouterr().err and not page.exists()


def test_what_follows_from_one_gpu_has_no_others(tmp_path: Path, run: dict[str, Any]) -> None:
    """Memory that a program takes by the number of its multiprocessors, for example."""
    run["about"] = run["about"]._replace(card="h100-80gb")
    path, page = str(written(tmp_path)), tmp_path / "p.html"
    assert plan_command(asked([path, "--html", str(page), "--gpu", "h100"])) == 0
    assert [one["name"] for one in facts_of(page)["devices"]] == ["h100-80gb"]


def test_there_is_none_where_rows_go_together(
    tmp_path: Path, run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run["about"] = run["about"]._replace(seen=Seen(8, 512, 8, unit=4))
    path, page = str(written(tmp_path)), tmp_path / "p.html"
    assert plan_command(asked([path, "--html", str(page)])) == NO_ANSWER
    assert "needs rows in multiples of 4" in capsys.readouterr().err and not page.exists()
