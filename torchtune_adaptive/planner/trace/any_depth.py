"""Traces of a deep model, at the cost of tracing a few of its layers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torchtune_adaptive.common import AdaptiveBatchingError
from torchtune_adaptive.planner.deep_step import deep_start_up, deep_step
from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.repetition import NotPeriodic
from torchtune_adaptive.planner.told import tell, telling
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.planner.trace.beside import Beside
from torchtune_adaptive.planner.trace.compiled_regions import CompiledRegions

log = logging.getLogger(__name__)

_KEPT = (4, 5, 13)
"""Repetitions of layers that are traced, and one more, until these tell. What offloads works on several
layers at once, so more of them differ from the others."""


class _NeedsAllLayers(NotPeriodic):
    """A step that no model with fewer layers tells anything about, however many of them are left."""


class TracerOfModel(Protocol):
    """A tracer of the steps of one model, as ``StepTracer`` is."""

    set_up: RecordedStep
    needs_all_layers: str
    regions: CompiledRegions | None

    def compile_with(self, other: Any, /) -> None: ...


T = TypeVar("T")
Tracer = TypeVar("Tracer", bound=TracerOfModel)


class _Begun(NamedTuple, Generic[Tracer]):
    """A tracer that has taken its first step."""

    tracer: Tracer
    start_up: StartUp
    removed: int
    """Repetitions that are missing in its model."""
    called: str
    """What to call its model, if that is not the whole one."""

    def ask(self, of: Callable[[_Begun[Any]], T]) -> Callable[[], T]:
        """What a function finds, once it is asked for, as with one that is ``Beside``."""
        return partial(of, self)


@dataclass(frozen=True)
class _Of(Generic[T]):
    """What a function finds with a tracer, for another process, too."""

    take: Callable[[Any], T]
    where: str = ""

    def __call__(self, begun: _Begun[Any]) -> T:
        with telling(begun.called), telling(self.where):
            return self.take(begun.tracer)


class _Shallow(NamedTuple, Generic[Tracer]):
    """Tracers of two models that have fewer layers, the second one repetition more than the first."""

    few: _Begun[Tracer]
    more: _Begun[Tracer] | Beside[_Begun[Tracer]]


class AnyDepth(Generic[Tracer]):
    """The steps of a model, computed from those of two that have fewer of its layers.

    If these do not tell, others are tried that have more, and at last the model itself is traced.

    Args:
        make: function that makes a tracer of the model, to which it applies the shortening.
        first: function that takes the tracer's first step.
        period: number of layers after which something in the first step repeats, besides the layers
            themselves; None if nothing does.
        beside: whether a second process may trace one of the two. Then functions that take steps are pickled,
            and this process has not begun a backward pass.
    """

    def __init__(
        self,
        make: Callable[[Shortening], Tracer],
        first: Callable[[Tracer], RecordedStep],
        period: int | None = 1,
        beside: bool = False,
    ) -> None:
        self._make, self._first, self._period = make, first, period
        self._beside = beside
        self._shallow: dict[tuple[int, int], _Shallow[Tracer] | None] = {}
        # The second of each pair, which is the first of the next one.
        self._more: dict[tuple[int, int], _Begun[Tracer]] = {}
        self._whole: _Begun[Tracer] | None = None

    def start_up(self) -> StartUp:
        """What precedes the steps."""
        return self._computed(self._period, attrgetter("start_up"), deep_start_up)

    def step(
        self, take: Callable[[Tracer], RecordedStep], period: int | None = 1, where: str = ""
    ) -> RecordedStep:
        """A step that a function takes; ``period`` is that of the step, ``where`` what to tell of it."""
        return self._computed(period, _Of(take, where), deep_step)

    def number(self, of: Callable[[Tracer], int]) -> int:
        """A number that is linear in the number of layers."""

        def computed(few: int, more: int, times: int) -> int:
            return few + times * (more - few)

        return self._computed(self._period, _Of(of), computed)

    @property
    def any(self) -> Tracer:
        """A tracer, for what does not depend on the number of layers."""
        shallow = next(filter(None, self._shallow.values()), None)
        return shallow.few.tracer if shallow else self._the_whole().tracer

    def _computed(
        self,
        period: int | None,
        of: Callable[[_Begun[Tracer]], T],
        compute: Callable[[T, T, int], T],
    ) -> T:
        for kept in _KEPT if period else ():
            try:
                if (shallow := self._shallower(kept, period or 1)) is not None:
                    few, more = shallow
                    of_more = more.ask(of)
                    found = of(few), of_more()
                    tell("repeating their layers")
                    return compute(*found, few.removed)
            except _NeedsAllLayers as reason:
                log.debug(f"the whole model is traced: {reason}")
                self._shallow |= dict.fromkeys((each, period or 1) for each in _KEPT)
                break
            except NotPeriodic as reason:
                log.debug(f"{kept} and {kept + 1} repetitions do not tell: {reason}")
            except AdaptiveBatchingError:
                raise
            except Exception as error:  # a model that needs all of its layers
                log.debug(f"{kept} and {kept + 1} repetitions fail: {error}")
            self._drop(kept, period or 1)
        return of(self._the_whole())

    def _shallower(self, kept: int, period: int) -> _Shallow[Tracer] | None:
        """The models of which so many repetitions are kept, and one more; None if that saves nothing."""
        if (kept, period) not in self._shallow:
            least = kept + 2  # fewer than both have
            one_more = Shortening(kept + 1, period)
            few = self._more.get((kept, period))
            more: Beside[_Begun[Tracer]] | None = None
            if few is None:
                more = self._begun_beside(one_more)
                shortening = Shortening(kept, period, least)
                tracer = self._built(shortening)
                # What is compiled is alike in both, and is compiled once.
                if more and (shortening.removed < least or tracer.regions is not None):
                    more.close()
                    more = None
                few = self._begun(tracer, shortening)
            if few.removed >= least:
                if more is None:
                    tracer = self._built(one_more)
                    tracer.compile_with(few.tracer)
                    self._more[kept + 1, period] = self._begun(tracer, one_more, 2)
                found = more or self._more[kept + 1, period]
                self._shallow[kept, period] = _Shallow(few, found)
            else:  # nor would more of them save anything
                self._shallow |= dict.fromkeys((each, period) for each in _KEPT)
                if not few.removed:
                    self._whole = self._whole or few
        return self._shallow[kept, period]

    def _the_whole(self) -> _Begun[Tracer]:
        if self._whole is None:
            shortening = Shortening(sys.maxsize)
            self._whole = self._begun(self._built(shortening), shortening)
        return self._whole

    def _drop(self, kept: int, period: int) -> None:
        """Remember that two models do not tell."""
        dropped = self._shallow.get((kept, period))
        if dropped is not None and isinstance(dropped.more, Beside):
            dropped.more.close()
        self._shallow[kept, period] = None

    def _built(self, shortening: Shortening) -> Tracer:
        tell("building the model")
        tracer = self._make(shortening)
        if shortening.removed and tracer.needs_all_layers:
            raise _NeedsAllLayers(tracer.needs_all_layers)
        return tracer

    def _begun_beside(self, shortening: Shortening) -> Beside[_Begun[Tracer]] | None:
        """The second of two models, in a process of its own if there may be one."""
        may, self._beside = self._beside, False  # once: then backward passes begin
        with suppress(OSError):
            if may:
                return Beside(lambda: self._begun(self._built(shortening), shortening, 2))
        return None

    def _begun(self, tracer: Tracer, shortening: Shortening, which: int = 1) -> _Begun[Tracer]:
        called = f"model {which} of 2 for {shortening.layers} layers" * bool(shortening.removed)
        with telling(called), telling("first step"):
            start_up = StartUp(tracer.set_up, self._first(tracer))
        return _Begun(tracer, start_up, shortening.removed, called)
