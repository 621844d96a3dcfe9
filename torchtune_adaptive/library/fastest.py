"""Choose how many layers are checkpointed, and the micro-batch, by trials and a few timed steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, get_args

from torchtune_adaptive.common import UsageError, announce, arguments, counted
from torchtune_adaptive.core import Probe, Rounding, candidates, strategies
from torchtune_adaptive.library.layers import LayerCheckpointing
from torchtune_adaptive.library.search import BatchSize, CheckedBatch, find_batch_size
from torchtune_adaptive.library.step import AdaptiveStep

log = logging.getLogger(__name__)

_ROUNDS = 3
_STEPS = 2
"""Timed steps of each way in each round; the ways take turns, so that a busy moment meets all."""
_GAIN = 0.01
"""The share of a step's time that a choice must save."""


class FastestSize(BatchSize):
    """The micro-batch that trains fastest, with the layers that are checkpointed."""

    checkpointed: int
    """The number of layers that are checkpointed."""
    gain: float
    """The speed, as a multiple of that with all layers checkpointed, or those that were configured, and the
    largest micro-batch."""
    said: str
    """What was chosen, what it gains, and why no fewer layers are checkpointed."""

    @property
    def why(self) -> str:
        """The same, as ``find_batch_size`` calls its reason."""
        return self.said


@dataclass
class _Way:
    """A way to take a step, and what is known of it."""

    size: int
    layers: str
    """The name of those that are checkpointed."""
    checkpointed: int
    trouble: str = ""
    """What happens with fewer layers checkpointed."""
    seconds: list[float] = field(default_factory=list)

    @property
    def time(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance of the quartiles of its seconds, as a share of the median."""
        low, middle, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / middle


def find_fastest(
    step: AdaptiveStep,
    worst_case: Callable[[int], Any],
    *,
    rows: int,
    ceiling: int | None = None,
    rounding: Rounding = "power_of_two",
    search: strategies.Strategy = "extrapolate",
    headroom: float = 0.05,
) -> FastestSize:
    """Find the number of checkpointed layers and the micro-batch that train fastest, and leave no trace.

    The largest micro-batch with all layers checkpointed comes first. For it, its half, and so on, trials find
    the fewest layers that must be checkpointed, until that is none, and whether those fit that were
    configured. Whole steps of ``rows`` rows are timed in each way, in turns; the time of the slowest rank
    counts. Where nothing gains, the layers that were configured stay checkpointed: by default, all.

    Args:
        step: the step that training will take, with a ``LayerCheckpointing``.
        worst_case: function that makes a micro-batch of so many rows on the host, as in ``find_batch_size``.
        rows: the rows of a step on this rank, the same on every rank.
        ceiling: the largest micro-batch to try; by default, ``rows``.
        rounding: sizes that may be found, as in ``find_batch_size``.
        search: the search for the largest, as there.
        headroom: the share of the capacity that must stay free.

    Raises:
        NothingFits: not even one row with all layers checkpointed.
        UsageError: an argument is not valid, or there is no limit to find.
    """
    if not isinstance(step, AdaptiveStep) or step.layers is None:
        raise UsageError(
            "step: find_fastest chooses among layers. Pass AdaptiveStep(..., "
            "activation_checkpointing=LayerCheckpointing(model.layers))."
        )
    arguments.whole("rows", rows)
    arguments.one_of("rounding", rounding, get_args(Rounding))
    layers = step.layers
    step.checkpoint_layers(layers.layers)
    largest = find_batch_size(
        step,
        worst_case,
        ceiling=min(rows, ceiling or rows),
        accumulation=rows,
        rounding=rounding,
        search=search,
        headroom=headroom,
    )
    sizes = candidates(rounding, int(largest), min(rows, ceiling or rows))
    comparing = _Comparing(step, layers, CheckedBatch(worst_case), rows, sizes, headroom)
    chosen = most = comparing.way(int(largest), layers.layers)
    try:
        chosen, own, said = comparing.choose(most)
    finally:
        step.restore()
        step.checkpoint_layers(chosen.layers)
    found = FastestSize(chosen.size)
    found.status, found.trials = largest.status, largest.trials
    found.checkpointed = chosen.checkpointed
    found.gain = own.time / chosen.time if own.seconds else 1.0
    found.said = said
    announce(log, f"micro-batch {found}: {said}", rank_zero=step.ranks.is_zero)
    return found


@dataclass
class _Comparing:
    """Tries and times ways to take a step; every rank sees the same outcomes, so all decide alike."""

    step: AdaptiveStep
    layers: LayerCheckpointing
    worst: CheckedBatch
    rows: int
    sizes: Sequence[int]
    """Those that may be found, ascending; the last is the largest that fits."""
    headroom: float

    def way(self, size: int, layers: int | str, trouble: str = "") -> _Way:
        """A way with so many layers checkpointed, or those of a name."""
        self.step.checkpoint_layers(layers)
        return _Way(size, self.layers.now, self.layers.checkpointed, trouble)

    def choose(self, most: _Way) -> tuple[_Way, _Way, str]:
        """The fastest way, that with the layers that were configured, and a line about the first.

        If not even one row fits with those, ``most`` is in their place: all layers, and the most rows.
        """
        probe = Probe(
            step=self.step.train_step,
            accumulation=lambda size: -(-self.rows // size),
            headroom=self.headroom,
            entering=log.debug,
        )
        with probe:
            tried = self._ways(probe, most)
            own = next((way for way in tried if way.layers == self.layers.configured), most)
            ways = self._timed(probe, tried) if len(tried) > 1 else tried
        if len(tried) == 1:
            return most, most, f"{self._said(most)}, as no fewer fit"
        if own not in ways or len(ways) == 1:
            kept = own if own in ways else most
            return kept, kept, f"{self._said(kept)}, as memory ran out while steps were timed"
        # Of two that are as fast, the one that checkpoints more has more memory left.
        fastest = min(ways, key=lambda way: (way.time, -way.checkpointed))
        chosen = fastest if fastest.time <= (1 - _GAIN) * own.time else own
        return chosen, own, self._line(chosen, fastest, own)

    def _ways(self, probe: Probe, most: _Way) -> list[_Way]:
        """Each size with the fewest layers, until none must be checkpointed: a size that fits without is then
        not faster than one of these for its size. And the layers that were configured, in the largest of
        these sizes that fits."""
        ways, size, fewest = [most], most.size, most.checkpointed
        anyway = {self.layers.name(0), most.layers}
        missing = {self.layers.configured} - anyway
        while fewest:
            if missing and not self._trouble(probe, size, self.layers.configured):
                ways.append(self.way(size, missing.pop()))
            number, trouble = self._fewest(probe, size)
            if number < fewest:
                fewest = number
                ways.append(self.way(size, fewest, trouble))
            if size == 1:
                break
            size = max(each for each in self.sizes if each <= size // 2)
        return ways

    def _trouble(self, probe: Probe, size: int, layers: int | str) -> str:
        """What happens with micro-batches of this size and these layers checkpointed, if it does not fit."""
        self.step.checkpoint_layers(layers)
        tried = probe.trial(size, self.worst)
        return "" if tried.fits else f"{self.layers.now}: {tried.deciding.trouble}"

    def _fewest(self, probe: Probe, size: int) -> tuple[int, str]:
        """The fewest layers that must be checkpointed with micro-batches of this size, and why no fewer."""
        trouble = ""

        def fits(checkpointed: int) -> bool:
            nonlocal trouble
            found = self._trouble(probe, size, checkpointed)
            trouble = found or trouble
            return not found

        return strategies.fewest(self.layers.layers, fits), trouble

    def _timed(self, probe: Probe, ways: list[_Way]) -> list[_Way]:
        """Those whose steps do not run out of memory, timed."""
        for _ in range(_ROUNDS):
            for way in list(ways):
                self.step.checkpoint_layers(way.layers)
                whole, rest = divmod(self.rows, way.size)
                batches = [self.worst(way.size) for _ in range(whole)]
                batches += [self.worst(rest)] if rest else []
                seconds = probe.timed(f"of micro-batch {way.size}", batches, _STEPS)
                if seconds is None:
                    ways.remove(way)
                else:
                    way.seconds += seconds
        return ways

    def _said(self, way: _Way) -> str:
        layers = self.layers.layers
        which = "all" if way.checkpointed == layers else f"{way.checkpointed} of"
        return f"{which} {counted(layers, 'layer')} checkpointed"

    def _line(self, chosen: _Way, fastest: _Way, own: _Way) -> str:
        gain = own.time / fastest.time
        spread = max(fastest.spread, own.spread)
        is_all = own.checkpointed == self.layers.layers
        line = self._said(chosen)
        if chosen is own:
            line += ", as fewer gain nothing" if is_all else ", as configured: others gain nothing"
        else:
            of = "all" if is_all else f"the {own.checkpointed} that were configured"
            line += f", {gain:.2f} x the speed of {of}"
        if spread > abs(gain - 1):
            line += f", where timings vary by {spread:.0%}"
        return line + (f"; {chosen.trouble}" if chosen.trouble else "")
