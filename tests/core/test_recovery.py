"""The micro-batch after running out of memory, and after a while without, step by step."""

from __future__ import annotations

from torchtune_adaptive.core.sizes.recovery import Recovery

POWERS = (1, 2, 4, 8, 16)


def calm(recovery: Recovery, steps: int) -> list[int]:
    """The sizes of the steps that follow so many good ones."""
    sizes = []
    for _ in range(steps):
        recovery.grow_back()
        sizes.append(recovery.size)
    return sizes


def test_each_failure_halves_until_there_is_nothing_smaller() -> None:
    recovery = Recovery(16, POWERS, calm_steps=None)
    sizes = []
    while recovery.shrink():
        sizes.append(recovery.size)
    assert sizes == [8, 4, 2, 1] and recovery.size == 1


def test_only_candidates_are_used() -> None:
    recovery = Recovery(12, (1, 2, 3, 4, 6, 12), calm_steps=None)
    assert [recovery.shrink() and recovery.size for _ in range(4)] == [6, 3, 1, False]
    recovery = Recovery(7, (1, 7), calm_steps=None)
    assert recovery.shrink() and recovery.size == 1


def test_it_grows_back_size_by_size() -> None:
    recovery = Recovery(16, POWERS, calm_steps=3)
    recovery.shrink()
    recovery.shrink()
    assert calm(recovery, 8) == [4, 4, 8, 8, 8, 16, 16, 16]


def test_failing_again_doubles_the_wait() -> None:
    recovery = Recovery(8, POWERS, calm_steps=2)
    recovery.shrink()
    assert calm(recovery, 2) == [4, 8]
    recovery.shrink()
    assert calm(recovery, 4) == [4, 4, 4, 8]
    recovery.shrink()
    assert calm(recovery, 8) == [4, 4, 4, 4, 4, 4, 4, 8]


def test_once_it_has_held_the_wait_is_short_again() -> None:
    recovery = Recovery(8, POWERS, calm_steps=2)
    recovery.shrink()
    calm(recovery, 2)
    recovery.shrink()
    calm(recovery, 4)
    assert calm(recovery, 4) == [8, 8, 8, 8], "a calm stretch of 4 at the size that failed"
    recovery.shrink()
    assert calm(recovery, 2) == [4, 8]


def test_trouble_interrupts_the_calm() -> None:
    recovery = Recovery(16, POWERS, calm_steps=3)
    recovery.shrink()
    calm(recovery, 2)
    recovery.shrink()
    assert calm(recovery, 3) == [4, 4, 8]


def test_never_above_the_start_and_never_back_if_so_asked() -> None:
    assert calm(Recovery(8, POWERS, calm_steps=1), 5) == [8] * 5
    recovery = Recovery(8, POWERS, calm_steps=None)
    recovery.shrink()
    assert calm(recovery, 1000) == [4] * 1000


def test_retries_in_two_steps_in_a_row_are_thrashing() -> None:
    recovery = Recovery(8, POWERS, calm_steps=None)
    assert [recovery.is_thrashing(n) for n in (0, 1, 0, 5, 0)] == [False] * 5
    assert [recovery.is_thrashing(n) for n in (1, 2, 3, 4)] == [False, True, False, True]


def state(recovery: Recovery) -> tuple[int, int]:
    return recovery.size, recovery.relief


def test_reliefs_come_back_before_sizes_do_and_in_their_order() -> None:
    recovery = Recovery(4, POWERS, calm_steps=1, reliefs=2)
    assert [recovery.relieve() for _ in range(3)] == [True, True, False]
    assert recovery.shrink() and state(recovery) == (2, 2)
    states = []
    for _ in range(8):
        recovery.grow_back()
        states.append(state(recovery))
    # Each holds for the wait before the next is tried.
    assert states == [(4, 2), (4, 1), (4, 0), *[(4, 0)] * 5]


def test_what_it_remembers_goes_with_a_checkpoint() -> None:
    recovery = Recovery(4, POWERS, calm_steps=9, reliefs=1)
    recovery.relieve()
    recovery.shrink()
    resumed = Recovery(4, POWERS, calm_steps=9, reliefs=1)
    resumed.load_state_dict(recovery.state_dict())
    assert state(resumed) == (2, 1) and resumed.state_dict() == recovery.state_dict()
    without = Recovery(4, POWERS, calm_steps=9)
    without.load_state_dict(recovery.state_dict())
    assert state(without) == (4, 0), "there is no such relief here"
