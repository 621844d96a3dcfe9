"""Notices collectives that FSDP's hooks do not see, by the groups, which count all that they launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.core.private import launches_of


class Unseen:
    """Counts launches that nobody has announced, on the parameters' groups and on that of all ranks.

    Used while a sequence is recorded, and not in the steps that follow.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._groups = {dist.group.WORLD} if dist.group.WORLD is not None else set()
        for parameter in (p for model in models for p in model.parameters()):
            if isinstance(parameter, DTensor):
                self._groups |= {*parameter.device_mesh.get_all_groups()}
        self._expected: dict[dist.ProcessGroup, int] = {}
        self.count = 0

    def announce(self, *following: dist.ProcessGroup) -> None:
        """Everything so far has been seen, and so will be one launch of each of these groups."""
        for group in self._groups:
            if (launched := launches_of(group)) is not None:
                self._expected[group] = launched + following.count(group)

    def look(self) -> None:
        """Count what has been launched since ``announce`` was last called."""
        for group, expected in self._expected.items():
            self.count += max(0, (launches_of(group) or 0) - expected)
