"""A run whose configurations take known times, for the search for the fastest one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune.data import padded_collate_sft

from tests.helpers.accelerator import Card, CardMemory
from tests.helpers.knobs import Training, config_of
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.watchdog import Watchdog
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.asked import Asked

PLENTY = 1 << 40


ROWS = 4


LENGTH = 24


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Modelled(TorchDispatchMode):
    """Adds up the seconds that operations would take: by their FLOPs, their bytes, and their number."""

    def __init__(self, memory: Timed) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))  # a sharded tensor's shape is being worked out
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        seconds = 1e-6 + sum(leaf.nbytes for leaf in given) / 5e9
        if func in PRODUCTS:
            seconds += 2 * args[-2].numel() * args[-1].shape[-1] / 1e9
        self._memory.modelled += seconds
        return result


class Timed:
    """Memory of a device with a clock of its own."""

    modelled = 0.0
    runs = True
    """Whether the clock runs, which takes time in each operation."""

    @contextmanager
    def running(self: Any) -> Iterator[None]:
        with super().running(), Modelled(self) if self.runs else nullcontext():  # type: ignore[misc]
            yield

    def clock(self) -> float:
        return self.modelled


class TimedMemory(Timed, SimulatedMemory):
    """That of the simulated device."""


class TimedCard(Timed, CardMemory):
    """That of a card, of which another process has what is not to be had."""

    @property
    def limit(self) -> int:
        return self._card.total - self._card.neighbour

    @limit.setter
    def limit(self, limit: int) -> None:
        self._card.neighbour = self._card.total - limit


Memory = TimedMemory | TimedCard


def memory_of(device: str) -> Memory:
    if device == "cpu":
        return TimedMemory(PLENTY)
    card = Card(PLENTY)
    card.install(pytest.MonkeyPatch())  # the rank ends with it
    return TimedCard(card)


Run = tuple[Prober, RowsToTry]


def run_of(
    device: str, kind: str = "full", memory: Memory | None = None, layers: int = 4, **settings: Any
) -> tuple[Run, Any]:
    batch = {"batch_size": ROWS, "gradient_accumulation_steps": 1}
    cfg = config_of(kind, "fp32", 0.0, device=device, **batch, **{"model.num_layers": layers})
    trained = Training(cfg, memory or memory_of(device))
    numbers = random.Random(0)
    rows = [[numbers.randrange(16) for _ in range(numbers.randrange(8, LENGTH))] for _ in range(64)]
    dataset = [{"tokens": row, "labels": row} for row in rows]
    ranks = trained.ranks
    adaptive = AdaptiveSettings(
        **{"use_fastest_configuration": True, "probe_length": LENGTH, "headroom": 0.0, **settings}
    )
    prober = Prober(
        trained.step,
        ranks,
        Watchdog(ranks, 20.0, on_duty=False),
        replace(Asked.of(cfg), settings=adaptive),
    )
    rows_to_try = RowsToTry(
        Data(dataset, SimpleNamespace(pad_id=0), padded_collate_sft),
        SampleOrder(len(dataset), ranks.size, shuffle=True),
        Split(ROWS, 1, ranks.size),
        RowLengths(dataset, cfg, ranks, adaptive.cache),
    )
    return (prober, rows_to_try), trained
