"""Find the largest micro-batch that fits, given only a function that tries one.

A search takes the sizes that may be returned (``candidates``, ascending) and a function that tries one of
them (``trial``). It never returns a size that it has not tried, and it returns every trial it made.

Every strategy narrows the same bracket: the largest size known to fit and the smallest known not to. They
differ only in which size inside the bracket they try next. So they agree wherever memory grows with size,
and they always terminate: each trial shrinks the bracket.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:  # settings name strategies, and do without torch
    from torchtune_adaptive.core.search.trial import SizeTrial

Way = TypeVar("Way")
Strategy = Literal["extrapolate", "bisect", "halve"]

LARGEST_LEAP = 32
"""An estimate is trusted up to this many times the largest size measured: a line through sizes 1 and 2 is
mostly the constant part of memory, and a wild guess costs a batch of that many rows in host memory."""

WRONG_ESTIMATES_BEFORE_BISECTING = 2
"""Number of times that memory may miss its line: after that, it is not a line."""

STEP_BELOW_A_FAILED_ESTIMATE = 1 / 16
"""Estimates are off by a few percent; the next try goes this fraction of the bracket below a failed one."""


class Status(Enum):
    """Why a search ended."""

    NEXT_DOES_NOT_FIT = "the next size does not fit"
    CEILING = "it is the largest size allowed"
    NOTHING_FITS = "not even the smallest size fits"
    PREDICTED = "it was predicted, and it fits"
    REMEMBERED = "an earlier run found it, and it still fits"

    @property
    def is_proof(self) -> bool:
        """Whether the search has shown its size to be the largest."""
        return self in (Status.NEXT_DOES_NOT_FIT, Status.CEILING)


@dataclass(frozen=True)
class SearchResult:
    """The size found (``None`` if nothing fits), why the search ended there, and all trials."""

    size: int | None
    status: Status
    trials: tuple[SizeTrial, ...]


def find_largest(
    strategy: Strategy, candidates: Sequence[int], trial: Callable[[int], SizeTrial]
) -> SearchResult:
    """Find the largest candidate that fits; candidates are in ascending order."""
    bracket = _Bracket(candidates)
    next_index = STRATEGIES[strategy](bracket)
    while not bracket.closed:
        index = next(next_index)
        bracket.narrow(index, trial(candidates[index]))
    return bracket.result()


class _Bracket:
    """The state of a search: indices into the candidates; ``low`` fits and ``high`` does not."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = candidates
        self.low = -1
        self.high = len(candidates)
        self.trials: list[SizeTrial] = []

    @property
    def closed(self) -> bool:
        return self.high - self.low <= 1

    @property
    def failed_once(self) -> bool:
        return self.high < len(self.candidates)

    def narrow(self, index: int, trial: SizeTrial) -> None:
        self.trials.append(trial)
        if trial.fits:
            self.low = index
        else:
            self.high = index

    def inside(self, index: int) -> int:
        """The index nearest to ``index`` that narrows the bracket."""
        return max(self.low + 1, min(index, self.high - 1))

    def at_least(self, size: float) -> int:
        return self.inside(bisect_left(self.candidates, size))

    def at_most(self, size: float) -> int:
        return self.inside(bisect_right(self.candidates, size) - 1)

    def result(self) -> SearchResult:
        if self.low < 0:
            return SearchResult(None, Status.NOTHING_FITS, tuple(self.trials))
        status = Status.NEXT_DOES_NOT_FIT if self.failed_once else Status.CEILING
        return SearchResult(self.candidates[self.low], status, tuple(self.trials))


def _halve(bracket: _Bracket) -> Iterator[int]:
    """Halve from the ceiling until a size fits; then search the sizes that were skipped."""
    size: float = bracket.candidates[-1]
    while bracket.low < 0:
        yield bracket.at_most(size)
        size = bracket.candidates[min(bracket.high, len(bracket.candidates) - 1)] / 2
    yield from _bisect(bracket)


def _bisect(bracket: _Bracket) -> Iterator[int]:
    """Double until a size does not fit, then bisect."""
    while True:
        if bracket.failed_once:
            yield (bracket.low + bracket.high) // 2
        elif bracket.low < 0:
            yield 0
        else:
            yield bracket.at_least(2 * bracket.candidates[bracket.low])


def _extrapolate(bracket: _Bracket) -> Iterator[int]:
    """Follow a line through the two largest sizes that fit, and try just below where memory runs out.

    Memory is only piecewise linear, so the estimate is confirmed: step up until a size fails, or down until
    one fits. A size that the line rules out is tried only if that ends the search.
    """
    while len(bracket.trials) < 2:
        yield bracket.low + 1
    wrong_estimates = 0
    while wrong_estimates < WRONG_ESTIMATES_BEFORE_BISECTING:
        estimate = _end_of_the_line([trial for trial in bracket.trials if trial.fits])
        index = bracket.at_most(estimate)
        expected_to_fit = bracket.candidates[index] <= estimate
        if expected_to_fit and bracket.failed_once and wrong_estimates:
            step = round((bracket.high - bracket.low) * STEP_BELOW_A_FAILED_ESTIMATE)
            index = bracket.inside(min(index, bracket.high - max(1, step)))
        yield index
        wrong_estimates += bracket.trials[-1].fits is not expected_to_fit
    yield from _bisect(bracket)


def _end_of_the_line(fitting: Sequence[SizeTrial]) -> float:
    """The size at which a line through the two largest sizes that fit runs out of memory."""
    smaller, larger = sorted(fitting, key=lambda trial: trial.size)[-2:]
    bytes_per_row = (smaller.free_bytes - larger.free_bytes) / (larger.size - smaller.size)
    if bytes_per_row <= 0:  # noise: no usable line, so double as a bisection would
        return 2 * larger.size
    return min(larger.size + larger.free_bytes / bytes_per_row, LARGEST_LEAP * larger.size)


STRATEGIES: dict[Strategy, Callable[[_Bracket], Iterator[int]]] = {
    "extrapolate": _extrapolate,
    "bisect": _bisect,
    "halve": _halve,
}


def fewest(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest number up to ``most`` that fits, by bisection; ``most`` is known to fit.

    More of them take less memory, as of layers that are checkpointed. All but ``most`` have been tried.
    """
    if not most or fits(0):  # first, as it may be enough
        return 0
    return 1 + bisect_left(range(1, most), True, key=fits)


@dataclass
class WaysThatFit(Generic[Way]):
    """What trials say about ways that are partly ordered by the memory that they need.

    Of two of which one certainly needs as much as the other, it is also the faster one: the other only
    does more over again.
    """

    needs_as_much: Callable[[Way, Way], bool]
    """A test whether the first of two ways certainly needs no less memory than the second."""
    line: Callable[[Way], Hashable]
    """The line that a way is in: those in the same one differ in how much they do over again."""
    fitting: list[Way] = field(default_factory=list)
    too_large: list[Way] = field(default_factory=list)

    def learn(self, way: Way, fits: bool) -> None:
        """Take the result of a trial."""
        (self.fitting if fits else self.too_large).append(way)

    def fits(self, way: Way) -> bool | None:
        """Whether a way fits; None if that is not known."""
        if way in self.fitting or any(self.needs_as_much(other, way) for other in self.fitting):
            return True
        if way in self.too_large or any(self.needs_as_much(way, other) for other in self.too_large):
            return False
        return None

    def open_below(self, way: Way, ways: Sequence[Way]) -> list[Way]:
        """This way and those in its line that need no more, as far as it is not known whether they fit.

        One of them that does not fit shows that this one does not.
        """
        line = [each for each in ways if self.line(each) == self.line(way)]
        return [each for each in line if self.needs_as_much(way, each) and self.fits(each) is None]

    def next(self, way: Way, ways: Sequence[Way]) -> Way:
        """The way to try, of those that are ranked from the fastest, to learn whether this one fits.

        It is this one, as long as nothing that needs as much has failed: it may be enough. Then it is the
        middle of what is left of the line.
        """
        if not any(self.needs_as_much(each, way) for each in self.too_large):
            return way
        below = self.open_below(way, ways)
        return below[len(below) // 2]
