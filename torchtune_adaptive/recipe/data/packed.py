"""Packed rows: their batches, and the mask that keeps the documents in a row apart.

The mask is made where the rows go to the device, as a part of the step. For a moment that takes two to three
bytes for each pair of positions of each row; where they are not there, the step is lost like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtune.modules import attention_utils

from torchtune_adaptive.recipe.upstream import has_flex_attention


@dataclass(frozen=True)
class PackedMask:
    """The mask of some rows, made when it is moved to a device.

    Until then it is only numbers on the host, so that processes that load data never touch the device.
    """

    lengths: Sequence[Sequence[int]]
    """The lengths of the documents in each row."""

    def to(self, device: torch.device) -> Any:
        """The mask as torchtune makes it: a block mask for flex attention, or a dense one."""
        lengths = [torch.tensor(each) for each in self.lengths]
        if has_flex_attention(device):
            return attention_utils.packed_block_causal_mask(lengths).to(device)
        return attention_utils.create_block_causal_mask(lengths).to(device)


@dataclass(frozen=True)
class ImaginedMask:
    """A dense mask without values, which takes as much memory as that of rows of one document each."""

    rows: int
    length: int

    def to(self, device: torch.device) -> torch.Tensor:
        # torchtune makes that of each row, the last from another of its size, and then one of all.
        parts = self._blocks(self.rows + 1, device)
        mask = self._blocks(self.rows, device)
        del parts
        return mask

    def _blocks(self, number: int, device: torch.device) -> torch.Tensor:
        return torch.empty((number, self.length, self.length), dtype=torch.bool, device=device)


def collate_packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as ``torchtune.data.padded_collate_packed`` makes it, but for the mask, which is made later."""
    batch = {
        name: torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "input_pos")
    }
    return {**batch, "mask": PackedMask([row["seq_lens"].tolist() for row in rows])}
