"""Unequal numbers of rows on the ranks, and runs that go on on another number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.faults import fail_at_each, survivable
from tests.helpers.library import Row, Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import UsageError, steps_of
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.library.sampling import Steps

pytestmark = pytest.mark.ranks
CLOSE = 1e-6


def dealt(shares: list[int], seed: int) -> list[Row]:
    """This rank's rows of a step, of which each has so many; one rank alone has those of all."""
    rows = rows_of(sum(shares), seed)
    if dist.get_world_size() == 1:
        return rows
    start = sum(shares[: dist.get_rank()])
    return rows[start : start + shares[dist.get_rank()]]


def outcomes(
    way: str, steps: list[list[int]], size: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Steps in which ranks have different numbers of rows."""
    run, seen = Trained(way, **settings), []
    for seed, shares in enumerate(steps):
        outcome = run.step(dealt(shares, seed), collate, size)
        seen.append({**vars(outcome), "kept": run.step.micro_batch})
    return seen


STEPS = [[4, 3, 3], [3, 1, 2], [2, 2, 1], [1, 0, 2], [3, 3, 3], [0, 0, 1]]
WAYS = {
    "FSDP": ("fsdp", {}),
    "FSDP, reduced with the last": ("fsdp", {"sync_each_batch": False}),
    "FSDP of each part": ("parts", {}),
    "FSDP, compiled": ("fsdp", {"compiled": "aot_eager"}),
    "DDP": ("ddp", {}),
    "HSDP": ("hsdp", {}),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("way", "settings"), WAYS.values(), ids=WAYS)
def test_a_step_is_the_same_however_many_rows_each_rank_has(
    way: str, settings: dict[str, Any], size: int
) -> None:
    steps = STEPS if way != "hsdp" else [[*shares, 1] for shares in STEPS]
    settings = settings | {"max_grad_norm": 0.5}
    ranks = len(steps[0])
    [alone] = run_ranks(outcomes, 1, "alone", steps, 64, {"max_grad_norm": 0.5})
    found = run_ranks(outcomes, ranks, way, steps, size, settings)
    assert all(each == found[0] for each in found)
    for one, expected, shares in zip(found[0], alone, steps, strict=True):
        assert one["weight"] == expected["weight"] == sum(shares) * 4
        assert one["loss"] == pytest.approx(expected["loss"], rel=CLOSE)
        assert one["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)
        assert one["micro_batch"] == min(size, max(shares))
        assert (one["retried"], one["kept"]) == (0, size)


def fail_where_rows_are_unequal(way: str, sample: Sample, settings: dict[str, Any]) -> Counter[str]:
    """Fail at operations of a step in micro-batches of 3 rows, on one rank after the other; it is retried in
    smaller ones. Ranks have 4, 3 and 3 rows, so two of them have a micro-batch without weight."""
    run, memory = failing(way, max_grad_norm=1.0, **settings)
    step = run.step
    for seed in range(3):
        step(dealt([4, 3, 3], seed), collate, 3)
    rows = dealt([4, 3, 3], 9)
    snapshot = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
    expected = {}
    for size in (2, 1):
        outcome = step(rows, collate, size)
        expected[size] = local_values(run.model), outcome.loss
        snapshot.restore()
    last, _ = survivable(memory, step.train_step, lambda: step(rows, collate, 3))
    snapshot.restore()
    operations = sample.of(last)
    counts: Counter[str] = Counter()
    for _, _, failure in fail_at_each(operations, memory, step.ranks):
        step._begin(3)
        with failure:
            outcome = step(rows, collate, 3)
        values, loss = expected[outcome.micro_batch]
        counts["tried"] += 1
        counts["retried"] += outcome.retried == 1
        counts["wrong"] += not same_bits(local_values(run.model), values) or outcome.loss != loss
        snapshot.restore()
    return counts


@pytest.mark.parametrize(
    ("way", "settings"),
    [("fsdp", {}), ("ddp", {}), ("fsdp", {"sync_each_batch": False})],
    ids=["FSDP", "DDP", "FSDP, reduced with the last"],
)
def test_memory_runs_out_where_rows_are_unequal(
    way: str, settings: dict[str, Any], sample: Sample
) -> None:
    timeout = 280 if sample.exhaustive else 60
    counts = run_ranks(fail_where_rows_are_unequal, 3, way, sample, settings, timeout=timeout)
    for count in counts:
        assert count["retried"] == count["tried"] >= 20 // sample.stride
        assert count["wrong"] == 0


def noise(way: str) -> list[dict[str, float]]:
    run = Trained(way, measure_noise=True)
    sums = [run.step(dealt([4, 3, 3], seed), collate, 3).noise for seed in range(2)]
    return [vars(each) for each in sums]


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_a_micro_batch_without_weight_is_no_small_batch(way: str) -> None:
    for one in run_ranks(noise, 3, way)[0]:
        terms = [3 * 4, 4, 3 * 4, 3 * 4] if way == "fsdp" else [4 * 4, 3 * 4, 3 * 4]
        assert one["rows"] == 10
        assert one["small_tokens"] == one["tokens"] == 40
        assert one["small_tokens_squared"] == sum(each**2 for each in terms)
        assert 0 < one["small"] < math.inf


def by_lengths() -> list[Any]:
    """Steps of a token budget; the tokens in a row are a number of its own."""
    run, made = Trained("fsdp"), []

    def seen(rows: list[Row]) -> Row:
        made.append(len(rows))
        return collate(rows)

    found = []
    for seed, shares in enumerate(STEPS):
        rows = dealt(shares, seed)
        lengths = [1 + (position + seed) % 4 for position in range(len(rows))]
        outcome = run.step(rows, seen, 5, lengths=lengths)
        found.append((outcome.loss, outcome.weight, len(made)))
        made.clear()
    return found


def test_token_budgets_have_as_many_micro_batches_on_each_rank() -> None:
    [alone] = run_ranks(outcomes, 1, "alone", STEPS, 64, {})
    found = run_ranks(by_lengths, 3)
    assert all(each == found[0] for each in found)
    for (loss, weight, micro_batches), expected, shares in zip(found[0], alone, STEPS, strict=True):
        assert weight == expected["weight"]
        assert loss == pytest.approx(expected["loss"], rel=CLOSE)
        assert micro_batches <= max(shares)


def scored(lengths: bool) -> None:
    run = Trained("fsdp")
    score = run.step.forward_only(lambda batch: run.model(batch[0]).sum(1))
    rows, start = dealt([4, 1, 2], 0), sum([4, 1, 2][: dist.get_rank()])
    given = [[3, 1, 2, 2], [4], [1, 2]][dist.get_rank()] if lengths else None
    found = score(rows, collate, 4 if lengths else 2, lengths=given)
    whole = score(rows_of(7), collate, 7)[start : start + len(rows)]
    assert len(found) == len(rows)
    torch.testing.assert_close(torch.stack(found), torch.stack(whole), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("lengths", [False, True], ids=["rows", "lengths"])
def test_a_pass_without_gradients_takes_unequal_rows(lengths: bool) -> None:
    run_ranks(scored, 3, lengths)


def refusals() -> dict[str, str]:
    said = {}

    def refused(name: str, call: Any, *given: Any, **named: Any) -> None:
        with pytest.raises(UsageError) as error:
            call(*given, **named)
        said[name] = str(error.value)

    run = Trained("ddp")
    first = dist.get_rank() == 0
    refused("none before", run.step, rows_of(1 if first else 0), collate, 1)
    run.step(rows_of(1), collate, 1)
    refused("none at all", run.step, [], collate, 1)
    refused("sizes", run.step, rows_of(1), collate, 1 if first else 2)
    lengths = [1] if first else None
    refused("lengths", run.step, rows_of(1), collate, 1, lengths=lengths)
    groups = [[2, 2], [4]][not first]
    refused("groups", run.step, rows_of(4), collate, 1, groups=groups)
    refused("group of one", run.step, rows_of(4), collate, 1, groups=[4] if first else None)
    score = run.step.forward_only(lambda batch: batch[0])
    refused("nothing to score", score, rows_of(1 if first else 0), collate, 1)
    shares = Trained("ddp", shares=True)
    shares.step.objective._forward = lambda batch: shares.model(batch[0]).mean()
    refused("shares", shares.step, rows_of(2 if first else 1), collate, 1)
    shares.step(rows_of(2), collate, 1)
    return said


def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(refusals, 2)
    there = "step: another rank was called with arguments that are refused there."
    assert first.pop("none before") == first.pop("nothing to score") == there
    for name in ("none before", "nothing to score"):
        assert second.pop(name).startswith("rows: none. Give at least one on every rank.")
    assert first == second
    assert first["none at all"] == "rows: no rank has any. A step needs at least one."
    assert first["sizes"].startswith("size: 1 on one rank and 2 on another.")
    assert first["lengths"].startswith("lengths: given on one rank and not on another.")
    assert first["groups"].startswith("groups: [2, 2] on one rank and [4] on another.")
    assert first["group of one"].startswith("groups: [4] on one rank and none on another.")
    assert first["shares"].startswith("rows: some ranks have more than others, and forward returns")


# --- the steps of a dataset on any number of ranks ----------------------------------------------------


def on(rank: int, ranks: int, order: str = "global", **named: Any) -> Steps:
    """The steps of one of several ranks, of which there are none here."""
    made = steps_of(range(named.pop("samples", 50)), **named)
    made._rank, made._ranks = rank, ranks
    return made


def test_each_sample_is_in_the_same_step_on_any_number_of_ranks() -> None:
    for of_step in (1, 2, 5, 7, 12, 50):
        whole = [*steps_of(range(50), global_rows=of_step, epoch=3)]
        assert [*map(len, whole)] == [of_step] * (50 // of_step)
        for ranks in range(1, min(of_step, 9) + 1):
            shares = [[*on(r, ranks, global_rows=of_step, epoch=3)] for r in range(ranks)]
            for number, step in enumerate(zip(*shares, strict=True)):
                assert sorted(row for rows in step for row in rows) == sorted(whole[number])
                sizes = [*map(len, step)]
                assert max(sizes) - min(sizes) <= 1
                if of_step % ranks == 0:  # as torch's sampler deals them out
                    assert [row for some in zip(*step, strict=True) for row in some] == whole[
                        number
                    ]


def test_a_rank_has_the_same_rows_wherever_it_begins() -> None:
    for ranks in (1, 3, 4):
        for rank in range(ranks):
            whole = [*on(rank, ranks, global_rows=10)]
            for start in range(5):
                assert [*on(rank, ranks, global_rows=10, start=10 * start)] == whole[start:]
            begun = on(rank, ranks, global_rows=10)
            next(begun), next(begun)
            again = on(rank, ranks, global_rows=10)
            again.load_state_dict(begun.state_dict())
            assert [*again] == whole[2:] and again.used == 50


def test_rows_on_each_rank_and_of_all_are_the_same_steps() -> None:
    """Where the ranks divide the data, or the steps end before its rows are repeated."""
    for rank, ranks in ((0, 1), (0, 2)):
        assert [*on(rank, ranks, global_rows=10, seed=4)] == [
            rows[rank::ranks] for rows in steps_of(range(50), 10, seed=4)
        ]


def order_of_ranks(state: dict[str, Any] | None) -> Any:
    """Ranks that do not divide the data repeat its first rows; on others, a resumed run does the same."""
    if state is None:
        steps = steps_of(range(10), 1, seed=1)
        first = next(steps)
        return steps.state_dict(), first, [*steps]
    steps = steps_of(range(10), global_rows=4, seed=1)
    steps.load_state_dict(state)
    return [*steps]


def test_the_order_is_that_of_the_ranks_that_a_run_began_with() -> None:
    with_repeated = run_ranks(order_of_ranks, 4, None)
    state = with_repeated[0][0]
    assert state == {
        **{"epoch": 0, "used": 4, "global_rows": 4},
        **{"samples": 10, "shuffle": True, "seed": 1, "ranks": 4},
    }
    rows = [row for _, first, rest in with_repeated for row in chain(first, *rest)]
    assert len(rows) == 12 and {*rows} == {*range(10)}
    begun = state | {"used": 0}
    resumed = run_ranks(order_of_ranks, 3, begun)
    assert sorted(row for steps in resumed for step in steps for row in step) == sorted(rows)


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("rows: pass either rows or global_rows", {}),
        ("rows: pass either rows or global_rows", {"rows": 2, "global_rows": 2}),
        ("global_rows: 0", {"global_rows": 0}),
        ("global_rows: 51 in a step, and the data has 50", {"global_rows": 51}),
    ],
)
def test_a_global_batch_that_cannot_be(said: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        steps_of(range(50), **settings)


@pytest.mark.parametrize(
    ("said", "changed", "settings"),
    [
        (
            "global_rows: 10 in a step on 1 rank, and the state is of steps of 12",
            {"global_rows": 12},
            {},
        ),
        ("data: samples is 50, and 40 in the state", {"samples": 40}, {}),
        ("seed: seed is 7, and 0 in the state", {}, {"seed": 7}),
        ("shuffle: shuffle is False, and True in the state", {}, {"shuffle": False}),
    ],
)
def test_a_state_of_other_steps(
    said: str, changed: dict[str, Any], settings: dict[str, Any]
) -> None:
    state = steps_of(range(50), global_rows=10).state_dict() | changed
    with pytest.raises(UsageError, match=f"^{said}"):
        steps_of(range(50), global_rows=10, **settings).load_state_dict(state)


def test_a_state_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^load_state_dict: epoch, .* used is missing"):
        steps_of(range(50), global_rows=10).load_state_dict({})


def too_many_ranks() -> None:
    with pytest.raises(UsageError, match=r"global_rows: 1 in a step, so that some of 2 ranks"):
        steps_of(range(50), global_rows=1)


def test_more_ranks_than_rows_in_a_step() -> None:
    run_ranks(too_many_ranks, 2)


# --- a run that goes on on other ranks --------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SAMPLES, GLOBAL_ROWS, EPOCHS = 160, 16, 2


def part_of_a_run(folder: str, ends: int, size: int) -> list[tuple[float, list[int]]]:
    """Train to a step, from the checkpoint in the folder on if there is one; gives each step's loss and this
    rank's samples."""
    run, data = Trained("fsdp", max_grad_norm=0.5), rows_of(SAMPLES)
    checkpoint, saved = Path(folder) / "checkpoint.pt", None
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        set_model_state_dict(run.model, saved["model"], options=WHOLE)
        set_optimizer_state_dict(run.model, run.optimizer, saved["optimizer"], options=WHOLE)
        run.step.load_state_dict(saved["step"])
    seen: list[tuple[float, list[int]]] = []
    first = saved["steps"]["epoch"] if saved else 0
    for epoch in range(first, EPOCHS):
        steps = steps_of(range(SAMPLES), global_rows=GLOBAL_ROWS, epoch=epoch)
        if saved and epoch == first:
            steps.load_state_dict(saved["steps"])
        for samples in steps:
            outcome = run.step([data[sample] for sample in samples], collate, size)
            seen.append((outcome.loss, samples))
            if run.step.steps == ends:
                model = get_model_state_dict(run.model, options=WHOLE)
                optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=WHOLE)
                if dist.get_rank() == 0:
                    places = {"steps": steps.state_dict(), "step": run.step.state_dict()}
                    torch.save({"model": model, "optimizer": optimizer, **places}, checkpoint)
                return seen
    raise AssertionError("there are fewer steps")


@pytest.mark.rotating
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_goes_on_on_other_ranks_as_if_nothing_had_happened(size: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_ranks(part_of_a_run, 4, str(tmp_path / "whole"), 19, size)
    losses = [loss for loss, _ in whole[0]]
    each_step = [
        sorted(chain(*one)) for one in zip(*([s for _, s in r] for r in whole), strict=True)
    ]
    found: list[float] = []
    found_steps: list[list[int]] = []
    for ranks, ends in ((4, 5), (3, 9), (2, 12), (4, 19)):
        parts = run_ranks(part_of_a_run, ranks, str(tmp_path), ends, size)
        assert all([loss for loss, _ in part] == [loss for loss, _ in parts[0]] for part in parts)
        found += [loss for loss, _ in parts[0]]
        found_steps += [
            sorted(chain(*one)) for one in zip(*([s for _, s in r] for r in parts), strict=True)
        ]
    assert found_steps == each_step
    in_first_epoch = chain(*found_steps[: SAMPLES // GLOBAL_ROWS])
    assert sorted(in_first_epoch) == [*range(SAMPLES)], "each sample once"
    assert len(found) == 19 and found == pytest.approx(losses, abs=CLOSE)
