"""The token budget that an earlier search found, kept from run to run beside the sizes in rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.common import Cache, cache_folder
from torchtune_adaptive.core import Budget, Ranks


def budget_of(measured: list[list[int]]) -> Budget:
    """A budget, as it is saved."""
    return Budget(tuple((length, rows) for length, rows in measured))


@dataclass(frozen=True)
class RememberedBudget:
    """The budget of one search."""

    about: dict[str, Any]
    """Everything that it depends on."""
    ranks: Ranks
    cache: Cache[list[list[int]]]

    @classmethod
    def of(cls, setting: bool | str, ranks: Ranks, about: dict[str, Any]) -> RememberedBudget:
        """The budget kept where the setting ``cache`` says."""
        folder = cache_folder(setting, "batch_sizes")
        return cls(about, ranks, Cache(folder, "token budget", _is_budget))

    def get(self) -> Budget | None:
        """The budget that rank 0 remembers, or ranks with different caches would diverge."""
        found = self.ranks.from_rank_zero(self.cache.get(self.about))
        return budget_of(found) if found else None

    def put(self, budget: Budget) -> None:
        if self.ranks.is_zero:
            self.cache.put(self.about, [list(each) for each in budget.measured])


def _is_budget(value: Any) -> bool:
    """Whether it has rows for ascending lengths."""
    try:
        lengths, rows = zip(*value, strict=True)
    except (TypeError, ValueError):
        return False
    numbers = all(type(one) is int and one >= 1 for one in (*lengths, *rows))
    return numbers and sorted({*lengths}) == [*lengths]
