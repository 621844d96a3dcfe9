"""Models in ``DistributedDataParallel``, trained by a step and by a loop as one writes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers.decoder import local_values, same_bits
from torchtune_adaptive import AdaptiveStep

WIDTH, ROWS = 4, 4
SMALL = 1e-4
"""Megabytes of a bucket: a layer or two."""


class Layers(nn.Module):
    """Some layers, of which the parts of ``forward`` can be replaced."""

    def __init__(self, number: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = self.run(layer, inputs).sigmoid()
        return inputs

    def run(self, layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        weight = next(layer.parameters())
        result: torch.Tensor = layer(inputs.to(weight.dtype))
        return result.float()


class Recomputed(Layers):
    """Layers that a backward within the backward computes; one comes three times, and once outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.layers[3] = self.layers[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.layers[0](inputs)
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=True).sigmoid()
        return inputs


class Images(Layers):
    """Convolutions whose weights are not contiguous."""

    def __init__(self) -> None:
        super().__init__(1)
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = self.convolution(inputs.view(-1, 2, 1, 2)).reshape_as(inputs)
        return super().forward(images)


def tied() -> nn.Module:
    model = Layers()
    model.layers[3].weight = model.layers[1].weight
    return model


def partly_frozen() -> nn.Module:
    model = Layers()
    model.layers[1].requires_grad_(False)
    return model


def of_two_dtypes() -> nn.Module:
    model = Layers()
    model.layers[1].bfloat16()
    model.layers[3].bfloat16()
    return model


def with_gradients() -> nn.Module:
    model = Layers()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def compiled() -> nn.Module:
    model = Layers()
    model.compile(backend="aot_eager")
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one bucket": (Layers, {"bucket_cap_mb": 25}),
    "buckets": (Layers, {}),
    "views": (Layers, {"gradient_as_bucket_view": True}),
    "a static graph": (Layers, {"static_graph": True}),
    "tied weights": (tied, {}),
    "frozen weights": (partly_frozen, {}),
    "two dtypes": (of_two_dtypes, {}),
    "channels last": (Images, {}),
    "gradients of zeros": (with_gradients, {}),
    "compiled": (compiled, {"bucket_cap_mb": 25}),
}


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    return [*torch.randn(ROWS, WIDTH, generator=generator)]


class Run:
    """A model in DDP that a step trains, or a loop as one writes it."""

    def __init__(
        self, build: Callable[[], nn.Module] = Layers, wrap: bool = True, **options: Any
    ) -> None:
        self.module = build()
        self.model = self.module
        if wrap:
            self.model = DistributedDataParallel(self.module, **{"bucket_cap_mb": SMALL, **options})
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.5)
        self._step: AdaptiveStep | None = None

    @property
    def step(self) -> AdaptiveStep:
        if self._step is None:
            self._step = AdaptiveStep(self.model, self.optimizer, self.forward)
        return self._step

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.model(batch).square().sum(), batch.numel()

    def take(self, seed: int, size: int) -> Any:
        return self.step(rows(seed), torch.stack, size)

    def take_plainly(self, seed: int, size: int) -> None:
        given = rows(seed)
        for at in range(0, ROWS, size):
            last = at + size >= ROWS
            with nullcontext() if last else self.model.no_sync():  # type: ignore[operator]
                loss, _ = self.forward(torch.stack(given[at : at + size]))
                (loss / (ROWS * WIDTH)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def wrong_bits(names: list[str]) -> list[str]:
    """The models, and sizes of micro-batches, with which weights are not those of plain DDP."""
    wrong = []
    for name, size in product(names, (ROWS, 1)):
        build, options = MODELS[name]
        if "static_graph" in options and size < ROWS:
            continue  # DDP cannot accumulate in its first step then
        plain, ours = (Run(build, **options) for _ in range(2))
        for seed in range(4):
            plain.take_plainly(seed, size)
            ours.take(seed, size)
        if not same_bits(local_values(ours.model), local_values(plain.model)):
            wrong.append(f"{name}, {size}")
    return wrong
