"""What the user reads: checked as text, because text is what it is."""

from __future__ import annotations

import builtins
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import Alone
from tests.helpers.reports import GIB, TRIALS, report, trial
from torchtune_adaptive.core.search.strategies import SearchResult, Status
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.recipe.registry import find_config, with_overrides
from torchtune_adaptive.recipe.search.decide import announce
from torchtune_adaptive.recipe.search.fastest_report import FastestReport
from torchtune_adaptive.recipe.search.report import write
from torchtune_adaptive.recipe.search.timings import Timing
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import choices, configured_choice


def test_a_trial_is_one_line() -> None:
    assert TRIALS[0].line() == "micro-batch 1: fits, peak 21 of 76 GiB (rank 1), 1.2 s"
    line = TRIALS[2].line()
    assert line == "micro-batch 8: out of memory in backward, peak 74 of 76 GiB (rank 1), 1.2 s"


def test_the_deciding_rank_is_the_one_in_trouble_or_else_the_tightest() -> None:
    assert TRIALS[2].deciding_rank == 1  # failed, though rank 0 had less left
    assert TRIALS[0].deciding_rank == 1
    assert not TRIALS[2].fits and TRIALS[0].fits


def test_retries_do_not_fit() -> None:
    thrashing = trial(4, [GIB, GIB], retries=3)
    assert not thrashing.fits
    assert "3 allocation retries" in thrashing.line()


def test_the_report_gives_the_choice_and_its_reason() -> None:
    assert report().text().splitlines() == [
        "Searched with rows of 2048 tokens (max_seq_len of the tokenizer) on H100, 5% headroom; "
        "extrapolate, 12.3 s:",
        "batch_size 2 -> 4 (8 rows do not fit: out of memory in backward on rank 1)",
        "global batch 16 -> 32 rows (micro-batch 4 x accumulation 4 x 2 ranks)",
        "steps per epoch 80 -> 40; learning rate unchanged (2e-05); "
        "adaptive_batching.keep_global_batch=True keeps the global batch at 16",
    ]


@pytest.mark.parametrize(("rows", "warned"), [(639, True), (640, False)])
def test_few_steps_per_epoch_are_a_warning(rows: int, warned: bool) -> None:
    text = report(samples=2 * rows, split=Split(8, 4, 2)).text()
    assert ("Warning: only 19 optimizer steps per epoch." in text) is warned


def test_a_global_batch_that_stays_is_reported_as_unchanged() -> None:
    text = report(split=Split(4, 2, 2)).text()
    assert "gradient_accumulation_steps 4 -> 2" in text
    assert "global batch unchanged: 16 rows (micro-batch 4 x accumulation 2 x 2 ranks)" in text


def test_the_reason_is_the_searchs_own() -> None:
    def reason(status: Status, limit: str | None) -> str:
        result = SearchResult(2, status, TRIALS[:2])
        return report(result=result, limit=limit).reason()

    limit = "the data has 640 rows per rank, and an epoch needs a step"
    assert reason(Status.REMEMBERED, None) == Status.REMEMBERED.value
    assert reason(Status.REMEMBERED, limit) == f"{Status.REMEMBERED.value}: {limit}"
    assert reason(Status.CEILING, limit) == f"it is the largest size allowed: {limit}"


def test_overrides_can_be_pasted() -> None:
    assert report().overrides() == (
        "batch_size=4 gradient_accumulation_steps=4 use_maximum_batch_size=False"
    )


def test_the_json_has_every_trial_of_every_rank(tmp_path: Path) -> None:
    path, *_ = write(report(), tmp_path / "out")
    written = json.loads(path.read_text())
    assert written["batch_size"] == 4 and written["global_batch_size"] == 32
    assert written["before"]["global_batch_size"] == 16
    assert [trial["size"] for trial in written["trials"]] == [1, 2, 8, 4]
    assert [trial["fits"] for trial in written["trials"]] == [True, True, False, True]
    assert written["trials"][2]["reports"][1]["failed_in"] == "backward"
    assert written["trials"][0]["reports"][1]["peak_bytes"] == 21 * GIB


def test_the_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write(report(), tmp_path)
    assert [path.suffix for path in paths] == [".json", ".png"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["batch_size_search.json", "batch_size_search.png"])
def test_a_folder_in_the_way_of_the_report_is_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    (tmp_path / name).mkdir()
    cfg = OmegaConf.create({"output_dir": str(tmp_path)})
    announce(Asked.of(cfg, "full"), Alone(), report())  # type: ignore[arg-type]
    assert "The report of the search was not written" in caplog.text and name in caplog.text


def test_without_matplotlib_there_is_no_plot_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert [path.suffix for path in write(report(), tmp_path)] == [".json"]


@pytest.mark.parametrize(
    ("steps", "doubtful"), [([1.0, 1.0, 1.01, 1.0], False), ([0.8, 1.0, 1.2, 1.3], True)]
)
def test_a_timing_that_varies_more_than_it_decides_says_so(
    steps: list[float], doubtful: bool
) -> None:
    cfg = OmegaConf.load(find_config("tiny/full"))
    assert isinstance(cfg, DictConfig)
    asked = Asked.of(cfg)
    own, other, *_ = choices(asked, 2, "exact", switches_only=True)
    timed = [Timing(own, 1.0, [1.1] * 4), Timing(other, 0.9, steps)]
    found = FastestReport(
        *(asked, 2, own, other, timed, {}, 100, 103),
        *("the longest row", "H100", 0.05, 12.34),
        split=Split(2, 1, 2),
    )
    assert ("does not tell them apart" in found.text()) is doubtful


def test_pairs_are_called_pairs() -> None:
    said = report(sample="pair").text()
    assert "Searched with pairs of 2048 tokens" in said
    assert "batch_size 2 -> 4 (8 pairs do not fit: out of memory in backward on rank 1)" in said
    assert "global batch 16 -> 32 pairs (" in said and "rows" not in said


def test_the_fastest_that_looks_slower_is_explained() -> None:
    cfg = OmegaConf.load(find_config("tiny/full"))
    assert isinstance(cfg, DictConfig) and cfg.use_maximum_batch_size
    cfg.use_maximum_batch_size = False
    asked = Asked.of(cfg)
    own, *others = choices(asked, 2, "exact", switches_only=True)
    timed = [
        Timing(own, 1.0, [2.0] * 8),
        Timing(others[0], 0.8, [1.0] * 4 + [4.0] * 4),
        Timing(others[1], 0.9, [1.5] * 8),
        Timing(others[2], 0.9, [0.5] * 4),
        Timing(others[3], 0.7, [0.5] * 4),
        Timing(others[4], 0.7, [3.0] * 4),
        Timing(others[5], 0.7, [], failed=True),
    ]
    found = FastestReport(
        *(asked, 2, own, others[0], timed, {}, 100, 103),
        *("the longest row", "H100", 0.05, 12.34),
        split=Split(2, 1, 2),
    )
    then = "out after 4 steps, in which the chosen one had 50"
    assert [one["verdict"] for one in found.as_dict()["timed"]] == [
        "as fast within noise, but predicted slower",
        "chosen",
        "as fast within noise, but predicted slower",
        f"{then}: as fast within noise, but predicted slower",
        f"{then}: as fast within noise, but others were faster then",
        then,
        "ran out of memory when it was timed",
    ]
    said = found.text().splitlines()
    assert said[1] == (
        "  as configured: 25 tokens/s per rank in 8 steps, predicted 1.00 x; "
        "as fast within noise, but predicted slower"
    )
    assert said[2].startswith("* ") and "in 8 steps, predicted 1.25 x; chosen" in said[2]
    assert "global batch unchanged: 4 rows (micro-batch 2 x accumulation 1 x 2 ranks)" in said
    # The chosen one's steps take 1 s or 4 s; beside it, in 4 steps, another took half as long.
    assert said[-2].startswith(
        "Steps of one configuration vary by 120% (quartiles), and the closest two "
    )
    # Put behind the command of a config that searches, too.
    cfg.use_maximum_batch_size = True
    again = with_overrides(cfg, found.overrides().split())
    assert not again.use_maximum_batch_size and not again.use_fastest_configuration
    assert configured_choice(Asked.of(again), 2) == others[0]
