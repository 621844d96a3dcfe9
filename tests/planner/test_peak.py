"""Peaks of steps that reserve more than they use, and the verdicts on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchtune_adaptive.cli.margin import cautions
from torchtune_adaptive.planner import DeviceLimits, Peak, StartUp, peak
from torchtune_adaptive.planner.memory.allocator import MIB
from torchtune_adaptive.planner.memory.recorded_step import (
    Kept,
    Label,
    MemoryEvent,
    NotRegular,
    RecordedStep,
    first_of_its_size,
    kept_by,
)

NOTHING = RecordedStep([], {})
LABEL = Label("activations", "forward", "aten.mm")


def one_after_the_other(*sizes: int) -> RecordedStep:
    """A step that allocates blocks of these sizes, in MiB, and releases each before the next."""
    events = []
    for block, size in enumerate(sizes):
        events += [MemoryEvent(block, size * MIB, 0), MemoryEvent(block, -1, 0)]
    return RecordedStep(events, dict.fromkeys(range(len(sizes)), LABEL))


def found(step: RecordedStep, usable: int, band: float = 0.0, correction: float = 1.0) -> Peak:
    device = device_of(usable, band, correction)
    return peak(StartUp(NOTHING, NOTHING), step, 2, 64, device)


def device_of(usable: int, band: float = 0.0, correction: float = 1.0) -> DeviceLimits:
    return DeviceLimits("card", usable * MIB, band=band, correction=correction)


GROWING = one_after_the_other(30, 40, 50)  # no block fits into a segment of an earlier one


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [(120, "FITS"), (119, "UNCERTAIN"), (50, "UNCERTAIN"), (49, "DOES NOT FIT")],
)
def test_what_the_allocator_can_return_does_not_decide(usable: int, verdict: str) -> None:
    peak = found(GROWING, usable)
    assert peak.reserved == 120 * MIB and peak.allocated == 50 * MIB
    assert peak.verdict(device_of(usable)) == verdict
    assert peak.with_retries == (verdict == "UNCERTAIN")


def test_blocks_in_use_are_not_returned() -> None:
    both = RecordedStep(
        [MemoryEvent(n, 30 * MIB, 0) for n in (0, 1)] + [MemoryEvent(n, -1, 0) for n in (0, 1)],
        {0: LABEL, 1: LABEL},
    )
    assert found(both, 59).verdict(device_of(59)) == "DOES NOT FIT"


def test_the_error_and_a_correction_of_the_prediction_count() -> None:
    assert found(GROWING, 49, band=0.03).verdict(device_of(49, 0.03)) == "UNCERTAIN"
    assert found(GROWING, 50, correction=1.1).verdict(device_of(50)) == "DOES NOT FIT"
    assert found(GROWING, 56, correction=1.1).verdict(device_of(56)) == "UNCERTAIN"


def test_a_simulated_device_has_nothing_to_return() -> None:
    simulated = replace(device_of(49), caching=False)
    found = peak(StartUp(NOTHING, NOTHING), GROWING, 2, 64, simulated)
    assert (found.reserved, found.verdict(simulated)) == (50 * MIB, "DOES NOT FIT")


def test_cautions_tell_the_two_reasons_apart() -> None:
    device = device_of(100, 0.03)
    retried, near = found(GROWING, 100, 0.03), found(one_after_the_other(98), 100, 0.03)
    by_retries, by_error = (cautions(device, [("8", each)], "at") for each in (retried, near))
    assert "at 8 a step runs only if torch's allocator returns memory" in by_retries[0]
    assert "at 8 the usable memory is within the prediction's error" in by_error[0]
    both = cautions(device, [("4", near), ("8", retried), ("8", retried)], "at")
    assert both == [by_error[0].replace("8", "4"), by_retries[0]]
    assert cautions(device, [("2", found(one_after_the_other(10), 100))], "at") == []


def together(*sizes: int) -> RecordedStep:
    """A step that allocates blocks of these sizes, in MiB, and then releases them."""
    events = [MemoryEvent(block, size * MIB, 0) for block, size in enumerate(sizes)]
    events += [MemoryEvent(block, -1, 0) for block in range(len(sizes))]
    return RecordedStep(events, dict.fromkeys(range(len(sizes)), LABEL))


def test_a_first_step_keeps_its_state_in_segments_of_its_own_activations() -> None:
    step, small = together(60, 100), together(6, 10)
    state = MemoryEvent(9, 40 * MIB, 0)
    first = RecordedStep([*small.events, state], {**small.labels, 9: LABEL})
    kept = kept_by(first, step)
    assert kept == [Kept(4, state)]
    assert first_of_its_size(step, kept) == [*step.events, state._replace(block=-1)]
    after_a_search = peak(StartUp(NOTHING, first), step, 2, 64, device_of(1000))
    alone = peak(StartUp(NOTHING, first, kept), step, 2, 64, device_of(1000))
    # The state takes a part of the segment of 60. So a later step takes a part of that of 100 for its 60, and
    # needs another of 100.
    assert (after_a_search.reserved, alone.reserved) == (200 * MIB, 260 * MIB)
    assert after_a_search.allocated == alone.allocated == 200 * MIB
    assert after_a_search.parts == alone.parts
    # And no segment is free, so that none can be returned.
    assert not peak(StartUp(NOTHING, first, kept), step, 2, 64, device_of(200)).with_retries


def test_what_a_first_step_keeps_may_lie_anywhere_in_it() -> None:
    step = one_after_the_other(60, 100)
    state = [MemoryEvent(number, MIB, 0) for number in (7, 8)]
    small = one_after_the_other(6, 10).events
    first = RecordedStep([state[0], *small[:1], state[1], *small[1:]], {})
    kept = kept_by(first, step)
    assert [one.place for one in kept] == [0, 1]
    numbered = [one._replace(block=-n) for n, one in enumerate(state, 1)]
    expected = [numbered[0], *step.events[:1], numbered[1], *step.events[1:]]
    assert first_of_its_size(step, kept) == expected


def test_what_fsdp_gathers_first_is_made_and_later_has_its_memory_again() -> None:
    def gathered(operation: str) -> RecordedStep:
        blocks = [*range(100), *range(100)]
        events = [MemoryEvent(at, -1 if n >= 100 else MIB, 0) for n, at in enumerate(blocks)]
        label = LABEL._replace(operation=operation)
        return RecordedStep(events, dict.fromkeys(blocks, label))

    step = gathered("resize_")
    state, loss = MemoryEvent(200, MIB, 0), [MemoryEvent(201, MIB, 0), MemoryEvent(201, -1, 0)]
    first = gathered("aten.empty.memory_format")
    first = RecordedStep([*loss, *first.events, state], {**first.labels, 200: LABEL, 201: LABEL})
    assert kept_by(first, step) == [Kept(len(step.events), state)]


def test_a_first_step_that_differs_in_more_tells_nothing() -> None:
    with pytest.raises(NotRegular, match="has other allocations than later ones"):
        kept_by(one_after_the_other(6, 10, 20), one_after_the_other(60, 100))
