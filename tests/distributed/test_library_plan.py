"""The library's predictions are what a step takes on the simulated device; misuse is refused in one line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.ranks import run_ranks
from torchtune_adaptive import (
    AdaptiveStep,
    NoPrediction,
    Plan,
    UsageError,
    find_batch_size,
    plan_batch_size,
)

WIDTH = 64
ROWS = 37
MEMORY = "2MiB"


def build(sharded: bool, width: int = WIDTH) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
    model = nn.Sequential(*layers)
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def build_for_gpu() -> nn.Module:
    return fully_shard(build(False))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    # Not F.mse_loss: what its kernel returns, one number, lies in memory of the size of its input.
    loss = (model(batch["inputs"]) - batch["targets"]).square().sum()
    return loss, batch["targets"].numel()


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.randn(rows, WIDTH), "targets": torch.randn(rows, WIDTH)}


def two_rows_at_most(rows: int) -> dict[str, torch.Tensor]:
    return batch(min(rows, 2))


def planned(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "build": partial(build, sharded=False),
        "optimizer": adam,
        "forward": forward,
        "batch": batch,
        "gpu": "cpu",
        "memory": MEMORY,
        "headroom": 0.0,
        "timeout": 100.0,
    }
    settings |= changes
    return plan_batch_size(settings.pop("build"), **settings)


def measured(sharded: bool, accumulation: int) -> tuple[int, int]:
    """The peak of a step, and the largest micro-batch that a search finds."""
    model = build(sharded)
    run = partial(forward, model)
    step = AdaptiveStep(
        model, adam(model.parameters()), run, max_grad_norm=1.0, memory_limit=MEMORY
    )
    for _ in range(3):
        step.train_step.memory.watch()
        made = batch(ROWS)
        for _ in range(accumulation):
            step.train_step.forward_backward(made)
        step.train_step.apply()
    peak = step.train_step.memory.usage().peak_bytes
    found = find_batch_size(
        step, batch, accumulation=accumulation, rounding="none", headroom=0.0, ceiling=1 << 13
    )
    return peak, int(found)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1)])
def test_what_is_planned_is_what_is_measured(ranks: int, accumulation: int) -> None:
    sharded = ranks > 1
    [(peak, largest), *_] = run_ranks(measured, ranks, sharded, accumulation, timeout=100)
    found = planned(
        build=partial(build, sharded=sharded),
        ranks=ranks,
        rows=ROWS,
        accumulation=accumulation,
        max_grad_norm=1.0,
    )
    assert found.peak == sum(found.parts.values()) == peak  # to the byte
    assert largest <= found.largest < 1.02 * largest  # a trial holds a little more than a step
    assert found.parts["parameters"] > 0 and found.parts["activations"] > 0


def test_a_plan_for_a_gpu() -> None:
    found = planned(build=build_for_gpu, gpu="h100", memory=None, ranks=8, ceiling=500)
    assert found.largest == found.rows == 500
    assert 0 < found.peak <= found.usable_bytes
    assert any("h100-80gb" in line for line in found.assumptions)
    assert not torch.distributed.is_initialized() and not hasattr(torch, "fakegpu")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forward": lambda model, batch: None}, "forward: .* cannot be imported"),
        ({"memory": None}, "memory: a CPU has none of its own"),
        ({"ranks": 0}, "ranks: 0 must be 1 or more"),
    ],
)
def test_misuse_is_refused_at_once(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        planned(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": two_rows_at_most}, "batch: .* so it has too few rows"),
        ({"ranks": 2}, "there are 2 ranks, but nothing reduces its gradients"),
        ({"build": partial(build, sharded=False, width="x")}, "build: it failed on the meta"),
    ],
)
def test_misuse_that_only_tracing_finds(changes: dict[str, Any], why: str) -> None:
    with pytest.raises((UsageError, NoPrediction), match=why) as refused:
        planned(**changes)
    assert "\n" not in str(refused.value)
