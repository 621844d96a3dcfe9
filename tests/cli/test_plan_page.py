"""The page of a plan: what it shows is what ``plan`` says, whatever is chosen on it."""

from __future__ import annotations

import json
import re
import runpy
from argparse import Namespace
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import plan_of, used
from tests.helpers.planning import asked
from torchtune_adaptive.cli.page_questions import PageTables
from torchtune_adaptive.cli.plan_options import NO_ANSWER, plan_command
from torchtune_adaptive.cli.plan_page import page_of, write_page
from torchtune_adaptive.common.errors import NoPrediction
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.step_table import OnDevice, StepTable
from torchtune_adaptive.recipe.plan.request import PlanRequest, plan_request
from torchtune_adaptive.recipe.plan.table import tabulated
from torchtune_adaptive.recipe.registry import load_config

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make" / "plan_page.py"))
ON_GPUS = (
    "device=cuda",
    "dtype=bf16",
    "adaptive_batching.memory_limit=null",
    "model.vocab_size=32000",
)


def assert_plan_says(shown: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Ask what the page says that it answers."""
    said = plan_of(shown, capsys)
    peak, speed = said["configured"], said["speed"]
    assert shown["verdict"] == said["verdict"]
    assert shown["summary"] == [peak["reserved"], said["device"]["usable_bytes"]]
    assert shown["largest"] == said["largest"]
    assert peak["parts"].items() <= shown["parts"].items()
    assert shown["parts"]["held by the allocator, in all"] == peak["reserved"]
    expected = [speed["tokens_per_second_per_gpu"], speed["seconds"], speed["mfu"]]
    fits = said["verdict"] != "DOES NOT FIT"
    assert shown["speed"] == (pytest.approx(expected, rel=1e-6) if fits else None)


def test_a_page_shows_what_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exhaustive: bool, shard: int
) -> None:
    """Of one GPU, so that few questions are asked; each of them, or one."""
    page = tmp_path / "a plan.html"
    line = ["tiny/full", "--nodes", "1x1", "--gpu", "rtx3070-8gb", "--seq-len", "500", *ON_GPUS]
    line += ["batch_size=48", f"adaptive_batching.cache={tmp_path / 'cache'}", "--no-what-ifs"]
    assert plan_command(asked([*line, "--html", str(page)])) == 0
    assert f"Page: {page}\n" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == [page.name]
    noted = used(
        page, 'slide(4); pick("length", 0); pick("checkpointing", 1); slide(the("rows").max)'
    )
    assert len({one["command"] for one in noted}) == 5
    for one in noted[1:] if exhaustive else [noted[1 + shard % 4]]:
        assert_plan_says(one, capsys)
    assert noted[2]["address"] == "#rows=6&gpu=rtx3070-8gb&length=250&ranks=1&checkpointing=off"
    notices = [one["notice"] for one in noted]
    assert notices[:3] == [""] * 3 and notices[3].startswith("Back to rows of 500 tokens:")
    assert {one["verdict"] for one in noted} >= {"FITS", "DOES NOT FIT"}


@pytest.mark.exhaustive
def test_every_control_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    line = ["tiny/full", "--nproc", "3", "--gpu", "rtx3070-8gb", "--seq-len", "500", *ON_GPUS]
    line += ["batch_size=48", f"adaptive_batching.cache={tmp_path / 'cache'}", "--no-what-ifs"]
    assert plan_command(asked([*line, "--compare", "h100", "--html", str(page)])) == 2
    capsys.readouterr()
    moves = 'slide(4); take(1); pick("length", 0); pick("ranks", 0); pick("ranks", 4)'
    noted = used(page, f'{moves}; pick("checkpointing", 1); slide(the("rows").max); take(0)')
    assert len({one["command"] for one in noted}) == 9
    for one in noted:
        assert_plan_says(one, capsys)
    assert {one["verdict"] for one in noted} == {"FITS", "UNCERTAIN", "DOES NOT FIT"}
    assert [bool(one["notice"]) for one in noted[:6]] == [False] * 4 + [True, False]


def test_the_checkpointing_that_is_chosen_is_typed() -> None:
    """In the page, without a browser."""
    plan = a_plan()
    tables = PageTables(plan, partial(plan_request, cfg=plan.cfg, ranks=8, name="8B"))
    found = list(tables._questions())
    typed = [one.overrides for one in found if one.overrides]
    assert [words.split()[0] for words in typed] == ["enable_activation_checkpointing=False"]
    others = {(1024, 8), (4096, 8), (2048, 1), (2048, 2), (2048, 4), (2048, 16)}
    assert {(one.plan.length, one.plan.ranks) for one in found} == {(2048, 8), *others}


def a_plan(**asked_for: Any) -> PlanRequest:
    return plan_request(load_config("llama3_1/8B_full"), 8, name="8B", **asked_for)


def a_table(plan: PlanRequest, devices: int, uneven: bool = False) -> StepTable:
    peaks = [
        Peak(
            rows, plan.length, rows << 30, rows << 30, rows << 31, {"gradients": rows << 30}, "", ""
        )
        for rows in (1, 2, 64)
    ]
    on_devices = [OnDevice(plan.device, 5, peaks, [None] * 3)] * devices
    return StepTable((1, 2, 64), on_devices, uneven, "")


def test_the_example_in_the_docs_looks_as_pages_do() -> None:
    assert EXAMPLE["PAGE"].read_text() == EXAMPLE["again"](), (
        "run: python docs/make/plan_page.py --again"
    )


@pytest.mark.exhaustive
def test_the_example_in_the_docs_is_what_a_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(asked([*EXAMPLE["WORDS"], "--no-what-ifs", "--json"]))
    said = json.loads(capsys.readouterr().out)
    facts = EXAMPLE["facts"]()
    at, device = facts["rows"].index(said["rows"]), facts["asked"]["device"]
    shown = facts["choices"][0]
    here = shown["devices"][device]
    assert facts["devices"][device]["name"] == said["device"]["name"]
    assert here["largest"] == said["largest"]
    reserved = shown["peaks"][here["peaks"]]["reserved"][at]
    assert said["configured"]["reserved"] == pytest.approx(reserved, rel=0.01)
    speed = said["tokens_per_second_per_gpu"]
    assert speed == pytest.approx(here["speeds"][at]["tokens"], rel=0.02)


class Progress:
    """Progress that the user interrupts when it waits for the second time."""

    def __init__(self, waits: int) -> None:
        self.waits = waits

    def expect_more(self, number: int) -> None: ...

    def wait(self, *futures: Future[Any]) -> None:
        self.waits -= 1
        if self.waits < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("waits", [0, 1])
def test_an_interrupted_plan_leaves_a_page_of_what_is_known_or_none(
    waits: int, tmp_path: Path
) -> None:
    plan = a_plan()
    given = {"html": tmp_path / "p.html", "words": ["8B"], "gpu": "h100"}
    arguments = Namespace(**given, hf=None, memory=None, compare=None)
    vars(arguments).update(dict.fromkeys(("nodes", "power", "links", "network", "machine")))
    tables = PageTables(plan, partial(plan_request, cfg=plan.cfg, ranks=8, name="8B"))
    questions: list[Any] = []
    unfinished: list[Future[StepTable]] = []

    def ask(work: object, query: Any, limits: Any, *_: object) -> Future[StepTable]:
        assert work is tabulated
        questions.append(query)
        future: Future[StepTable] = Future()
        if query.ranks == 16:
            future.set_exception(NoPrediction("it cannot be traced"))
        elif query.ranks != 4 and waits:
            future.set_result(a_table(plan, len(limits)))
        else:
            unfinished.append(future)
        return future

    with pytest.raises(KeyboardInterrupt):
        tables.ask(ask, Progress(waits))  # type: ignore[arg-type]
    for one in unfinished:  # the processes that work on them are killed
        one.set_exception(NoPrediction("a process that traced was killed"))
    write_page(arguments.html, tables.page(arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"][:waits]
    if waits:
        assert len(questions) == 8
        text = arguments.html.read_text()
        facts = json.loads(re.search(r'id="facts">(.*?)</script>', text)[1])  # type: ignore[index]
        assert {one["ranks"] for one in facts["choices"]} == {1, 2, 8}
        assert facts["missing"] == ["4 GPUs: not finished", "16 GPUs: it cannot be traced"]


def test_nothing_of_a_page_is_elsewhere_and_no_name_is_taken_for_html() -> None:
    page = page_of("<b>&</b>", {"command": "</script><script>alert(1)"}, "<i>")
    assert "<title>Does &lt;b&gt;&amp;&lt;/b&gt; fit?</title>" in page
    assert "</script><script>alert" not in page and "<i>" not in page.split("<script")[0]
    assert not re.search(r'(?:src|href)="(?!data:)|url\(|@import|https?://|fetch\(', page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["tiny/full", "--html", "no/folder/p.html"],
            "in a folder that does not exist (no/folder)",
        ),
        (["tiny/full", "--html", "."], "is a folder"),
        (["tiny/full", "--fastest", "--html", "p.html"], "--fastest is about many"),
        (["tiny/grpo", "--html", "p.html"], "a page shows steps alone"),
    ],
)
def test_there_is_a_reason_where_there_is_no_page(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan_command(asked(words)) == NO_ANSWER
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not Path("p.html").exists()
