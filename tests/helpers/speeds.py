"""Speeds that were measured on real GPUs, and what was predicted without them."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "speed_anchors.md"


def once_blind() -> dict[tuple[str, str], list[float]]:
    """By GPU and row: what was published, predicted, and predicted with the attention of then."""
    text = RESULTS.read_text().partition("## Formerly blind rows")[2].partition("\n## ")[0]
    row = r"\| (\S+-80gb) \| ([^|]+) \| ([\d,]+) \| ([\d,]+) \| \S+ \| ([\d,]+) \|"
    found = re.findall(row, text)
    return {
        (gpu, name): [float(n.replace(",", "")) for n in numbers] for gpu, name, *numbers in found
    }
