"""A search for the largest micro-batch: what is remembered, what is predicted, and trials."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtune_adaptive.common import Cache, cache_folder
from torchtune_adaptive.core import Ranks, SizeTrial, strategies

log = logging.getLogger(__name__)


@dataclass
class SizeSearch:
    """One search: tries each size at most once, in the order that cache, prediction and strategy suggest."""

    trial: Callable[[int], SizeTrial]
    """A function that tries a size."""
    first: SizeTrial
    """The trial of one row that came before the search."""
    sizes: tuple[int, ...]
    """The sizes that may be found, ascending."""
    strategy: strategies.Strategy | Literal["predict"]
    ranks: Ranks
    cache: Cache[int]
    """The sizes that earlier searches found."""
    predicted: Callable[[SizeTrial | None], int] = lambda after: 0
    """The largest size that should fit, corrected by a trial; 0 where there is no prediction."""
    tried: dict[int, SizeTrial] = field(default_factory=dict)

    @staticmethod
    def remembered(setting: bool | str) -> Cache[int]:
        """The sizes that searches found, kept where the setting ``cache`` says."""
        folder = cache_folder(setting, "batch_sizes")
        return Cache(folder, "batch size", lambda n: type(n) is int and n >= 1)

    def result(
        self, about: dict[str, Any], known: int | None
    ) -> strategies.SearchResult[SizeTrial]:
        """Search, or confirm what an earlier search found, and correct the cache.

        Args:
            about: everything that the result depends on.
            known: the size that an earlier part of this run has found.
        """
        # From rank 0, or ranks with different caches would diverge.
        remembered = known or self.ranks.from_rank_zero(self.cache.get(about))
        found: strategies.SearchResult[SizeTrial] | None = None
        if remembered is not None and remembered in self.sizes:
            found = self._confirm(remembered)
        if found is None and self.strategy == "predict":
            found = self._by_prediction()
        if found is None:
            strategy = "extrapolate" if self.strategy == "predict" else self.strategy
            found = strategies.find_largest(strategy, self.sizes, self._trial)
        if self.ranks.is_zero and found.size is not None and found.status.is_proof:
            self.cache.put(about, found.size)
        return strategies.SearchResult(found.size, found.status, tuple(self.tried.values()))

    def _trial(self, size: int) -> SizeTrial:
        if size not in self.tried:
            self.tried[size] = self.trial(size)
            log.info(self.tried[size].line())
        return self.tried[size]

    def _confirm(self, size: int) -> strategies.SearchResult[SizeTrial] | None:
        """The size that was found before, if it is still the largest."""
        log.info(f"A previous identical run found {size}; verifying with one trial.")
        trial = self._trial(size)
        if not trial.fits:
            log.info("It no longer fits; searching again.")
            return None
        larger = [other for other in self.sizes if other > size]
        if larger and self._has_room_for(larger[0], trial) and self._trial(larger[0]).fits:
            # Whatever was short of memory then, e.g. because of another process, is not any more.
            log.info("More fits now; searching again.")
            return None
        return strategies.SearchResult(size, strategies.Status.REMEMBERED, ())

    def _has_room_for(self, size: int, trial: SizeTrial) -> bool:
        """Whether the line through the peaks of one row and of a trial leaves room for a larger size."""
        peak, one = trial.deciding.peak_bytes, self.first.deciding.peak_bytes
        each_row = (peak - one) / (trial.size - 1) if trial.size > 1 else peak
        return peak + each_row * (size - trial.size) <= trial.deciding.usable_bytes

    def _by_prediction(self) -> strategies.SearchResult[SizeTrial] | None:
        """Try what is predicted, and again as long as trials correct the prediction upwards."""
        last: SizeTrial | None = None
        while (at := bisect_right(self.sizes, self.predicted(last)) - 1) >= 0:
            if last is not None and self.sizes[at] <= last.size:
                break
            trial = self._trial(self.sizes[at])
            if not trial.fits:
                break
            last = trial
        if last is not None:
            return strategies.SearchResult(last.size, strategies.Status.PREDICTED, ())
        if self.tried:
            log.info(
                "It does not fit: the prediction was too high. Falling back to a normal search."
            )
        return None
