"""How many collectives each process group has launched."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import UsageError, launcher
from torchtune_adaptive.core.private import groups_here, launches_of


class Counts:
    """The launches of groups in the segments of a pass, by the groups' own counters."""

    def __init__(self) -> None:
        self._before: dict[str, dict[dist.ProcessGroup, int]] = {}

    def begin(self, segment: str, groups: Iterable[dist.ProcessGroup]) -> None:
        """Begin a segment, in which these groups are looked at."""
        self._before[segment] = {group: _launched_by(group) for group in groups}

    def add(self, segment: str, group: dist.ProcessGroup) -> None:
        """Look at one more group, which has not launched anything in the segment yet."""
        before = self._before[segment]
        if group not in before:
            before[group] = _launched_by(group)

    def launched_in(self, segment: str) -> dict[dist.ProcessGroup, int]:
        """What each group has launched since a segment began; nothing if it has not."""
        before = self._before.get(segment, {})
        return {group: (launches_of(group) or 0) - number for group, number in before.items()}


def groups_of(models: Iterable[nn.Module]) -> set[dist.ProcessGroup]:
    """The groups of the parameters, and that of all ranks."""
    groups = {dist.group.WORLD} if dist.group.WORLD is not None else set()
    for parameter in (p for model in models for p in model.parameters()):
        if isinstance(parameter, DTensor):
            groups |= {*parameter.device_mesh.get_all_groups()}
    return groups


def other_groups(groups: set[dist.ProcessGroup]) -> set[dist.ProcessGroup]:
    """All other groups that count, but not our own. Their launches may be the model's."""
    return {
        group
        for group in groups_here()
        if group not in groups
        and group.group_desc != launcher.OWN_GROUP
        and launches_of(group) is not None
    }


def _launched_by(group: dist.ProcessGroup) -> int:
    number = launches_of(group)
    if number is None:
        raise UsageError(
            f"model: its process group's backend ({dist.get_backend(group)}) does not count what it "
            "launches, so a rank that runs out of memory cannot tell what others wait for. Use NCCL or gloo."
        )
    return number
