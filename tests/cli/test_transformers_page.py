"""The page of a trainer's step: what it shows is what ``plan`` says, whatever is chosen on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hugging_face import LLAMA_1B, about, written
from tests.helpers.pages import plan_of, used
from tests.helpers.planning import asked
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.cli import transformers_page
from torchtune_adaptive.cli.plan_options import NO_ANSWER, plan_command
from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.library import Plan, TransformersStep
from torchtune_adaptive.library.planning import ExpertsPlan, RoutedPlan
from torchtune_adaptive.planner import gpus, planned_gpu
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.step_table import OnDevice, StepTable

TINY = about("Llama", 2000, 2, 4, 2, 64, 128, 4096, tie_word_embeddings=False)
SFT = ("per_device_train_batch_size=48", "gradient_checkpointing=true", "max_length=600")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_a_page_shows_what_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exhaustive: bool, shard: int
) -> None:
    """Of one GPU, so that few questions are asked; each of them, or one."""
    page = tmp_path / "a page.html"
    line = ["--hf", str(written(tmp_path, TINY)), "--nodes", "1x1", "--gpu", "rtx3070-8gb", *SFT]
    with without_torchvision():
        assert plan_command(asked([*line, "--html", str(page)])) == 0
        assert f"Page: {page}\n" in capsys.readouterr().err
        moves = 'slide(3); pick("length", 0); pick("checkpointing", 1); slide(the("rows").max)'
        noted = used(page, moves)
        assert len({one["command"] for one in noted}) == 5
        for one in noted[1:] if exhaustive else [noted[1 + shard % 4]]:
            said = plan_of(one, capsys)
            assert one["verdict"] == said["verdict"]
            assert one["summary"] == [said["peak"], said["usable_bytes"]]
            assert said["parts"].items() <= one["parts"].items()
            if one["verdict"] == "FITS":
                assert one["speed"][0] == pytest.approx(said["tokens_per_second_per_gpu"], rel=1e-6)
    assert "gradient_checkpointing=false" in noted[3]["command"]
    assert {one["verdict"] for one in noted} >= {"FITS", "DOES NOT FIT"}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A step that is planned and has tables without a trace; what the futures do can be changed."""
    answers: dict[str, Any] = {"experts": None, "finished": lambda step: True, "fails_on": 2}

    @contextmanager
    def processes(_: str) -> Iterator[Callable[..., Future[StepTable]]]:
        def call(table: Any, *arguments: Any) -> Future[StepTable]:
            future: Future[StepTable] = Future()
            if table.__self__.ranks == answers["fails_on"]:
                future.set_exception(NoPrediction("it cannot be traced"))
            elif answers["finished"](table.__self__):
                future.set_result(table(*arguments))
            return future

        yield call

    def table(step: TransformersStep, names: list[str], own: int, *_: Any) -> StepTable:
        sizes = (1, 8, 64)
        peaks = [Peak(n, 1, n, n, n << 30, {"gradients": n}, "", "") for n in sizes]
        return StepTable(sizes, [OnDevice(devices[gpu], 5, peaks, [None] * 3) for gpu in names])

    devices = {name: planned_gpu(kind, 1, 0.05)[0] for name, kind in gpus.GPUS.items()}
    monkeypatch.setattr(transformers_page, "processes", processes)
    monkeypatch.setattr(TransformersStep, "table", table)
    monkeypatch.setattr(
        TransformersStep,
        "remembered",
        lambda step, **_: Plan(5, 8, 8 << 30, {}, 70 << 30, (), experts=answers["experts"]),
    )
    return answers


def facts_of(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        re.search(r'id="facts">(.*?)</script>', page.read_text())[1]  # type: ignore[index]
    )
    return found


@pytest.mark.usefixtures("traced")
def test_what_is_typed_for_a_choice(tmp_path: Path) -> None:
    folder, page = written(tmp_path, LLAMA_1B), tmp_path / "p.html"
    line = [
        "--hf",
        str(folder),
        "--trainer",
        "SFTTrainer",
        "--method",
        "lora",
        "--gpu",
        "a100-80gb",
    ]
    words = ["r=16", "per_device_train_batch_size=8", "--seq-len", "512", "--html", str(page)]
    assert plan_command(asked([*line, *words])) == 0
    facts = facts_of(page)
    assert facts["command"] == (
        f"tune-adaptive plan --hf {folder} --trainer SFTTrainer --method lora r=16"
    )
    assert facts["rows_key"] == "per_device_train_batch_size" and len(facts["devices"]) == 8
    asked_for = facts["devices"][facts["asked"]["device"]]
    assert asked_for == {"name": "a100-80gb", "words": "--gpu a100-80gb"}
    choices = [(one["length"], one["ranks"], one["overrides"]) for one in facts["choices"]]
    assert choices == [
        (512, 1, ""),
        (512, 1, "gradient_checkpointing=false"),
        *((length, 1, "") for length in (256, 1024)),
        *((512, ranks, "") for ranks in (4, 8)),
    ]
    assert facts["missing"] == ["2 GPUs: it cannot be traced"]


@pytest.mark.parametrize("waits", [0, 1])
def test_an_interrupted_page_has_what_is_known_or_there_is_none(
    waits: int, tmp_path: Path, traced: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Progress(transformers_page.TraceProgress):
        left = waits

        def wait(self, *futures: Future[Any]) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(transformers_page, "TraceProgress", Progress)
    traced["finished"] = lambda step: waits and step.ranks != 4
    folder, page = written(tmp_path, LLAMA_1B), tmp_path / "p.html"
    line = ["--hf", str(folder), "--trainer", "Trainer", "--html", str(page)]
    assert plan_command(asked([*line, "per_device_train_batch_size=8"])) == 0
    assert page.exists() == bool(waits)
    if waits:
        assert facts_of(page)["missing"] == ["2 GPUs: it cannot be traced", "4 GPUs: not finished"]


def test_there_is_none_where_memory_depends_on_routing(
    tmp_path: Path, traced: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    traced["experts"] = ExpertsPlan(RoutedPlan(1, 2), RoutedPlan(3, 1))
    folder, page = written(tmp_path, LLAMA_1B), tmp_path / "p.html"
    line = ["--hf", str(folder), "--trainer", "Trainer", "--html", str(page)]
    assert plan_command(asked(line)) == NO_ANSWER
    assert "where routers send tokens" in capsys.readouterr().err and not page.exists()
