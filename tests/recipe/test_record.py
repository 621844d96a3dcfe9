"""The report of a run, as a browser shows it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.helpers.browser import opened
from tests.helpers.configs import config
from tests.helpers.killing import Fault, in_child
from tests.helpers.reports import report
from torchtune_adaptive.common.document import Paragraph, Table, as_page
from torchtune_adaptive.common.errors import CheckpointError, RankLost
from torchtune_adaptive.common.folder_lock import FolderLock
from torchtune_adaptive.core.rows.micro_batches import ByTokens
from torchtune_adaptive.core.sizes.packing import Budget
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.core.step.knobs import MICRO_BATCH
from torchtune_adaptive.recipe.origin import Origin
from torchtune_adaptive.recipe.record import CONFIG_NAME, REPORT_NAME, Record
from torchtune_adaptive.recipe.search.budget_report import BudgetReport, Throughput
from torchtune_adaptive.recipe.search.fastest_report import FastestReport
from torchtune_adaptive.recipe.search.in_tokens import LengthTrial
from torchtune_adaptive.recipe.search.timings import Timing
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.keys import FOUND
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.settings.knob_table import choices, configured_choice
from torchtune_adaptive.recipe.train.events import EVENTS_NAME, Events
from torchtune_adaptive.recipe.train.history import Course, History, MarkKind, Point
from torchtune_adaptive.recipe.train.metrics import Summary, Trained


class Logger:
    """A metric logger that keeps what it is given, and like W&B takes a config only once."""

    def __init__(self) -> None:
        self.config: Any = None
        self.logged: dict[str, float] = {}

    def log_config(self, config: Any) -> None:
        assert self.config is None
        self.config = config
        with suppress(OSError):  # as torchtune's do
            OmegaConf.save(config, Path(config.output_dir) / CONFIG_NAME)

    def log_dict(self, payload: dict[str, float], step: int) -> None:
        self.logged.update(payload)


def record(folder: Path) -> Record:
    cfg = OmegaConf.create(
        {
            "output_dir": str(folder),
            "batch_size": 2,
            "gradient_accumulation_steps": 4,
            "model": {"_component_": "torchtune.models.llama2.llama2", "name": "<b>&amp;"},
        }
    )
    origin = Origin("tune run mine --config my/full", "my/full", cfg.copy())
    return Record(cfg, "full", 2, Logger(), origin)


def trained(steps: int = 20) -> Trained:
    history, course = History(), Course(seconds=3725.0)
    for step in range(1, steps + 1):
        values, peak = {"loss": 3 - step / 20}, (20 + step % 5) << 30
        history.add(Point(step, 32 * step, 32, 4, 1e-5 * step, values, {}, peak, 80 << 30))
        course.add(values, {})
    split = Split(4, 4, 2)
    summary = Summary(course, 5321.4, 21 << 30, 80 << 30, run=course)
    return Trained(split, steps, 3, may_change=True, history=history, summary=summary)


def budget_report(used: bool = True) -> BudgetReport:
    budget = Budget(((128, 40), (256, 20), (512, 8)))
    trials = [LengthTrial(512, trial) for trial in report().result.trials]
    speeds = Throughput(0.4, 1666.0), Throughput(0.1, 1427.0)
    by_tokens = ByTokens(budget, np.array([1]), 0, -100)
    return BudgetReport(by_tokens, trials, *speeds, used, split=Split(16, 1, 2))


def test_a_browser_shows_the_whole_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = record(tmp_path)
    one.made_of = {"device": "H100", "model": "my.llama: 8 parameters", "metrics": "log_1.txt"}
    one.decided(Split(4, 4, 2), 0, report())
    Events(tmp_path).changed(7, "out of memory in <backward> on rank 1", micro_batch=(4, 2))
    one.close(None, trained())
    shown = opened(tmp_path / REPORT_NAME)
    assert f"<title>Run {tmp_path.name} (full)</title>" in shown
    headings = re.findall(r"<h2>(.*?)</h2>", shown)
    assert headings == [
        *("Summary", "Command, model and data", "Search", "Training and memory", "Events"),
        "Config",
    ]
    for text in (
        *("<td>finished</td>", "<td>1 h 2 min</td>", "<td>5,321 tokens/s over 2 ranks</td>"),
        *("batch_size 2 -&gt; 4 (8 rows do not fit", "<td>out of memory in backward</td>"),
        *("Search on H100: batch_size 2 -&gt; 4", "peak memory, tightest rank (GiB)"),
        *("loss (nats/token)", "batch (rows)", "learning rate", "peak memory, rank 0 (GiB)"),
        *("limit: 80 GiB", "samples trained on", ">step<"),
        *("<td>out of memory in &lt;backward&gt; on rank 1</td>", "<td>micro batch 4 -&gt; 2</td>"),
        *("<td>tune run mine --config my/full</td>", "<td>my.llama: 8 parameters</td>"),
        *("<td>H100</td>", "<td>log_1.txt</td>", "torchtune-adaptive ", "<th>ranks</th><td>2</td>"),
        *("What is not as in my/full", "<td>batch_size</td><td>2</td><td>4</td>"),
        *("batch_size: 4", "&lt;b&gt;&amp;amp;"),
    ):
        assert text in shown, text
    assert shown.count("<svg") == 5, "the figures are in the page"
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", shown)
    assert all(link.startswith(("#", "data:")) for link in links), "nothing comes from elsewhere"
    assert "<script" not in shown


class Balanced(HTMLParser):
    """Whether every element that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("error", "state", "shown"),
    [
        (RankLost("lost rank 1 <silent>"), "failed", "RankLost: lost rank 1 &lt;silent&gt;"),
        (KeyboardInterrupt("asked to"), "stopped", "KeyboardInterrupt: asked to"),
        (ZeroDivisionError("oh"), "failed", "ZeroDivisionError: oh"),
    ],
)
def test_a_run_that_ends_early_says_why(
    error: BaseException, state: str, shown: str, tmp_path: Path
) -> None:
    one = record(tmp_path)
    one.close(error)
    html = (tmp_path / REPORT_NAME).read_text()
    assert f"<td>{state}</td>" in html and shown in html
    assert "No step has been trained." in html
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert one.logger.config.batch_size == 2, "the config is logged, as it was"


def test_the_page_is_read_on_any_screen(tmp_path: Path) -> None:
    one = record(tmp_path)
    one.close(None, trained())
    html = (tmp_path / REPORT_NAME).read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "@media (prefers-color-scheme: dark)" in html
    style = html[html.index("<style>") : html.index("</style>")]
    assert re.search(r"figure \{[^}]*background: #fff", style), "its text is dark"
    assert (
        re.search(r"figure svg \{[^}]*width: 100%", style) and ".gallery { display: grid" in style
    )
    assert not re.search(r"body \{[^}]*max-width", style), "all of the width is used"
    assert html.count("<figure>") == html.count("<svg") > 0
    parser = Balanced()
    parser.feed(re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))
    assert not parser.open


def test_a_part_of_a_run_is_told_from_the_whole(tmp_path: Path) -> None:
    one, whole = record(tmp_path), trained(60)
    assert whole.summary is not None and whole.summary.run is not None and whole.history is not None
    part = Course(20, 1800.0, [{"loss": 1.0}] * 5, [{"loss": 0.5}] * 5)
    one.resumed("epoch_0", 40, {})
    whole.history.mark(MarkKind.RESUMED, 40 * 32, "resumed at step 40")
    one.trained = replace(whole, summary=replace(whole.summary, part=part, begun_at=40))
    html = one.html()
    for text in (
        *("<td>epoch_0 at step 40</td>", "<th>steps</th><td>60</td>", "<td>1 h 2 min</td>"),
        *("<td>steps 41 to 60: 20 steps in 30 min 0 s; loss 1 -&gt; 0.5", ">resumed at step 40<"),
        *("<th>speed since it was resumed</th>", "<th>peak memory since it was resumed</th>"),
    ):
        assert text in html, text


def test_rollouts_on_record(tmp_path: Path) -> None:
    one, course, history = record(tmp_path), Course(seconds=80.0), History("sample")
    for step in range(1, 11):
        values = {"reward": step / 10, "response length": 16.0, "KL": 0.1, "loss": 0.01}
        seconds = {"generation": 6.0, "scoring": 1.0, "rewards": 0.0, "training": 1.0}
        course.add(values, seconds)
        history.add(Point(step, 32 * step, 32, 4, 1e-5, values, seconds, None, None))
    summary = Summary(course, 100.0, 0, None, run=course)
    one.trained = Trained(Split(4, 4, 2), 10, 0, False, history, summary)
    html = one.html()
    for text in (
        *("<th>reward</th><td>0.3 -&gt; 0.8 (mean", "<th>response length</th>", "<th>KL</th>"),
        "<td>generation 1 min 0 s (75%), scoring 10.0 s (12%), rewards 0.0 s (0%), training 10.0 s",
        *("reward (mean)", "response length (tokens)", "KL to the reference", "seconds by phase"),
        *("generation of a rollout", "training of a step"),
    ):
        assert text in html, text


def test_the_config_on_record_is_what_is_trained_with(tmp_path: Path) -> None:
    one = record(tmp_path)
    assert OmegaConf.load(one.save_config()).batch_size == 2
    given = one.cfg
    one.decided(Split(8, 1, 2), 0, report(split=Split(8, 1, 2)))
    logged = one.logger.config
    assert (logged.batch_size, logged.gradient_accumulation_steps) == (8, 1)
    assert logged[FOUND].largest_batch_size == 4
    assert given.batch_size == 2 and FOUND not in given, "the run still works with its own"
    assert one.logger.logged["search/batch_size"] == 8
    assert one.logger.logged["search/trials"] == 4
    assert all(isinstance(value, (int, float)) for value in one.logger.logged.values())


def test_the_config_on_record_has_what_the_checkpoint_kept(tmp_path: Path) -> None:
    one = record(tmp_path)
    given = {"lr": 1e-3, "betas": [0.8, 0.9], "fused": True}
    one.cfg.merge_with({"seed": 5, "optimizer": given})
    kept = {"seed": 1, "optimizer.lr": 3e-3, "optimizer.betas": "[0.9, 0.95]"}
    one.resumed("epoch_0", 40, {**kept, "optimizer.fused": None, "optimizer.eps": 1e-6})
    one.decided(Split(4, 4, 2), 40, None)
    written = OmegaConf.load(tmp_path / CONFIG_NAME)
    assert written.seed == 1  # type: ignore[union-attr]
    assert written.optimizer == {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6}  # type: ignore[union-attr]
    assert "<td>epoch_0 at step 40</td>" in one.html()


def test_a_run_that_does_not_begin_leaves_the_record_of_the_one_before(tmp_path: Path) -> None:
    """As where that one is finished, and is resumed."""
    one = record(tmp_path)
    one.decided(Split(8, 1, 2), 0, report())
    one.close(None)
    kept = [(tmp_path / name).read_text() for name in (CONFIG_NAME, REPORT_NAME)]
    again = record(tmp_path)
    again.save_config()
    again.close(CheckpointError("the run is finished"))
    assert [(tmp_path / name).read_text() for name in (CONFIG_NAME, REPORT_NAME)] == kept


@pytest.mark.parametrize("used", [True, False])
def test_a_budget_on_record(used: bool, tmp_path: Path) -> None:
    one = record(tmp_path)
    found = budget_report(used)
    one.decided(found.split, 0, found)
    assert one.logger.logged["search/token_budget_used"] is int(used)
    assert one.logger.logged["search/tokens_per_second_per_gpu_with_budget"] == 1427
    block = one.cfg.get("adaptive_batching") or {}
    assert block.get("token_budget", "as it was") == ("as it was" if used else False)
    assert ("The token budget is not used, because it is slower" in one.html()) is not used
    assert "Token budget" in one.html()


def test_a_config_with_what_was_chosen_can_be_run_again(tmp_path: Path) -> None:
    asked = {"use_fastest_configuration": True, "adaptive_batching.search_only": True}
    fixed = {"use_maximum_batch_size": False, "output_dir": str(tmp_path), "batch_size": 4}
    one = record(tmp_path)
    one.cfg = config(**fixed, **asked)
    fastest = Asked.of(one.cfg)
    own, *_, chosen = choices(fastest, 1, "rounding", switches_only=True)
    (tried,) = report().result.trials[:1]
    found = FastestReport(
        *(fastest, 1, own, chosen),
        *([Timing(chosen, 0.25, [0.5, 1.5, 1.0])], {chosen: tried}, 100, 103),
        *("the longest row", "H100", 0.05, 12.34),
        split=Split(chosen[MICRO_BATCH], 4 // chosen[MICRO_BATCH], 1),
    )
    one.decided(found.split, 0, found)
    logged = one.logger.config
    assert configured_choice(Asked.of(logged), 1) == chosen != own
    settings = check(logged, KINDS["full"]).settings
    assert not settings.use_fastest_configuration and not settings.search_only
    assert logged[FOUND].tokens_per_second_per_gpu == 100 and logged[FOUND].trials == 1
    cells = ("100", "3", "1.00 x", "21 of 76 GiB", "chosen")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in one.html()
    assert "To use this configuration again" in one.html()
    assert f"<li>{found.overrides()}</li>" in one.html()


def test_without_matplotlib_the_report_has_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtune_adaptive.common.plots.new_figure", lambda *_: None)
    monkeypatch.setattr("torchtune_adaptive.common.document.find_spec", lambda _: None)
    one = record(tmp_path)
    one.decided(Split(4, 4, 2), 0, report())
    one.trained = trained()
    html = one.html()
    assert html.count("matplotlib is not installed") == 2 and "<td>out of memory" in html


def test_what_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    for name in (REPORT_NAME, CONFIG_NAME, "training.png"):
        (tmp_path / name).mkdir()
    one = record(tmp_path)
    one.save_config()
    one.close(None, trained())
    for what in ("The config", "The report of the run", "The plot of the run"):
        assert f"{what} was not written" in caplog.text


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    Events(tmp_path).changed(7, "out of memory", micro_batch=(4, 2))
    with (tmp_path / EVENTS_NAME).open("a") as file:
        file.write('{"step": 8, "rea')
    html = record(tmp_path).html()
    assert "<td>7</td>" in html and "<td>8</td>" not in html


def test_a_report_that_cannot_be_made_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    one = record(tmp_path)
    one.trained = SimpleNamespace()  # type: ignore[assignment]
    assert one.write() is None
    assert "could not be made: AttributeError" in caplog.text


def test_text_is_escaped() -> None:
    html = as_page("<a>", {"<u>": [Paragraph(["<i>"]), Table("", ("<th>",), [("&",)])]})
    assert not re.search("<(a|u|i)>", html) and "&lt;i&gt;" in html and "<td>&amp;</td>" in html


def test_what_is_on_record_never_ends_a_run(tmp_path: Path) -> None:
    """Nor does the lock of the folder, whichever operation on files fails, with all that follow."""

    def write_and_fail() -> None:
        fault = Fault()
        for number in count(1):
            out = tmp_path / str(number)
            out.mkdir()
            kept = record(out)
            fault.arm(number, stays=True)
            lock = FolderLock(out)
            kept.save_config()
            Events(out).noticed(1, "nothing")
            kept.close(None)
            lock.release()
            operations = fault.seen
            fault.arm(0)
            if operations < number:
                assert number > 4 and (out / REPORT_NAME).exists()
                return

    assert in_child(write_and_fail) == 0
