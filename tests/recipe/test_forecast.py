"""From a few steps to all of them: structure, sizes, peaks, and what is asked of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.common import largest
from torchtune_adaptive.planner.memory.allocator import MIB
from torchtune_adaptive.planner.memory.peak import DeviceLimits, StartUp, peak
from torchtune_adaptive.planner.memory.recorded_step import (
    Bilinear,
    Label,
    MemoryEvent,
    NotRegular,
    RecordedStep,
)
from torchtune_adaptive.recipe.plan.limits import largest_adapter_rank, length_limits
from torchtune_adaptive.recipe.plan.predict import Prediction, predict
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.traces import NotRemembered

SIMULATED = DeviceLimits("simulated device", 1000, caching=False)
NOTHING = RecordedStep([], {})


def step(*allocations: int, freed: bool = True, start: int = 100) -> RecordedStep:
    """Allocations one after the other, then freed in the same order."""
    blocks = range(start, start + len(allocations))
    events = [MemoryEvent(block, n, 0) for block, n in zip(blocks, allocations, strict=True)]
    events += [MemoryEvent(block, -1, 0) for block in blocks] if freed else []
    labels = {block: Label("activations", "forward", f"op {block - start}") for block in blocks}
    return RecordedStep(events, labels)


def sizes(of: RecordedStep) -> list[int]:
    return [event.nbytes for event in of.events if event.nbytes >= 0]


def growing(rows: int, length: int) -> RecordedStep:
    return step(1000, 8 * rows, 4 * length, 3 * rows * length, start=7 * rows + length)


class TestBilinear:
    corners: ClassVar = {(r, n): growing(r, n) for r in (2, 3) for n in (64, 128)}

    @pytest.mark.parametrize("size", [(1, 64), (5, 96), (30, 4096), (2, 128)])
    def test_gives_every_other_step(self, size: tuple[int, int]) -> None:
        assert sizes(Bilinear(self.corners).step(*size)) == sizes(growing(*size))

    def test_one_length_is_enough_for_that_length(self) -> None:
        one = Bilinear({(r, 64): growing(r, 64) for r in (2, 3)})
        assert sizes(one.step(9, 64)) == sizes(growing(9, 64))
        with pytest.raises(ValueError, match="rows of 64 tokens say nothing about 65"):
            one.step(9, 65)

    def test_other_structures_are_refused(self) -> None:
        with pytest.raises(NotRegular, match=r"\(3, 64\) have different allocations"):
            Bilinear({(2, 64): step(1, 2), (3, 64): step(1, 2, 3)})

    def test_a_step_must_leave_things_as_they_were(self) -> None:
        with pytest.raises(NotRegular, match="leaves 2 blocks behind"):
            step(1, 2, freed=False).renumbered()
        with pytest.raises(NotRegular, match="memory of the step before"):
            RecordedStep([MemoryEvent(3, -1, 0)], {}).renumbered()


def test_a_peak_says_what_is_held_and_where_it_is_reached() -> None:
    parameters = RecordedStep([MemoryEvent(1, 500, 0)], {1: Label("parameters", "set-up", "")})
    state = RecordedStep(
        [MemoryEvent(2, 100, 0)], {2: Label("optimizer state", "optimizer step", "")}
    )
    found = peak(StartUp(parameters, state), step(50, 300, 20), 4, 64, SIMULATED)
    assert found.live == found.allocated == found.reserved == 970
    assert found.parts == {"parameters": 500, "optimizer state": 100, "activations": 370}
    assert (found.phase, found.operation) == ("forward", "op 2")


def test_a_caching_allocator_rounds_and_keeps() -> None:
    found = peak(StartUp(NOTHING, NOTHING), step(11 * MIB + 1), 4, 64, DeviceLimits("gpu", 1 << 30))
    assert (found.live, found.allocated, found.reserved) == (11 * MIB + 1, 12 * MIB, 12 * MIB)


def test_workspaces_are_part_of_the_peak() -> None:
    device = DeviceLimits("gpu", 1 << 30, workspaces=(32 * MIB, 32 * MIB))
    found = peak(StartUp(NOTHING, NOTHING), step(MIB), 4, 64, device)
    assert found.reserved == 64 * MIB + 2 * MIB
    assert found.parts["workspaces"] == 64 * MIB


@pytest.mark.parametrize(
    ("limit", "verdict"), [(1030, "FITS"), (1029, "UNCERTAIN"), (970, "UNCERTAIN"), (969, "NOT")]
)
def test_a_verdict_is_given_where_the_error_leaves_no_doubt(limit: int, verdict: str) -> None:
    device = DeviceLimits("", limit, caching=False, band=0.03)
    found = peak(StartUp(NOTHING, NOTHING), step(1000), 1, 1, device)
    assert verdict in found.verdict(device)


@pytest.mark.parametrize("guess", [-5, 1, 2, 9, 10, 11, 500])
@pytest.mark.parametrize("end", [0, 1, 2, 10, 300])
def test_the_largest_is_found_from_any_guess(guess: int, end: int) -> None:
    assert largest(lambda rows: rows <= end, guess) == end


class FakeTracer:
    """Steps by a formula."""

    set_up = NOTHING
    uneven = False
    layers = 0
    max_seq_len: int | None = None
    as_written = ""

    def __init__(self, formula: Any) -> None:
        self.formula = formula
        self.traced: list[int] = []

    def take_step(self, rows: int, length: int, *_: object) -> RecordedStep:
        self.traced.append(rows)
        return step(*self.formula(rows, length))


def ask(
    tracer: FakeTracer,
    monkeypatch: pytest.MonkeyPatch,
    cache: bool | str = False,
    **config: Any,
) -> Prediction:
    return predict(query(tracer, monkeypatch, cache, **config))


def query(
    tracer: FakeTracer,
    monkeypatch: pytest.MonkeyPatch,
    cache: bool | str = False,
    settings: dict[str, Any] | None = None,
    **config: Any,
) -> Query:
    from torchtune_adaptive.recipe.tracing import tracer as tracer_module

    monkeypatch.setattr(tracer_module, "Tracer", lambda *_: tracer)
    loss = {"_component_": "torch.nn.CrossEntropyLoss"}
    cfg = {
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "device": "cpu",
        "loss": loss,
        "adaptive_batching": {"cache": cache, **(settings or {})},
        **config,
    }
    asked = Asked.of(OmegaConf.create(cfg), "full")
    return Query(asked, 1, SIMULATED, length=10, confirmed=True)


def test_two_traces_and_one_that_confirms_are_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = FakeTracer(lambda rows, length: (100, rows * length))
    found = ask(tracer, monkeypatch)
    assert (found.largest, found.traced_directly) == (90, False)
    assert tracer.traced == [2, 2, 3, 90]  # the first makes the optimizer's state
    assert found.at_largest is not None and found.at_largest.live == 1000


def test_a_list_of_datasets_is_traced_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = FakeTracer(lambda rows, length: (100, rows * length))
    found = ask(tracer, monkeypatch, dataset=[{"packed": False}, {"packed": False}])
    assert found.largest == 90


def test_what_was_traced_once_is_not_traced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (FakeTracer(lambda rows, length: (100, rows * length)) for _ in range(2))
    found = ask(first, monkeypatch, cache=str(tmp_path))
    remembered = ask(again, monkeypatch, cache=str(tmp_path))
    assert again.traced == []
    for path in tmp_path.rglob("*.json"):  # what makes no sense is traced again
        kept = json.loads(path.read_text())
        kept["value"]["steps"]["set-up"] = {"events": [[1, 2]]}
        path.write_text(json.dumps(kept))
    assert ask(again, monkeypatch, cache=str(tmp_path)).largest == found.largest
    assert again.traced != []
    assert replace(remembered, seconds=0, tool_bytes=0) == replace(found, seconds=0, tool_bytes=0)


def test_what_the_user_wrote_is_traced_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        tracer = FakeTracer(lambda rows, length: (rows,))
        own = {"loss": {"_component_": "my_losses.Mine"}}
        ask(tracer, monkeypatch, cache=str(tmp_path), **own)
        assert tracer.traced != []


def test_what_is_not_bilinear_is_traced_size_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(FakeTracer(lambda rows, length: (rows * rows,)), monkeypatch)
    assert (found.largest, found.traced_directly) == (31, True)


def test_so_is_what_has_another_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(FakeTracer(lambda rows, length: (10,) * rows), monkeypatch)
    assert (found.largest, found.traced_directly) == (100, True)


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(FakeTracer(lambda rows, length: (1000, rows)), monkeypatch)
    assert (found.largest, found.at_largest) == (0, None)


@pytest.mark.parametrize("formula", [lambda n: n, lambda n: n * n], ids=["linear", "quadratic"])
def test_other_lengths_are_right_also_where_memory_is_not_linear_in_them(
    formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = query(FakeTracer(lambda rows, n: (rows * formula(n),)), monkeypatch)
    assert length_limits(asked, (5, 20)).largest == {n: 1000 // formula(n) for n in (5, 20)}


def test_the_longest_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = FakeTracer(lambda rows, n: (rows * n,))
    asked = replace(query(tracer, monkeypatch), device=replace(SIMULATED, usable_bytes=1000_000))
    found = length_limits(asked, (128, 1024))
    assert found.longest == 250_000 // 64 * 64
    tracer.max_seq_len = 700
    bounded = length_limits(asked, (128, 1024))
    assert (bounded.longest, bounded.bound, bounded.largest.keys()) == (640, 700, {128})


@pytest.mark.parametrize(("limit", "highest"), [(1000, 64), (100, 4), (10, 0), (10**9, 4096)])
def test_the_highest_rank_of_adapters(
    limit: int, highest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtune_adaptive.recipe.tracing import tracer as tracer_module

    def tracer(asked: Asked, *_: object) -> FakeTracer:
        return FakeTracer(lambda rows, n: (asked.cfg.model.lora_rank * rows * 3, 10))

    asked = query(FakeTracer(None), monkeypatch, model={"lora_rank": 8})
    monkeypatch.setattr(tracer_module, "Tracer", tracer)
    device = replace(SIMULATED, usable_bytes=limit)
    assert largest_adapter_rank(replace(asked, device=device)) == highest


def test_what_is_not_remembered_is_not_traced_where_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = FakeTracer(lambda rows, length: (100, rows * length))
    asked = query(tracer, monkeypatch, str(tmp_path))
    with pytest.raises(NotRemembered):
        predict(replace(asked, may_trace=False))
    assert tracer.traced == []
    found = predict(asked)
    assert predict(replace(asked, may_trace=False)).largest == found.largest


@pytest.mark.parametrize(
    ("rounding", "ceiling", "picked"),
    [("power_of_two", None, 64), ("none", None, 90), ("none", 7, 7), ("divisor", None, 4)],
)
def test_the_size_that_a_search_picks(
    rounding: Any, ceiling: int | None, picked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = FakeTracer(lambda rows, length: (100, rows * length))
    settings = {"rounding": rounding, "ceiling": ceiling}
    found = predict(query(tracer, monkeypatch, settings=settings)).picked
    assert found is not None and found.rows == picked


class WithState(FakeTracer):
    """Two large blocks; the first step keeps the optimizer's state."""

    def take_step(self, rows: int, length: int, *_: object) -> RecordedStep:
        found = step(3 * rows * length * MIB, 5 * rows * length * MIB)
        if not self.traced:
            found.events.append(MemoryEvent(1, 50 * MIB, 0))
            found.labels[1] = Label("optimizer state", "optimizer step", "")
        self.traced.append(rows)
        return found


@pytest.mark.parametrize(
    ("changes", "reserved"),
    [
        ({}, 260),  # the state takes the segment of 60, a later step that of 100 for its 60
        ({"use_maximum_batch_size": True}, 210),
        ({"batch_increase_function": "mine.more"}, 210),
        ({"settings": {"token_budget": True}}, 210),
    ],
)
def test_only_a_config_that_tries_sizes_begins_with_a_small_step(
    changes: dict[str, Any], reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> Query:
        on_cpu = query(WithState(None), monkeypatch, batch_size=2, **changes)
        return replace(on_cpu, device=DeviceLimits("gpu", 215 * MIB))

    found = predict(asked())
    assert found.configured.reserved == reserved * MIB
    assert found.picked is not None and found.picked.rows == 2  # that a search picks
    assert found.largest == (1 if reserved == 260 else 2)
    assert length_limits(asked(), (10,)).largest == {10: found.largest}
