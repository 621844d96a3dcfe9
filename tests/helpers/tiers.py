"""Which tests and cases a tier runs: a function of their names and of a number, and of nothing else.

What is chosen is chosen by hashes, so that no two choices keep step with each other, however the numbers of
successive runs jump.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

PLACES = 1 << 32
SWEEP = 10


@dataclass(frozen=True)
class Case:
    """A test, or one of its cases, as far as a choice needs to know it.

    Attributes:
        name: its node id.
        exhaustive: whether it is left to the rest in any case.
        sampled: whether the quick tier proves only a part of it.
        rotating: how many cases of its test the quick tier runs; None: all of them.
        alternating: whether the quick tier runs a third of such tests of its file.
        sweep: whether it is one of very many, of which the rest takes one in ``SWEEP``.
    """

    name: str
    exhaustive: bool = False
    sampled: bool = False
    rotating: int | None = None
    alternating: bool = False
    sweep: bool = False

    @property
    def test(self) -> str:
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @cached_property
    def place(self) -> int:
        return place(self.name)


def place(text: str) -> int:
    """Where a hash puts a text, in a ring of ``PLACES``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def quick(cases: Iterable[Case], number: int) -> set[str]:
    """The names of what the quick tier runs."""
    by_file: dict[str, dict[str, list[Case]]] = {}
    for case in cases:
        if not case.exhaustive:
            by_file.setdefault(case.file, {}).setdefault(case.test, []).append(case)
    chosen: set[str] = set()
    for tests in by_file.values():
        alternating = [test for test, (first, *_) in tests.items() if first.alternating]
        left = _first(alternating, 2 * len(alternating) // 3, number)
        for test, of_one_test in tests.items():
            if test not in left:
                names = [case.name for case in of_one_test]
                chosen |= _first(names, of_one_test[0].rotating or len(names), number)
    return chosen


def _first(names: Sequence[str], most: int, number: int) -> set[str]:
    """So many of the names, others with each number."""
    if most >= len(names):
        return set(names)
    return set(sorted(names, key=lambda name: place(f"{number} {name}"))[:most])


def rest(cases: Iterable[Case], number: int) -> list[str]:
    """The names of what the quick tier leaves out or proves only a part of, in the order of their places; the
    number says where to begin."""
    cases = [*cases]
    proved = quick(cases, number)
    owed = [case for case in cases if case.sampled or case.name not in proved]
    taken = [c for c in owed if not c.sweep or place(f"{number} {c.name}") % SWEEP == 0]
    begin = place(f"{number}")
    taken.sort(key=lambda case: ((case.place - begin) % PLACES, case.name))
    return [case.name for case in taken]


def between(first: int, end: int, name: str) -> bool:
    """Whether a case has a place from the first to the end, which is not included."""
    return (place(name) - first) % PLACES < ((end - first) % PLACES or PLACES)
