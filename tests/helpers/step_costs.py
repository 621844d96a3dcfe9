"""What a healthy step asks of the host: counts, which no other work on the machine changes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.common import launcher
from torchtune_adaptive.core.private import groups_here, launches_of


@dataclass(frozen=True)
class Costs:
    """What a step has asked of the host."""

    calls: int
    """Functions that Python has called."""
    waits: int
    """Times that the host has waited for numbers on the device."""
    of_store: int
    """Requests to a store, by Python."""
    agreements: int
    """Exchanges of ranks on the host, in groups of ours."""
    collectives: int
    """Collectives of the group of all ranks."""

    def __sub__(self, other: Costs) -> Costs:
        return Costs(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class _Waits(TorchDispatchMode):
    """Counts numbers that are read one by one; a list of them is read by no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def costs_of(take_step: Callable[[], object]) -> Costs:
    """What a step costs: the second of two, as the modes of the first one cost calls themselves."""
    with _Waits() as waits:
        take_step()
    ours = [group for group in groups_here() if group.group_desc == launcher.OWN_GROUP]
    everyone = [group for group in groups_here() if group == dist.group.WORLD]
    before = _launched(ours), _launched(everyone)
    profile = cProfile.Profile()
    profile.runcall(take_step)
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    calls = {name: numbers[1] for (_, _, name), numbers in entries.items()}
    return Costs(
        calls=sum(numbers[1] for numbers in entries.values()),
        waits=waits.number + sum(n for name, n in calls.items() if "'tolist' of 'torch._C" in name),
        of_store=sum(n for name, n in calls.items() if "_distributed_c10d.Store" in name),
        agreements=_launched(ours) - before[0],
        collectives=_launched(everyone) - before[1],
    )


def _launched(groups: Sequence[dist.ProcessGroup]) -> int:
    return sum(launches_of(group) or 0 for group in groups)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Any], tuple[torch.Tensor, int]],
    micro_batches: Callable[[], Iterable[Sequence[torch.Tensor]]],
) -> Callable[[], float]:
    """A step as one would write it, with the same arithmetic as ours: losses and gradients are sums over all
    micro-batches, divided once by the number of terms; one rank, or sharded by FSDP."""
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def take_step() -> float:
        terms, total = 0, torch.zeros(())
        for batch in micro_batches():
            loss, weight = forward([tensor.to(device) for tensor in batch])
            loss.backward()
            terms, total = terms + weight, total + loss.detach()
        summed = torch.tensor([float(terms), total])
        if ranks > 1:
            dist.all_reduce(summed)
        terms_of_all, loss_of_all = summed.tolist()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(ranks / terms_of_all)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss_of_all / terms_of_all

    return take_step
