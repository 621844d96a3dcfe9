"""What is left of a backward pass that failed, and what a group has counted or was seen to launch."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.core.private import launches_of


def counted_launches(device: str) -> dict[str, int]:
    """By how much each kind of collective raises the count of the default group, which has one rank."""
    group = dist.group.WORLD
    assert group is not None
    mine, other = torch.ones(4, device=device), torch.zeros(4, device=device)
    # Their names since torch 2.13, or before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    launches: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: gather(other, mine, group=group),
        "reduce-scatter": lambda: scatter(other, mine, group=group),
        "all-reduce": lambda: dist.all_reduce(mine, group=group),
    }
    found = {}
    for name, launch in launches.items():
        before = launches_of(group)
        launch()
        after = launches_of(group)
        assert before is not None and after is not None, f"{name}: the group does not count"
        found[name] = after - before
    return found


class Kept:
    """Something that a node of a graph holds."""


class Keeping(torch.autograd.Function):
    """Holds something until backward, which may fail."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, kept: Kept, fails: bool) -> torch.Tensor:
        ctx.kept, ctx.fails = kept, fails
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fails:
            raise torch.OutOfMemoryError("injected")
        return gradient, None, None


def fail_in_backward(device: str, nodes: int = 6) -> Callable[[], int]:
    """Fail in the first node of a backward pass when others are ready.

    Returns:
        A function that counts those that are alive.
    """
    value = torch.ones(2, device=device, requires_grad=True)
    held = [Kept() for _ in range(nodes + 1)]
    alive = weakref.WeakSet(held)
    # Of the nodes that are ready, the last that was made is the first to run.
    made = [Keeping.apply(value, kept, kept is held[-1]) for kept in held]
    loss = torch.stack(made).sum()
    del made, held
    try:
        loss.backward()
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("nothing has failed")
    return lambda: len(alive)


class Launches(TorchDispatchMode):
    """Counts the collectives of floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.counts[name.strip("_").replace("_base", "").replace("_tensor_coalesced", "")] += 1
        return func(*args, **kwargs or {})
