"""Whole runs under a token budget: the same steps as without, in less memory or less time."""

from __future__ import annotations

import json
import os
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.modules import TransformerDecoder

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_recipe_at, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    Records,
    assert_same_end,
    losses,
    named_checkpoint,
)
from torchtune_adaptive.common.cache import Cache
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.recipe.search import token_budget

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

PLAIN = {"batch_size": 16, "max_steps_per_epoch": 10, "clip_grad_norm": 1.0}
BUDGET = {
    **PLAIN,
    "adaptive_batching.token_budget": True,
    "adaptive_batching.memory_limit": "24MiB",
}


FASTER, SLOWER = (1000.0, 1500.0), (1000.0, 900.0)


def run(
    folder: Path,
    kind: str = "full",
    ranks: int = 2,
    speeds: tuple[float, float] | None = FASTER,
    draws: bool = False,
    **changes: Any,
) -> Records:
    """What a run logs. Its measurement, which is noisy here, finds ``speeds`` unless they are None."""
    cfg = tiny_config(kind, folder, **changes)
    path = f"recipes/adaptive_{kind}_finetune_distributed.py"
    records, *_ = run_ranks(run_measuring, ranks, speeds, path, cfg, draws, join=False)
    return records


def run_measuring(
    speeds: tuple[float, float] | None, path: str, cfg: Any, draws: bool = False
) -> Records:
    if speeds is not None:
        token_budget._speeds = lambda *_: speeds
    return run_recipe_at(path, cfg, draws)


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_steps_are_what_they_were(kind: str, tmp_path: Path) -> None:
    """The same rows in each step and the same gradient, to rounding; every micro-batch fits."""
    plain = run(tmp_path / "plain", kind, 1, **{**PLAIN, "max_steps_per_epoch": 5})
    short = {**BUDGET, "max_steps_per_epoch": 5}
    packed = run(tmp_path / "packed", kind, 1, draws=True, **short)
    for one, other in zip(plain, packed, strict=True):
        for key in ("lr", "samples_seen", "global_batch_size"):
            assert one[key] == other[key]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert packed[-1]["retried_steps"] == 0, "nothing ran out of memory"
    assert all(0 <= record["padding_share"] < 0.35 for record in packed)
    assert {record["gradient_accumulation_steps"] for record in packed} != {1}
    assert (tmp_path / "packed" / "token_budget.png").exists()
    said = json.loads((tmp_path / "packed" / "token_budget.json").read_text())
    assert said["without_budget"]["padding_share"] > 1.5 * said["with_budget"]["padding_share"]
    assert said["with_budget"]["tokens_per_second"] > 0
    assert [trial["fits"] for trial in said["trials"]].count(True) >= 2


def test_a_slower_budget_is_not_used_nor_after_a_resume(tmp_path: Path) -> None:
    changes = {**BUDGET, **ALL_KEPT, "epochs": 2, "max_steps_per_epoch": 2}
    changes["adaptive_batching.memory_limit"] = "80MiB"  # the batch as configured fits as well
    plain = run(tmp_path / "plain", ranks=1, **{**changes, "adaptive_batching.token_budget": False})
    whole = run(tmp_path / "whole", ranks=1, speeds=SLOWER, **changes)
    assert losses(plain) == losses(whole)
    said = json.loads((tmp_path / "whole" / "token_budget.json").read_text())
    assert said["used"] is False and said["with_budget"]["tokens_per_second"] == 900
    again = {**changes, **named_checkpoint("full")}
    resumed = run(tmp_path / "whole", ranks=1, speeds=FASTER, **again)
    assert losses(resumed) == losses(whole)[2:]
    assert all("padding_share" not in one for one in whole + resumed)


def test_a_slower_budget_is_used_where_the_batch_does_not_fit_without(tmp_path: Path) -> None:
    once = run(tmp_path, ranks=1, speeds=SLOWER, **{**BUDGET, "max_steps_per_epoch": 1})
    assert "padding_share" in once[0] and once[0]["retried_steps"] == 0
    said = json.loads((tmp_path / "token_budget.json").read_text())
    assert said["used"]
    longest = max(said["rows_by_length"], key=int)
    assert said["rows_by_length"][longest] < BUDGET["batch_size"]
    page = unescape((tmp_path / "report.html").read_text())
    assert "The token budget is used: without it, micro-batches of 16 rows would run out" in page


@pytest.mark.exhaustive
def test_all_ranks_measure_the_same(tmp_path: Path) -> None:
    """Or they would divide the first step differently, and wait for each other."""
    changes = {**BUDGET, "max_steps_per_epoch": 1}
    cfg = tiny_config("full", tmp_path, **changes)
    speeds = run_ranks(measured_by_a_slow_rank, 2, cfg, join=False)
    assert speeds[0] == speeds[1] and speeds[0][1] is not None


def measured_by_a_slow_rank(cfg: Any) -> tuple[float | None, float | None]:
    seen = []

    def speeds(run: Any, *rest: Any) -> tuple[float | None, float | None]:
        if run.ranks.rank == 1:
            restore = Snapshot.restore
            Snapshot.restore = lambda self: (time.sleep(0.05), restore(self))  # type: ignore[assignment]
        seen.append(measure(run, *rest))
        return seen[0]

    measure, token_budget._speeds = token_budget._speeds, speeds
    run_ours("full", cfg)
    return seen[0]


def searched(folder: Path) -> tuple[dict[str, int], int]:
    """The rows by length that the search of a run found, and the number of its trials."""
    said = json.loads((folder / "token_budget.json").read_text())
    return said["rows_by_length"], len(said["trials"])


def remembered(cache: Path) -> tuple[Path, dict[str, Any]]:
    """The only budget in a cache: its file and what is in it."""
    (path,) = (cache / "batch_sizes").iterdir()
    return path, json.loads(path.read_text())


def run_remembering(folder: Path, ranks: int = 1, **changes: Any) -> Records:
    cache = {"adaptive_batching.cache": str(folder.parent / "cache"), "max_steps_per_epoch": 1}
    return run(folder, ranks=ranks, **{**BUDGET, **cache, **changes})


def test_a_budget_is_remembered(tmp_path: Path) -> None:
    """Rank 0's, whatever the others remember. One that does not fit any more is searched for again."""
    first = run_remembering(tmp_path / "first", ranks=2)
    found, trials = searched(tmp_path / "first")
    path, entry = remembered(tmp_path / "cache")
    assert {str(length): rows for length, rows in entry["value"]} == found and trials > 1
    cfg = tiny_config("full", tmp_path / "again", **{**BUDGET, "max_steps_per_epoch": 1})
    cfg.adaptive_batching.cache = str(tmp_path / "cache")
    again, *_ = run_ranks(run_with_a_cache_on_rank_zero_only, 2, cfg, join=False)
    assert searched(tmp_path / "again") == (found, 1)
    assert losses(again) == losses(first)
    too_large = [[length, rows * 8] for length, rows in entry["value"]]
    Cache(path.parent, "token budget", lambda _: True).put(entry["facts"], too_large)
    run_remembering(tmp_path / "corrected", ranks=2)
    assert searched(tmp_path / "corrected") == (found, trials)
    assert remembered(tmp_path / "cache")[1] == entry


def run_with_a_cache_on_rank_zero_only(cfg: Any) -> Records:
    if os.environ["RANK"] == "1":
        Cache.get = lambda self, facts: None  # type: ignore[method-assign]
    return run_measuring(FASTER, "recipes/adaptive_full_finetune_distributed.py", cfg)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"adaptive_batching.memory_limit": "20MiB"},
        {"batch_size": 12},
        {"enable_activation_checkpointing": True},
        {"tokenizer.max_seq_len": 60},
        {"adaptive_batching.cache": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_run_remembers_another_budget(changes: dict[str, Any], tmp_path: Path) -> None:
    run_remembering(tmp_path / "first")
    run_remembering(tmp_path / "other", **changes)
    _, trials = searched(tmp_path / "other")
    assert trials > 1
    kept = len(list((tmp_path / "cache" / "batch_sizes").iterdir()))
    assert kept == (1 if "adaptive_batching.cache" in changes else 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["nothing", "[]", '{"facts": 1}'])
def test_a_cached_budget_that_cannot_be_read_is_searched_for(damage: str, tmp_path: Path) -> None:
    run_remembering(tmp_path / "first")
    path, entry = remembered(tmp_path / "cache")
    path.write_text(damage)
    run_remembering(tmp_path / "again")
    assert searched(tmp_path / "again") == searched(tmp_path / "first")
    assert remembered(tmp_path / "cache")[1] == entry


@pytest.mark.exhaustive
def test_a_remembered_budget_that_leaves_room_is_corrected(tmp_path: Path) -> None:
    run_remembering(tmp_path / "first")
    path, entry = remembered(tmp_path / "cache")
    Cache(path.parent, "token budget", lambda _: True).put(
        entry["facts"], [[length, 1] for length, _ in entry["value"]]
    )
    run_remembering(tmp_path / "again")
    assert searched(tmp_path / "again")[0] == searched(tmp_path / "first")[0]
    assert remembered(tmp_path / "cache")[1] == entry


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_its_budget_whatever_is_remembered(tmp_path: Path) -> None:
    changes = {**ALL_KEPT, "epochs": 2}
    whole = run_remembering(tmp_path / "whole", **changes)
    path, entry = remembered(tmp_path / "cache")
    smaller = [[length, max(1, rows - 1)] for length, rows in entry["value"]]
    Cache(path.parent, "token budget", lambda _: True).put(entry["facts"], smaller)
    rest = run_remembering(tmp_path / "whole", **changes, **named_checkpoint("full"))
    assert_same_end(rest, whole)
    assert remembered(tmp_path / "cache")[1] == entry, "it was confirmed"


@pytest.mark.exhaustive
def test_a_remembered_budget_is_validated_with(tmp_path: Path) -> None:
    data = {"data_files": "${assets}/data.json", "split": "train[:8]", "source": "json"}
    component = "torchtune.datasets.instruct_dataset"
    changes = {"dataset_val": {"_component_": component, **data}, "run_val_every_n_steps": 1}
    first = run_remembering(tmp_path / "first", **changes)
    again = run_remembering(tmp_path / "again", **changes)
    said = [
        json.loads((tmp_path / name / "token_budget.json").read_text())
        for name in ("first", "again")
    ]
    assert said[0]["validation"]["size"] == said[1]["validation"]["size"]
    assert searched(tmp_path / "again")[1] == 1
    assert losses(first) == losses(again)


@pytest.mark.exhaustive
def test_packed_rows_remember_no_budget(tmp_path: Path) -> None:
    packed = {"dataset.packed": True, "tokenizer.max_seq_len": 128, "batch_size": 2}
    run_remembering(tmp_path / "first", **packed)
    assert not list((tmp_path / "cache").glob("batch_sizes/*"))


@pytest.mark.exhaustive
def test_three_ranks_and_one_agree(tmp_path: Path) -> None:
    changes = {**BUDGET, "batch_size": 4}
    three = run(tmp_path / "three", ranks=3, **changes)
    alone = run(tmp_path / "alone", ranks=1, **{**changes, "batch_size": 12})
    for one, other in zip(three, alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.exhaustive
def test_a_budget_of_ones_own_is_confirmed(tmp_path: Path) -> None:
    records = run(tmp_path, **{**BUDGET, "adaptive_batching.token_budget": 300})
    assert max(record["micro_batch_size"] for record in records) >= 3
    for budget, said in ((50, "less than the longest row"), (100_000, "does not fit")):
        changes = {**BUDGET, "batch_size": 160, "adaptive_batching.token_budget": budget}
        with pytest.raises(AssertionError, match=said):
            run(tmp_path, **changes)


@pytest.mark.exhaustive
def test_it_shrinks_when_a_neighbour_moves_in(tmp_path: Path) -> None:
    changes = {**BUDGET, "batch_size": 32, "epochs": 3, "max_steps_per_epoch": None}
    changes["adaptive_batching.grow_back_after"] = 10
    changes["enable_activation_checkpointing"] = True  # or the step would turn it on instead
    changes["adaptive_batching.memory_limit"] = "14MiB"
    cfg = tiny_config("full", tmp_path, **changes)
    disturbed, *_ = run_ranks(run_measuring, 2, FASTER, "demos/neighbour.py", cfg, join=False)
    del changes["adaptive_batching.memory_limit"], changes["adaptive_batching.token_budget"]
    plain = run(tmp_path / "plain", **changes)
    assert disturbed[-1]["retried_steps"] >= 1
    for one, other in zip(plain, disturbed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)
    events = (tmp_path / "batch_size_events.jsonl").read_text().splitlines()
    before, after = json.loads(events[0])["token_budget"]
    assert after == before // 2


@pytest.mark.exhaustive
def test_with_growth_and_resume_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    changes = {
        **BUDGET,
        **ALL_KEPT,
        "batch_size": 4,
        "epochs": 2,
        "batch_increase_function": {
            "_component_": "torchtune_adaptive.schedule.Geometric",
            "every": 0.5,
        },
    }
    whole = run(tmp_path / "whole", **changes)
    assert len({record["global_batch_size"] for record in whole}) >= 3
    assert max(record["micro_batch_size"] for record in whole) > 4, "as large as the steps become"
    resumed = run(tmp_path / "whole", **{**changes, **named_checkpoint("full")})
    assert resumed
    assert_same_end(resumed, whole)


def run_compiled(cfg: Any, backend: str) -> tuple[Records, set[int], int]:
    """What was logged, the lengths of micro-batches, and how many graphs were compiled."""
    os.environ["TORCH_COMPILE_BACKEND"] = backend
    torch._inductor.config.compile_threads = 1
    lengths = set()
    forward = TransformerDecoder.forward

    def seen(model: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.add(tokens.shape[1])
        return forward(model, tokens, *args, **kwargs)

    TransformerDecoder.forward = seen
    records = run_ours("full", cfg)
    return records, lengths, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_a_compiled_model_sees_few_lengths(tmp_path: Path, exhaustive: bool) -> None:
    # No limit on memory: on the simulated device, compiled regions run eager.
    changes = {**PLAIN, "batch_size": 24, "adaptive_batching.token_budget": 400}
    changes["max_steps_per_epoch"] = 3
    plain = run(tmp_path / "plain", ranks=1, **changes)
    cfg = tiny_config("full", tmp_path / "compiled", **changes, compile=True)
    backend = "inductor" if exhaustive else "aot_eager"  # inductor takes half a minute here
    [(compiled, lengths, graphs)] = run_ranks(run_compiled, 1, cfg, backend, join=False)
    for one, other in zip(plain, compiled, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)
    assert 2 < len(lengths) <= 8, "of micro-batches of many lengths"
    assert 0 < graphs <= 2 * len(lengths), (graphs, lengths)


def test_packed_data_have_no_use_for_it(tmp_path: Path) -> None:
    packed = {"dataset.packed": True, "tokenizer.max_seq_len": 128, "batch_size": 2}
    records = run(tmp_path, ranks=1, **{**BUDGET, **packed, "max_steps_per_epoch": 2})
    assert "padding_share" not in records[0]
