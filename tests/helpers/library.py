"""The library interface on a tiny model of plain torch, spread over the ranks in every supported way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.faults import FailingMemory
from torchtune_adaptive import AdaptiveStep
from torchtune_adaptive.library import step as step_module

# torch 2.13 renamed it.
gather_with_gradient = (
    getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
)
WIDTH = 4
Row = tuple[torch.Tensor, torch.Tensor]


def tiny_model(
    way: str,
    layers: int = 2,
    width: int = WIDTH,
    compute_in: torch.dtype | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:
    """The same on every rank, spread in a way: ``alone``, ``fsdp``, ``parts`` (each by itself), ``hsdp``,
    ``ddp``, or ``whole``: as ``fsdp``, but the first weight is frozen and not sharded."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )
    model = wrap(model)
    if way == "ddp":
        return DistributedDataParallel(model)
    if way in ("fsdp", "parts", "whole", "hsdp"):
        ranks = dist.get_world_size()
        shape = (2, ranks // 2) if way == "hsdp" else (ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(param_dtype=compute_in, reduce_dtype=compute_in)
        whole = {next(model.parameters()).requires_grad_(False)} if way == "whole" else None
        for part in (*model.children(), *(() if way == "parts" else (model,))):
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole)
    return model


def rows_of(count: int, seed: int = 0, width: int = WIDTH) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, count, width, generator=generator)
    return list(zip(*both, strict=True))


def collate(rows: list[Row]) -> Row:
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets)


class Trained:
    """A model, its optimizer and its step."""

    def __init__(
        self,
        way: str,
        *,
        layers: int = 2,
        width: int = WIDTH,
        compiled: str | None = None,
        compute_in: torch.dtype | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.model = model or tiny_model(way, layers, width, compute_in, wrap)
        if compiled:
            self.model.compile(backend=compiled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = AdaptiveStep(self.model, self.optimizer, self.forward, **settings)

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return F.mse_loss(self.model(inputs).float(), targets, reduction="sum"), targets.numel()


class Communicating(Trained):
    """A program whose forward launches collectives over all ranks: some follow the number of rows."""

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        seen = torch.full((1,), float(len(inputs)))
        dist.all_reduce(seen)
        outputs = self.model(inputs).float()
        everyones = gather_with_gradient(outputs, 0, dist.group.WORLD)
        loss = F.mse_loss(outputs, targets, reduction="sum") + everyones.square().sum() / seen
        return loss.squeeze(), targets.numel()


class InContext(Communicating):
    """The same, where all ranks are said to hold parts of the same rows."""

    def __init__(self, way: str, **settings: Any) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        super().__init__(way, context_mesh=mesh, **settings)


class SizedByData(Trained):
    """A program that sends rows to ranks by what is in them, as experts do."""

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        inputs, _ = batch
        first = self.of_the_first(inputs)
        sent = [first, len(inputs) - first]
        counts = torch.zeros(2)
        dist.all_to_all_single(counts, torch.tensor(sent).float())
        received = [int(count) for count in counts]
        dist.all_to_all_single(inputs.new_empty(sum(received), WIDTH), inputs, received, sent)
        return super().forward(batch)

    def of_the_first(self, inputs: torch.Tensor) -> int:
        """The number of rows that the first rank gets."""
        return int((inputs[:, 0] > 0).sum())


class SizedOnOne(SizedByData):
    """The same, where one of two ranks always sends one part and gets one, as in a rotation."""

    def of_the_first(self, inputs: torch.Tensor) -> int:
        return super().of_the_first(inputs) if dist.get_rank() else 0


class SentToOne(SizedByData):
    """The same, where ranks hold parts of the same rows, and send all to the first: it alone gets parts."""

    def __init__(self, way: str, **settings: Any) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        super().__init__(way, context_mesh=mesh, **settings)

    def of_the_first(self, inputs: torch.Tensor) -> int:
        return len(inputs)


class Experts(nn.Module):
    """Two linear layers on two ranks, to which all ranks send rows, by what is in them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weights = torch.eye(WIDTH) + torch.arange(2.0)[:, None, None] / 10
        self.weight = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))
        self._group = mesh.get_group()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = (rows[:, 0] > 0).long()
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=2)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        there, here = received.tolist(), sent.tolist()
        exchange = functional.all_to_all_single_autograd
        [weight] = self.weight.to_local()  # type: ignore[attr-defined]
        mine = exchange(rows[order], there, here, self._group)
        return exchange(mine @ weight, here, there, self._group)[order.argsort()]


class WithExperts(Trained):
    """A program with experts; FSDP spreads each over the ranks that have it, and all else over all."""

    def __init__(self, way: str, **settings: Any) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shards", "experts"))
        first, last = tiny_model("alone").children()
        experts = fully_shard(Experts(mesh["experts"]), mesh=mesh["shards"])
        experts.set_gradient_divide_factor(float(ranks))  # they get the rows of all, too
        model = nn.Sequential(first, experts, last)
        super().__init__(way, model=fully_shard(model, mesh=mesh._flatten()), **settings)


class PointToPoint(Trained):
    """A program whose first rank sends to the second, as a pipeline does."""

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        if dist.get_rank() == 0:
            dist.send(torch.zeros(1), 1)
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)
        return super().forward(batch)


def failing(
    way: str, kind: type[Trained] = Trained, **settings: Any
) -> tuple[Trained, FailingMemory]:
    """One whose device runs out of memory where it is told to."""
    memory = FailingMemory()
    real, step_module.device_memory = step_module.device_memory, lambda *_: memory
    try:
        return kind(way, **settings), memory
    finally:
        step_module.device_memory = real
