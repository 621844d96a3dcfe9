"""The order of samples: a function of the epoch and nothing else.

It is torchtune's own, that of its distributed sampler: it deals the samples out to the ranks one by one, and
repeats the first few if they do not divide. Each rank keeps only its own samples, in four bytes each. For
data of more rows than memory should hold there is another order, of which nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchtune_adaptive.core.rows.permutation import Permutation

_MOST_LOOKED_AT_IN_MEMORY = 10_000_000


class Samples(Protocol):
    """Samples in some order, as an array or found when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Samples: ...

    def __array__(self) -> npt.NDArray[Any]: ...

    def tolist(self) -> list[int]: ...


@dataclass(frozen=True)
class SampleOrder:
    """The order in which the samples of an epoch are used."""

    samples: int
    """The number of samples in the dataset."""
    ranks: int
    """The number of data-parallel ranks that the run began with, each of which gets as many. On others, a
    resumed run keeps the order."""
    shuffle: bool
    """Whether the order is another one in each epoch, or always the dataset's."""
    seed: int = 0
    streaming: bool = False
    """Whether samples are shuffled by a ``Permutation``, not in memory; the order is another one then."""

    @classmethod
    def to_look_at(cls, samples: int) -> SampleOrder:
        """An order in which to look at some of the samples, which takes little memory."""
        return cls(samples, 1, shuffle=True, streaming=samples > _MOST_LOOKED_AT_IN_MEMORY)

    @property
    def rows_per_rank(self) -> int:
        """The number of samples of each rank in an epoch."""
        return -(-self.samples // self.ranks)

    @property
    def per_epoch(self) -> int:
        """The number of samples of all ranks in an epoch; those that are repeated count again."""
        return self.rows_per_rank * self.ranks

    def epoch(self, epoch: int) -> Samples:
        """The samples of an epoch, in order; rank ``r`` of ``n`` uses those at ``r``, ``r + n``, ..."""
        return self.share(epoch, 0, 1)

    def share(self, epoch: int, rank: int, ranks: int, used: int = 0) -> Samples:
        """The samples of an epoch that a rank uses, of those after the first ``used``."""
        places = range(used + rank, self.per_epoch, ranks)
        if not self.shuffle:
            return _Computed(places, self.samples)
        if self.streaming:
            permutation = Permutation(self.samples, self.seed, epoch)
            return _Computed(places, self.samples, permutation)
        order = self._shuffled(epoch)
        mine = order[places.start :: ranks]
        if len(mine) == len(places) == len(order):
            return mine
        repeated = [place % self.samples for place in places[len(mine) :]]
        # A copy, so that what is not this rank's does not stay in memory.
        return np.concatenate([mine, order[np.array(repeated, dtype=np.intp)]])

    def _shuffled(self, epoch: int) -> npt.NDArray[np.signedinteger]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        # The numbers that are drawn do not depend on the type.
        dtype = _dtype_of(self.samples)
        return torch.randperm(self.samples, generator=generator, dtype=dtype).numpy()


def _dtype_of(samples: int) -> torch.dtype:
    return torch.int32 if samples <= torch.iinfo(torch.int32).max else torch.int64


@dataclass(frozen=True)
class _Computed:
    """Samples that are found when they are asked for: those at some places of the dataset, or of a
    permutation of it."""

    places: range
    """Places in an epoch; those after the last sample are the first ones again."""
    samples: int
    permutation: Permutation | None = None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, places: slice, /) -> Samples:
        return replace(self, places=self.places[places])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        asked = self.places
        places = np.arange(asked.start, asked.stop, asked.step) % self.samples
        return np.asarray(self.permutation(places) if self.permutation else places, dtype=dtype)

    def tolist(self) -> list[int]:
        found: list[int] = self.__array__().tolist()
        return found
