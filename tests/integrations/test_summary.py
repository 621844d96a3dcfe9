"""The line that says how a step is divided."""

from __future__ import annotations

from typing import Any

import pytest

from torchtune_adaptive.integrations.summary import summary

LINES: dict[str, dict[str, Any]] = {
    "16 rows a step = 4 x micro-batch 4 (8 rows: out of memory in forward); was 8 x 2": {
        "why": " (8 rows: out of memory in forward)"
    },
    "16 rows a step = 4 x micro-batch 4, from checkpoint-8": {
        "why": ", from checkpoint-8",
        "before": 4,
    },
    "16 rows a step on each of 2 processes = 1 x micro-batch 16; was 8 x 2": {
        "size": 16,
        "processes": 2,
    },
    "20 rows a step = 3 micro-batches of at most 8; was 10 x 2": {"groups": [20], "size": 8},
    "10 rows a step = 4 micro-batches of at most 4; was 2 x 5": {"groups": [5, 5], "before": 5},
    "16 rows a step = micro-batches of at most 96 tokens (4 of the longest row); was 8 x 2": {
        "size": 96,
        "tokens": True,
        "why": " (4 of the longest row)",
    },
    "1 row a step = 1 x micro-batch 1": {"groups": [1], "size": 1, "before": 1},
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_is_the_sum(line: str) -> None:
    usual = {"groups": [16], "size": 4, "tokens": False, "why": "", "before": 2, "processes": 1}
    assert summary(**usual | LINES[line]) == line
