"""What fits of many ways to take a step, known from few trials.

Pure, and without a device: whether a way fits is for the caller to try.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Way = TypeVar("Way")


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
        if any(self.needs_as_much(other, way) for other in self.fitting):
            return True
        if any(self.needs_as_much(way, other) for other in self.too_large):
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
