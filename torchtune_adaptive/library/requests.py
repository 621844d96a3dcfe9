"""What a step is asked for on each rank, compared. The rows may be more on some ranks than on others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torchtune_adaptive.common import UsageError, arguments
from torchtune_adaptive.core import TrainStep
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.division import Division, by_rows, by_tokens
from torchtune_adaptive.library.sampling import DealtRows

_MORE_THAN_ROWS = 1 << 32


class StepRequest(NamedTuple):
    """What a step is asked for on a rank; all but its rows must be the same on every rank."""

    rows: int = 0
    size: int = 0
    by_lengths: bool = False
    groups: tuple[int, ...] | None = None

    def told(self) -> int:
        """A number of 63 bits: a digest of what must be the same, followed by the rows.

        So the smallest and the largest of all ranks tell whether it is, and the fewest and the most rows.
        """
        said = repr(self[1:]).encode()
        digest = int.from_bytes(hashlib.blake2b(said, digest_size=4).digest()) >> 1
        return digest * _MORE_THAN_ROWS + self.rows


class SharedRows:
    """The rows of a step, divided into micro-batches: as many on every rank, however many rows it has.

    Rows have places, as many as the rank has that has the most. On another rank the last ones are empty.
    """

    def __init__(
        self,
        step: TrainStep,
        asked: StepRequest,
        lengths: Sequence[int] | None,
        numbers: Sequence[int],
    ) -> None:
        self.size, self.own = asked.size, asked.rows
        """The size of micro-batches, and the rows of this rank."""
        self.least = self.most = asked.rows
        """The fewest and the most rows of a rank; known once micro-batches are."""
        self.numbers = numbers
        """The number of each row among those of all ranks."""
        self._step, self._asked, self._lengths = step, asked, lengths
        self._divide: Division | None = None

    def divide(self, done: int, size: int) -> list[Sequence[int]]:
        """The places in each micro-batch, but for those in the first ones, which have so many."""
        if self._divide is None:
            self._step.collectives.wait_for_pending()
            if self._lengths is None:
                self._divide = by_rows(self._asked.groups or (self.most,))
            else:
                # An empty place is taken to have a row that is as long as the first one.
                first = self._lengths[0] if self._lengths else 1
                filled = [*self._lengths, *[first] * (self.most - self.own)]
                self._divide = by_tokens(filled, self._step.ranks)
        return self._divide(done, size)

    def parts(self, size: int) -> list[Sequence[int]]:
        """The places of this rank's rows in each micro-batch; it has none in some where others have more."""
        places = self.divide(0, size)
        if self.own == self.most:
            return places
        return [[place for place in part if place < self.own] for part in places]

    def first(self, size: int) -> Sequence[int]:
        """The first of ``parts``, for which others are not waited for if it does not depend on them."""
        if self._lengths is not None:
            return self.parts(size)[0]
        return range(min(size, *(self._asked.groups or (self.own,))[:1]))

    def compare(self, heard: Callable[[], tuple[int, int]]) -> None:
        """Wait for what the ranks were asked for, and check that it goes together."""
        least, most = heard()
        if least < 0:
            raise UsageError("step: another rank was called with arguments that are refused there.")
        (same, self.least), (other, self.most) = (
            divmod(told, _MORE_THAN_ROWS) for told in (least, most)
        )
        if same != other:
            raise _differing(self._step.ranks.gather(self._asked))
        if not self.most:
            raise UsageError("rows: no rank has any. A step needs at least one.")


def shared_rows(
    step: TrainStep,
    rows: Sequence[Any],
    collate_fn: Callable[..., Any],
    size: int,
    lengths: Sequence[int] | None,
    groups: Sequence[int] | None,
    numbers: Sequence[int] | None = None,
    *,
    may_be_none: bool = False,
    at_once: bool = False,
) -> SharedRows:
    """The rows of a step, given the arguments that it is called with on this rank.

    The ranks tell each other what they have. They wait for it before the first collective, or here with
    ``at_once``. ``may_be_none`` is whether this rank may have no rows.
    """
    wrong, asked = None, StepRequest()
    rank, ranks = step.ranks.rank, step.ranks.size
    several = ranks > 1
    try:
        arguments.function("collate_fn", collate_fn)
        size = arguments.whole("size", size)
        count = checks.number_of_rows(rows)
        if not count and not (may_be_none and several):
            raise UsageError(
                "rows: none. Give at least one on every rank. A step in which a rank has none takes a row of "
                "its last step in their place, where there was one."
            )
        if lengths is not None:
            lengths = checks.row_lengths(lengths, count, size)
        groups = checks.row_groups(groups, count, lengths)
        if numbers is not None:
            numbers = checks.row_numbers(numbers, count)
        elif isinstance(rows, DealtRows) and len(rows.numbers) == count:  # or some were added
            numbers = rows.numbers
        else:
            numbers = range(rank, rank + count * ranks, ranks)
        asked = StepRequest(count, size, lengths is not None, groups)
    except UsageError as error:
        wrong = error
    shared = SharedRows(step, asked, lengths, numbers or ())
    if several:
        # One number in one exchange. What differs is asked for where something does.
        heard = step.ranks.begin_spread(-1 if wrong else asked.told())
        step.collectives.pending = heard if wrong else partial(shared.compare, heard)
        if at_once or wrong is not None or lengths is not None:
            step.collectives.wait_for_pending()
    if wrong is not None:
        raise wrong
    return shared


def _differing(asked: Sequence[StepRequest]) -> UsageError:
    """The error where ranks have asked for steps that do not go together."""
    sizes = {each.size for each in asked}
    if len(sizes) > 1:
        return UsageError(
            f"size: {min(sizes)} on one rank and {max(sizes)} on another. Pass the same size on every rank, "
            "as find_batch_size gives it."
        )
    if len({each.by_lengths for each in asked}) > 1:
        return UsageError("lengths: given on one rank and not on another. Pass them on all.")
    one, other = sorted({each.groups for each in asked}, key=str)[:2]
    written = " and ".join(
        f"{'none' if each is None else [*each]} on {which}"
        for each, which in ((one, "one rank"), (other, "another"))
    )
    return UsageError(f"groups: {written}. Pass the same on every rank.")
