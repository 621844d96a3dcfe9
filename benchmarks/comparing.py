"""How near predictions are to what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def summary(errors: Sequence[float]) -> str:
    """The median, the ninth tenth and the largest of differences."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[-(-9 * len(sizes) // 10) - 1]
    shares = (statistics.median(sizes), ninth, sizes[-1])
    half, most, every = (f"{100 * share:.1f} %" for share in shares)
    return (
        f"{len(sizes)} peaks: half are within {half}, nine of ten within {most}, all within {every}"
    )


def _ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; there are no ties."""
    published, predicted, n = _ranks(one), _ranks(other), len(one)
    squares = sum((a - b) ** 2 for a, b in zip(published, predicted, strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))
