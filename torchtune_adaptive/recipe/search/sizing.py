"""The size of micro-batches: given, known, remembered or found, and always tried.

A run does several things in micro-batches of sizes of their own: it trains and validates and, where it makes
its rows itself, generates and scores. Each is a ``ToSize``: in rows where they are taken to be equally long,
in tokens where they are not. All are sized with everything resident, in one snapshot (``Probe``).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torchtune_adaptive.common import Cache, cache_folder
from torchtune_adaptive.core import Ranks, SizeTrial, strategies

log = logging.getLogger(__name__)

Found = TypeVar("Found")
FoundRows = strategies.SearchResult


@dataclass(frozen=True, kw_only=True)
class ToSize(ABC, Generic[Found]):
    """Something that a run does in micro-batches, whose size is wanted."""

    KEPT: ClassVar[tuple[str, Callable[[Any], bool]]]
    """What a size is called where it is kept, and whether what is read there can be one."""

    nothing_fits: Callable[[SizeTrial], Exception]
    """A function that makes the error where not even one row fits."""
    about: Mapping[str, Any]
    """Everything that the size depends on."""
    known: Any = None
    """The size that an earlier part of this run has found, as a checkpoint has it: a number of rows, or pairs
    of a length and the rows that fit. The run keeps to it if it can."""

    @classmethod
    def cache(cls, setting: bool | str) -> Cache[Any]:
        """The sizes that runs have found, kept where the setting ``cache`` says."""
        return Cache(cache_folder(setting, "batch_sizes"), *cls.KEPT)

    @abstractmethod
    def _confirmed(self, earlier: Any) -> Found | None:
        """The size that was found before, as it is kept, if one trial shows that it is still right."""

    @abstractmethod
    def _searched(self) -> Found:
        """The size by as many trials as it takes; raises if not even one row fits."""

    @abstractmethod
    def _to_keep(self, found: Found) -> Any:
        """What is kept of a size that was found; None if nothing is."""

    def find(self, ranks: Ranks, cache: bool | str) -> Found:
        """Find the size, or confirm what was found before, and correct what is remembered."""
        kept = self.cache(cache)
        # From rank 0, or ranks with different caches would diverge.
        earlier = self.known or ranks.from_rank_zero(kept.get(self.about))
        found = self._confirmed(earlier) if earlier else None
        if found is None:
            found = self._searched()
        if ranks.is_zero and (value := self._to_keep(found)) is not None:
            kept.put(self.about, value)
        return found


@dataclass(frozen=True, kw_only=True)
class InRows(ToSize[FoundRows]):
    """What is sized in rows: each size is tried at most once."""

    KEPT = "batch size", lambda n: type(n) is int and n >= 1

    trial: Callable[[int], SizeTrial]
    """A function that tries a size."""
    sizes: Sequence[int]
    """The sizes that may be found, ascending."""
    strategy: strategies.Strategy | Literal["predict"]
    first: SizeTrial
    """The trial of one row that came before."""
    predicted: Callable[[SizeTrial | None], int] = lambda after: 0
    """The largest size that should fit, corrected by a trial; 0 where there is no prediction."""
    tried: dict[int, SizeTrial] = field(default_factory=dict)

    def _to_keep(self, found: FoundRows) -> int | None:
        return found.size if found.status.is_proof else None

    def _try(self, size: int) -> SizeTrial:
        if size not in self.tried:
            self.tried[size] = self.trial(size)
            log.info(self.tried[size].line())
        return self.tried[size]

    def _result(self, size: int, status: strategies.Status) -> FoundRows:
        return FoundRows(size, status, tuple(self.tried.values()))

    def _searched(self) -> FoundRows:
        if self.strategy == "predict" and (predicted := self._by_prediction()) is not None:
            return predicted
        strategy = "extrapolate" if self.strategy == "predict" else self.strategy
        found = strategies.find_largest(strategy, self.sizes, self._try)
        if found.size is None:
            raise self.nothing_fits(found.trials[-1])
        return self._result(found.size, found.status)

    def _confirmed(self, earlier: int) -> FoundRows | None:
        if earlier not in self.sizes:
            return None
        log.info(f"A previous identical run found {earlier}; verifying with one trial.")
        trial = self._try(earlier)
        if not trial.fits:
            log.info("It no longer fits; searching again.")
            return None
        larger = [other for other in self.sizes if other > earlier]
        if larger and self._has_room_for(larger[0], trial) and self._try(larger[0]).fits:
            # Whatever was short of memory then, e.g. because of another process, is not any more.
            log.info("More fits now; searching again.")
            return None
        return self._result(earlier, strategies.Status.REMEMBERED)

    def _has_room_for(self, size: int, trial: SizeTrial) -> bool:
        """Whether the line through the peaks of one row and of a trial leaves room for a larger size."""
        peak, one = trial.deciding.peak_bytes, self.first.deciding.peak_bytes
        each_row = (peak - one) / (trial.size - 1) if trial.size > 1 else peak
        return peak + each_row * (size - trial.size) <= trial.deciding.usable_bytes

    def _by_prediction(self) -> FoundRows | None:
        """Try what is predicted, and again as long as trials correct the prediction upwards."""
        last: SizeTrial | None = None
        while (at := bisect_right(self.sizes, self.predicted(last)) - 1) >= 0:
            if last is not None and self.sizes[at] <= last.size:
                break
            trial = self._try(self.sizes[at])
            if not trial.fits:
                break
            last = trial
        if last is not None:
            return self._result(last.size, strategies.Status.PREDICTED)
        if self.tried:
            log.info(
                "It does not fit: the prediction was too high. Falling back to a normal search."
            )
        return None
