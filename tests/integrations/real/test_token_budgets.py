"""Micro-batches that are sized in tokens: what is logged is that of the plain trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.integrations.real.trainers import (
    Loss,
    distance,
    fsdp2_on_cpu,
    on_ranks,
    trained,
)
from tests.integrations.real.ways import FSDP2
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.library import AdaptiveStep

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
SEARCHING = Adaptive(memory_limit="64MiB", token_budget=True, ceiling=6)
AS_CONFIGURED = Adaptive(search=False, token_budget=True)


def compare(kind: str, ways: dict[str, Any]) -> dict[str, Any]:
    settings = ways | {"gradient_accumulation_steps": 4}
    if ways:
        fsdp2_on_cpu()
    plain = trained(kind, None, **settings)
    seen: list[tuple[int, int]] = []
    forward = AdaptiveStep.__call__

    def watched(self: Any, rows: Any, collate: Any, size: int, lengths: Any, *others: Any) -> Any:
        def seeing(some: list[int]) -> Any:  # the numbers of rows
            seen.append((len(some) * max(lengths[number] for number in some), size))
            return collate(some)

        return forward(self, rows, seeing, size, lengths, *others)

    AdaptiveStep.__call__ = watched  # type: ignore[method-assign, assignment]
    searched = trained(kind, SEARCHING, **settings)
    configured = trained(kind, AS_CONFIGURED, **settings)
    AdaptiveStep.__call__ = forward  # type: ignore[method-assign]
    ranks = (0, 1) if dist.is_initialized() else (0,)
    lost = [trained(kind, AS_CONFIGURED, Loss(1 + on, on), **settings) for on in ranks]
    return {
        "far": [distance(one, plain) for one in (searched, configured, *lost)],
        "sizes": [one.sizes for one in (searched, configured, *lost)],
        "within": all(tokens <= size for tokens, size in seen),
        "passes": len(seen),
        "tokens": [
            [entry.get("num_tokens") for entry in one.logs]
            for one in (plain, searched, configured, *lost)
        ],
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "ways"),
    [("sft", 1, {}), ("sft", 2, {}), ("sft", 2, FSDP2), ("dpo", 2, {}), ("trainer", 1, {})],
)
def test_in_tokens(kind: str, ranks: int, ways: dict[str, Any]) -> None:
    found = on_ranks(compare, ranks, kind, ways)
    for seen in found:
        assert max(seen["far"]) <= CLOSE, seen
        assert seen["within"], seen
        (searched, _), (configured, _), *lost = seen["sizes"]
        assert searched * 4 == configured * 6, "six of the longest row, and four"
        assert all(after == before // 2 == configured // 2 for before, after in lost), seen
        assert all(each == seen["tokens"][0] for each in seen["tokens"])
    assert len({seen["passes"] for seen in found}) == 1, "as many on every rank"
