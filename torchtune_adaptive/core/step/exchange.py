"""The one all-reduce of a step: what the ranks tell each other about it, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from torchtune_adaptive.common import listed
from torchtune_adaptive.core.device.memory import DeviceMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.sizes.noise import NoiseSums
from torchtune_adaptive.core.step.gradients import Scaling, divide, whole
from torchtune_adaptive.core.step.objective import Summed
from torchtune_adaptive.core.step.small_batches import SmallBatches

T = TypeVar("T")
_Told = dict[int, torch.Tensor | float]
"""What a rank tells the others: each number by its place."""


@dataclass(frozen=True)
class StepLost:
    """A rank ran out of memory, and the step left no trace on any; equal on every rank."""

    lost: ClassVar[Literal[True]] = True

    failures: tuple[str | None, ...]
    """The stage in which each rank ran out of memory, or None for those that did not."""
    error: str = ""
    """What a rank has raised instead, if the step was to survive that."""

    @property
    def trouble(self) -> str:
        """Where memory ran out, and on which ranks."""
        ranks: dict[str, list[str]] = {}
        for rank, stage in enumerate(self.failures):
            if stage:
                ranks.setdefault(stage, []).append(str(rank))
        where = (f"in {stage} on {listed('rank', these)}" for stage, these in ranks.items())
        return f"{self.error or 'out of memory'} {', '.join(where)}"


@dataclass(frozen=True)
class StepDone:
    """The outcome of a step that was done, equal on every rank."""

    lost: ClassVar[Literal[False]] = False

    weight: int
    """The weight of the objective, over all ranks: the tokens that were predicted, or the pairs compared."""
    loss: float
    """Mean loss of those, before the step."""
    gradient_norm: float | None
    """The norm of the gradients before clipping, where they are clipped."""
    retries: int
    """The number of times that the allocators of all ranks freed cached memory to continue."""
    stop: bool
    """Whether a rank has been asked to stop."""
    overflow: bool
    """Whether a gradient overflowed under loss scaling, so that the optimizer has not stepped."""
    noise: NoiseSums | None
    """The noise in the gradient, as far as it is measured and the step says anything about it."""
    metrics: Mapping[str, float]
    """Means, over the same terms, of what the objective reports besides the loss."""
    alike: bool = True
    """Whether all ranks had the same fingerprint."""
    asked: bool = False
    """Whether a rank ``asks``."""


StepOutcome = StepDone | StepLost
"""The outcome of a step; ``lost`` tells which."""


@dataclass(frozen=True)
class ForwardDone(Generic[T]):
    """The outcome of a pass without gradients that was done on all ranks."""

    lost: ClassVar[Literal[False]] = False

    result: T
    """What it gave on this rank."""
    stop: bool = False
    """Whether a rank has been asked to stop."""


class Total(IntEnum):
    """The places of what the ranks sum, each by its first."""

    WEIGHT = 0
    LOSS = 1
    SQUARED_GRADIENT_NORM = 2
    FAILED = 3
    RETRIES = 4
    # Four for gradient noise, even where it is not measured: so measuring changes no sum's rounding.
    NOISE = 5
    STOP = 9
    # Of these two, the ranks have the same only if the square of the sum is that of as many equal terms.
    FINGERPRINT = 10
    SQUARED_FINGERPRINT = 11
    ASKED = 12
    METRICS = 13


@dataclass
class Exchange:
    """Sums up over all ranks what each has to tell about a step.

    Nothing here allocates memory on the device, so a rank that has run out of it can take part; see
    Note [Failure before a collective] in ``step.failures``.
    """

    ranks: Ranks
    counts_rows: bool
    """Whether the rows of this rank count: of the ranks that hold the same ones, those of one do."""
    memory: DeviceMemory
    """The device's memory, whose allocation retries are told."""
    device: torch.device
    metrics: Sequence[str]
    """The names of what the objective reports besides the loss."""
    noise: SmallBatches
    scaling: Scaling
    """The factors that turn gradients into those of the mean loss."""
    stop_requested: Callable[[], bool]
    """Whether this rank has been asked to stop."""

    def __post_init__(self) -> None:
        slots = Total.METRICS + len(self.metrics)
        self._totals = torch.zeros(slots, dtype=torch.float64, device=self.device)
        self._places = self._totals.unbind()
        if self.ranks.size > 1:
            # To load a kernel takes memory, of which the first step may leave none.
            norm, loss = torch.zeros_like(self.number), torch.zeros((), device=self.device)
            self._tell({Total.WEIGHT: 0.0, Total.LOSS: loss, Total.SQUARED_GRADIENT_NORM: norm})
        self.memory.end_step()  # what was before is of no step
        self.asks = False
        """Whether this rank asks all others to exchange something after the step."""
        self.follows_others = False
        """Whether the allocator has blocks of other sizes, as generation leaves them, before the step."""
        self.begin()

    @property
    def number(self) -> torch.Tensor:
        """A number on the device, for anything between two steps: it takes no memory."""
        return self._places[0]

    def begin(self) -> None:
        """Begin a step, of which there is nothing to tell yet."""
        self.loss: torch.Tensor | None = None  # summed over terms, and over micro-batches
        self._metrics: torch.Tensor | None = None  # summed likewise
        self._weight = 0

    def add(self, summed: Summed, weight: int) -> None:
        """Add what a micro-batch has to tell."""
        if summed.metrics is not None:
            sums = torch.stack([whole(summed.metrics[name]).double() for name in self.metrics])
            self._metrics = sums if self._metrics is None else self._metrics + sums
        self._weight += weight
        loss = whole(summed.loss.detach())
        # Copied, as the next micro-batch may write where this one's was returned.
        self.loss = loss.clone() if self.loss is None else self.loss + loss

    def run(
        self, failed: bool, squared_norm: torch.Tensor | None, fingerprint: int | None = None
    ) -> StepDone | None:
        """Tell the others, in the one moment of a step when the host waits for the device.

        Args:
            failed: whether this rank has failed.
            squared_norm: its part of the squared norm of the gradient, where that is wanted.
            fingerprint: a number of at most 20 bits, where the ranks should have the same. Then sums of its
                square are exact for 8,192 ranks.

        Returns:
            The outcome of the step; None if a rank has failed.
        """
        told: _Told = {Total.FAILED: 1.0} if failed else self._healthy(squared_norm)
        if fingerprint and not failed:
            told[Total.FINGERPRINT], told[Total.SQUARED_FINGERPRINT] = fingerprint, fingerprint**2
        # The first one frees what was left of other sizes, and says nothing about the step.
        if (retries := self.memory.end_step()) > self.follows_others:
            told[Total.RETRIES] = retries - self.follows_others
        self.follows_others = False
        if self.stop_requested():
            told[Total.STOP] = 1.0
        if self.asks:
            told[Total.ASKED] = 1.0
        summed = self._over_ranks(told) if self.ranks.size > 1 else self._here(told)
        return None if summed[Total.FAILED] > 0 else self._unpacked(summed)

    def _healthy(self, squared_norm: torch.Tensor | None) -> _Told:
        if self.loss is None:
            raise RuntimeError("a step needs at least one micro-batch before it can be applied")
        told: _Told = dict(enumerate(self.noise.sums(), Total.NOISE))
        if self.counts_rows:
            told[Total.WEIGHT], told[Total.LOSS] = self._weight, self.loss
            if self._metrics is not None:
                told.update(enumerate(self._metrics, Total.METRICS))
        if squared_norm is not None:
            told[Total.SQUARED_GRADIENT_NORM] = squared_norm
        return told

    def _over_ranks(self, told: _Told) -> list[float]:
        self._tell(told)
        dist.all_reduce(self._totals)
        return self._totals.tolist()

    def _tell(self, told: _Told) -> None:
        self._totals.zero_()
        for at, value in told.items():
            if isinstance(value, torch.Tensor):
                self._places[at].copy_(value)
            else:
                self._places[at].fill_(value)

    def _here(self, told: _Told) -> list[float]:
        # Nothing is launched, and only the first tensor is waited for.
        summed = [0.0] * len(self._places)
        for at, value in told.items():
            summed[at] = float(value)
        return summed

    def _unpacked(self, summed: list[float]) -> StepDone:
        weight, squared = summed[Total.WEIGHT], summed[Total.SQUARED_GRADIENT_NORM]
        means = [divide(each, weight) for each in summed[Total.METRICS :]]
        return StepDone(
            weight=int(weight),
            loss=divide(summed[Total.LOSS], weight),
            gradient_norm=self.scaling.norm(squared, weight),
            retries=int(summed[Total.RETRIES]),
            stop=summed[Total.STOP] > 0,
            overflow=self.scaling.overflows(squared),
            noise=self.noise.over_ranks(summed[Total.NOISE : Total.STOP], weight, squared),
            metrics=dict(zip(self.metrics, means, strict=True)),
            alike=self.ranks.size * summed[Total.SQUARED_FINGERPRINT]
            == summed[Total.FINGERPRINT] ** 2,
            asked=summed[Total.ASKED] > 0,
        )
