"""Steps with rows of other lengths, computed from those of three."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchtune_adaptive.planner import DeviceLimits, Question, RecordedStep, StartUp, TracedRun
from torchtune_adaptive.planner.memory.recorded_step import Label, MemoryEvent, NotRegular
from torchtune_adaptive.planner.other_lengths import at_length, first_step_like
from torchtune_adaptive.planner.speed.operations import ATTENTION, GEMM, Operation, StepOperations

LABEL = Label("activations", "forward", "aten.mm")
STATE = Label("optimizer state", "update", "aten.zeros_like")
Bytes = Callable[[int, int], int]


def linear(rows: int, length: int) -> int:
    return 4096 + 512 * rows * length


def quadratic(rows: int, length: int) -> int:
    return 512 * rows * length**2


def step_of(rows: int, length: int, nbytes: Bytes = linear) -> RecordedStep:
    events = [MemoryEvent(7, nbytes(rows, length), 0), MemoryEvent(9, 4096, 0)]
    events += [MemoryEvent(7, -1, 0), MemoryEvent(9, -1, 0)]
    tokens = float(rows * length)
    operations = [
        Operation(GEMM, "mm", "forward", 0, flops=tokens * 64, shape=(1, tokens, 8, 8)),
        Operation(ATTENTION, "sdpa", "forward", 0, flops=tokens * length),
    ]
    return RecordedStep(events, {7: LABEL, 9: LABEL}, StepOperations([operations], []))


def first_step(rows: int, length: int) -> RecordedStep:
    """A step that allocates the optimizer's state as well."""
    later = step_of(rows, length)
    events = [*later.events[:2], MemoryEvent(20, 2048, 0), *later.events[2:]]
    return RecordedStep(events, {**later.labels, 20: STATE})


@pytest.mark.parametrize("length", [64, 192, 1024, 8192])
def test_a_step_on_a_line_is_that_of_a_trace(length: int) -> None:
    found = at_length({n: step_of(2, n) for n in (128, 256, 512)}, length)
    expected = step_of(2, length)
    assert found.events == expected.renumbered().events
    assert found.labels == expected.renumbered().labels
    assert found.operations == expected.operations  # attention is quadratic


@pytest.mark.parametrize(
    ("lengths", "length", "nbytes", "reason"),
    [
        ((128, 256), 512, linear, "2 lengths"),
        ((128, 256, 500), 512, linear, "2 lengths"),
        ((128, 256, 512), 1000, linear, "a multiple of 64"),
        ((128, 256, 512), 1024, quadratic, "256 tokens are not on the line"),
    ],
)
def test_what_does_not_tell_is_not_regular(
    lengths: tuple[int, ...], length: int, nbytes: Bytes, reason: str
) -> None:
    with pytest.raises(NotRegular, match=reason):
        at_length({n: step_of(2, n, nbytes) for n in lengths}, length)


def test_other_operations_are_not_regular() -> None:
    known = {n: step_of(2, n) for n in (128, 256, 512)}
    operations = known[256].operations
    assert operations is not None
    fewer = StepOperations([operations.micro_batches[0][:1]], [])
    known[256] = known[256]._replace(operations=fewer)
    with pytest.raises(NotRegular, match="1 and 2 operations"):
        at_length(known, 1024)


def test_a_first_step_is_a_later_one_that_allocates_what_stays() -> None:
    found = first_step_like(first_step(2, 128), step_of(2, 128), step_of(2, 512))
    assert [event.nbytes for event in found.events] == [
        event.nbytes for event in first_step(2, 512).events
    ]
    (kept,) = {e.block for e in found.events} - {e.block for e in found.events if e.nbytes < 0}
    assert found.labels[kept] == STATE
    with pytest.raises(NotRegular, match="not like later ones"):
        first_step_like(first_step(2, 128), step_of(2, 256), step_of(2, 512))


class Steps:
    """Steps of which some are known, and the sizes that were traced."""

    compiled, as_written = False, ""
    max_seq_len: int | None = None

    def __init__(self, at_5_rows: Bytes = linear) -> None:
        self.traced: list[tuple[int, int]] = []
        self._at_5_rows = at_5_rows

    def start_up(self, length: int) -> StartUp:
        rows, length = TracedRun.first_size(length)
        self.traced.append((0, length))
        return StartUp(RecordedStep([], {}), first_step(rows, length))

    def step(self, rows: int, length: int) -> RecordedStep:
        self.traced.append((rows, length))
        return step_of(rows, length, self._at_5_rows if rows == 5 else linear)

    noted = step

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {(rows, n): step_of(rows, n) for rows in (2, 3) for n in (128, 256, 512)}

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {(2, 256): StartUp(RecordedStep([], {}), first_step(2, 256))}


def largest(steps: Steps, length: int, confirmed: bool = False) -> int:
    """The largest micro-batch of a device with room for five rows of so many tokens."""
    device = DeviceLimits("device", linear(5, length) + 8192 - 4096 + 2048, caching=False)
    return TracedRun(steps, length).answer(Question(device, 2, length, confirmed=confirmed)).largest


def test_another_length_takes_no_trace() -> None:
    steps = Steps()
    assert largest(steps, 1024) == 5
    assert steps.traced == []


def test_a_length_that_does_not_follow_is_traced() -> None:
    steps = Steps()
    assert largest(steps, 1000) == 5
    assert steps.traced == [(0, 500), (2, 1000), (3, 1000)]


def test_rows_that_the_model_does_not_take_are_left_to_the_trace() -> None:
    steps = Steps()
    steps.max_seq_len = 512
    largest(steps, 1024)
    assert (2, 1024) in steps.traced


def test_the_largest_is_traced_and_so_is_all_if_it_is_not_as_computed() -> None:
    steps = Steps()
    assert largest(steps, 1024, confirmed=True) == 5
    assert steps.traced == [(5, 1024)]
    steps = Steps(at_5_rows=lambda rows, length: 2 * linear(rows, length))
    assert largest(steps, 1024, confirmed=True) == 4
    assert steps.traced[:4] == [(5, 1024), (0, 512), (2, 1024), (3, 1024)]
