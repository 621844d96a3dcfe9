"""Sequences with repetitions, extended: what a deep model does, from what two shallow ones do.

A model repeats its layers, so a step is a sequence in which some parts are repeated once for each of them:
forward passes, backward passes, updates of parameters. From two sequences, of which the second has one
repetition more in each such part, every longer one follows.

What a repetition refers to moves with it: to the place where a block was allocated that is freed now, for
example. Such places are linear in the number of the repetition and in how many there are, but for the first
and last repetitions, which keep their distance from the ends. Whatever the two sequences show of this is
verified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_TO_BE_SEEN = 2
"""Repetitions that have to be seen."""
_FAR = 4096
"""Elements that are compared to find out how many are added somewhere."""
_DIFFERENT = 2
"""Number of them whose sizes may differ."""


class NotPeriodic(Exception):
    """Two sequences do not differ by repetitions alone."""


class Element(NamedTuple):
    """An element of a sequence."""

    kind: Any
    sizes: tuple[float, ...] = ()
    """Numbers that are the same in each repetition, as is the kind. Elsewhere they are linear in the number
    of repetitions."""
    refers_to: int | None = None
    """Place in the sequence that it refers to."""
    number: int = 0
    """Another number that moves with the repetition, such as that of a layer."""


class _Stretch(NamedTuple):
    """A part of both sequences, where it begins in each, and the length of each of its repetitions."""

    at_few: int
    at_more: int
    length: int
    repetitions: int
    """Their number in the shorter sequence; the other has one more. 0 if nothing is repeated."""


def extended(few: Sequence[Element], more: Sequence[Element], times: int) -> list[Element]:
    """The sequence with so many repetitions more than ``few`` has, of which ``more`` has one more.

    Raises:
        NotPeriodic: the two differ in another way.
    """
    parts = [*_parts(few, more)]
    found: list[Element] = []
    for part in parts:
        if part.repetitions:
            found += _repeated(few, more, parts, part, times)
        else:
            ends = part.at_few + part.length, part.at_more + part.length
            found += _moved(few[part.at_few : ends[0]], more[part.at_more : ends[1]], times)
    return found


def _moved(few: Sequence[Element], more: Sequence[Element], times: int) -> Iterator[Element]:
    """Elements outside of repetitions, or at a fixed distance from the first or the last one."""
    for one, other in zip(few, more, strict=True):
        if one == other:
            yield one
            continue
        sizes = tuple(a + times * (b - a) for a, b in zip(one.sizes, other.sizes, strict=True))
        to, number = _step(one, other)
        refers_to = None if one.refers_to is None else one.refers_to + times * to
        yield Element(one.kind, sizes, refers_to, one.number + times * number)


def _repeated(
    few: Sequence[Element],
    more: Sequence[Element],
    parts: Sequence[_Stretch],
    part: _Stretch,
    times: int,
) -> Iterator[Element]:
    """A part with its repetitions."""
    length, count = part.length, part.repetitions
    a = [few[part.at_few + n * length :][:length] for n in range(count)]
    b = [more[part.at_more + n * length :][:length] for n in range(count + 1)]
    middle = _middle(a, b, parts)
    for n in range(middle):
        yield from _moved(a[n], b[n], times)
    before = [*_moved(a[middle - 1], b[middle - 1], times)]
    steps = [_step(x, y) for x, y in zip(b[middle - 1], b[middle], strict=True)]
    for n in range(1, times + 1):
        for element, (to, number) in zip(before, steps, strict=True):
            if not to and not number:
                yield element
                continue
            refers_to = None if element.refers_to is None else element.refers_to + n * to
            yield Element(element.kind, element.sizes, refers_to, element.number + n * number)
    for n in range(middle, count):
        yield from _moved(a[n], b[n + 1], times)


def _middle(
    a: Sequence[Sequence[Element]], b: Sequence[Sequence[Element]], parts: Sequence[_Stretch]
) -> int:
    """The number of repetitions before those that are added: where both sequences show that what they refer
    to is linear."""
    columns = [*zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)]
    begins = [part.at_more for part in parts]

    def is_linear(middle: int) -> bool:
        for x, y in columns:
            step = to, _ = _step(y[middle - 1], y[middle])
            if not step == _step(y[middle], y[middle + 1]) == _step(x[middle - 1], x[middle]):
                return False
            if _step(x[middle - 1], y[middle - 1]) != _step(x[middle], y[middle]):
                return False
            # From one repetition to another. What drifts within them does not do so for long.
            there = parts[bisect_right(begins, y[middle].refers_to or 0) - 1]
            if to and not (there.repetitions and to % there.length == 0):
                return False
        return True

    for middle in sorted(range(1, len(a)), key=lambda n: abs(2 * n - len(a))):
        if is_linear(middle):
            return middle
    raise NotPeriodic(f"{len(a)} repetitions show no rule")


def _step(one: Element, other: Element) -> tuple[int, int]:
    """The distance between what two elements refer to, and between their numbers."""
    return (other.refers_to or 0) - (one.refers_to or 0), other.number - one.number


def _parts(few: Sequence[Element], more: Sequence[Element]) -> Iterator[_Stretch]:
    """The parts of two sequences, in order."""
    begun_few = begun_more = at_few = at_more = 0
    while at_few < len(few) or at_more < len(more):
        here = few[at_few : at_few + 1], more[at_more : at_more + 1]
        length = 0 if _same(*here) else _added(few, more, begun_few, at_few, at_more)
        if not length:  # alike, or of a size that depends on the number of repetitions
            at_few, at_more = at_few + 1, at_more + 1
            continue
        start, count = at_few, 0
        repeated = more[at_more : at_more + length]
        while start - length >= begun_few and _same(few[start - length : start], repeated):
            start, count = start - length, count + 1
        before = start - begun_few
        yield _Stretch(begun_few, begun_more, before, 0)
        yield _Stretch(start, begun_more + before, length, count)
        at_more += length
        begun_few, begun_more = at_few, at_more
    yield _Stretch(begun_few, begun_more, at_few - begun_few, 0)


def _same(some: Sequence[Element], others: Sequence[Element]) -> bool:
    """Whether elements are alike but for what moves."""
    if len(some) != len(others):
        return False
    return all(a[:2] == b[:2] for a, b in zip(some, others, strict=True))


def _added(
    few: Sequence[Element], more: Sequence[Element], begun_few: int, at_few: int, at_more: int
) -> int:
    """The number of elements that the longer sequence has more here, which repeat those before; 0 if only
    sizes differ."""
    best, length = _alike(few, more, at_few, at_more), 0
    for added in range(1, (at_few - begun_few) // _TO_BE_SEEN + 1):
        repeated = more[at_more : at_more + added]
        starts = [at_few - number * added for number in range(1, _TO_BE_SEEN + 1)]
        if all(_same(few[start : start + added], repeated) for start in starts):
            alike = _alike(few, more, at_few, at_more + added)
            if alike > best or at_few == len(few):
                best, length = alike, added
    if not best and not length:
        raise NotPeriodic("something is added that repeats nothing")
    return length


def _alike(few: Sequence[Element], more: Sequence[Element], at_few: int, at_more: int) -> int:
    """The number of corresponding elements from here, up to a limit; few of them may differ in sizes."""
    different = number = 0
    ahead = zip(few[at_few : at_few + _FAR], more[at_more : at_more + _FAR], strict=False)
    for number, (one, other) in enumerate(ahead, 1):
        if one.kind != other.kind:
            return number - 1
        if one.sizes != other.sizes:
            different += 1
            if different > _DIFFERENT:
                return number - 1
    return number
