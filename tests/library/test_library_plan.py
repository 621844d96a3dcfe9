"""The library's predictions are what a step takes on the simulated device; misuse is refused in one line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import run_ranks
from torchtune_adaptive import (
    AdaptiveStep,
    NoPrediction,
    Plan,
    UsageError,
    find_batch_size,
    plan_batch_size,
)

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

WIDTH = 64
ROWS = 37
MEMORY = "2MiB"


def build(sharded: bool, width: int = WIDTH, replicated: bool = False) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
    model = nn.Sequential(*layers)
    if replicated:
        return DistributedDataParallel(model)
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def build_for_gpu() -> nn.Module:
    model = build(False)
    model[0].compile(dynamic=False)
    return fully_shard(model)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss = (model(batch["inputs"]) - batch["targets"]).square().sum()
    return loss, batch["targets"].numel()


def built_in(
    loss: str, model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """With a loss that needs probabilities, labels of -1 and 1, or nothing of the kind."""
    outputs, targets = model(batch["inputs"]), batch["targets"]
    if loss == "binary_cross_entropy":
        outputs, targets = outputs.sigmoid(), targets.sigmoid()
    function = getattr(F, loss)
    return function(outputs, targets, reduction="sum"), targets.numel()


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.randn(rows, WIDTH), "targets": torch.randn(rows, WIDTH)}


def two_rows_at_most(rows: int) -> dict[str, torch.Tensor]:
    return batch(min(rows, 2))


def planned(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "build": partial(build, sharded=False),
        "optimizer": adam,
        "forward": forward,
        "worst_case": batch,
        "gpu": "cpu",
        "memory": MEMORY,
        "headroom": 0.0,
        "timeout": 100.0,
    }
    settings |= changes
    return plan_batch_size(settings.pop("build"), **settings)


def measured(made: Any, accumulation: int, forward: Any) -> tuple[int, int]:
    """The peak of a step, and the largest micro-batch that a search finds."""
    model = made()
    run = partial(forward, model)
    step = AdaptiveStep(
        model, adam(model.parameters()), run, max_grad_norm=1.0, memory_limit=MEMORY
    )
    rows = batch(ROWS)
    for _ in range(3):
        step.train_step.memory.watch()
        for _ in range(accumulation):
            step.train_step.forward_backward(rows)
        step.train_step.apply()
    peak = step.train_step.memory.usage().peak_bytes
    del rows  # the simulated device counts it while it exists
    found = find_batch_size(
        step, batch, accumulation=accumulation, rounding="none", headroom=0.0, ceiling=1 << 13
    )
    return peak, int(found)


LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "l1_loss")
PLANNED = {
    "two micro-batches": (1, 2, forward),
    "two ranks": (2, 1, forward),
    "two replicas": (2, 2, forward),
    # Losses of one number, in whose backward pass there are many.
    **{loss: (1, 1, partial(built_in, loss)) for loss in LOSSES},
}


@pytest.mark.rotating
@pytest.mark.parametrize(("ranks", "accumulation", "forward"), PLANNED.values(), ids=PLANNED)
def test_what_is_planned_is_what_is_measured(ranks: int, accumulation: int, forward: Any) -> None:
    replicated = ranks * accumulation > 2
    made = partial(build, sharded=ranks > 1, replicated=replicated)
    [(peak, largest), *_] = run_ranks(measured, ranks, made, accumulation, forward)
    found = planned(
        build=made,
        forward=forward,
        ranks=ranks,
        rows=ROWS,
        accumulation=accumulation,
        max_grad_norm=1.0,
    )
    assert found.peak == found.allocated == sum(found.parts.values()) == peak  # to the byte
    assert found.largest == largest
    assert found.parts["parameters"] > 0 and found.parts["activations"] > 0


_WITHOUT_TORCHTUNE = """
import sys
import torchtune_adaptive
assert "torch" not in sys.modules, "quick commands must not wait for torch"
for name in torchtune_adaptive.__all__:
    getattr(torchtune_adaptive, name)
from tests.helpers.library import Trained, collate, rows_of
from tests.library.test_library_plan import planned
from torchtune_adaptive import find_batch_size, steps_of
run = Trained("alone", memory_limit="1MiB", measure_noise=True)
size = find_batch_size(run.step, lambda rows: collate(rows_of(rows)), ceiling=8)
assert size == 8
for rows in steps_of(rows_of(32), 16):
    assert run.step(rows, collate, size).noise is not None
assert planned().largest > 100
import torchtune
"""


@pytest.mark.exhaustive
def test_the_library_needs_neither_torchtune_nor_torchao(tmp_path: Path) -> None:
    """Not in the process that traces, either, which inherits where modules are looked for."""
    for name in ("torchtune", "torchao"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is blocked')\n")
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT_TORCHTUNE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr.strip().endswith("torchtune is blocked"), done.stderr


def test_a_plan_for_a_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logging.getLogger("torchtune_adaptive")
    monkeypatch.setattr(ours, "propagate", True)
    with caplog.at_level(logging.INFO, ours.name):
        found = planned(build=build_for_gpu, gpu="h100", memory=None, ranks=8, ceiling=500)
    assert found.largest == found.rows == 500
    assert 0 < sum(found.parts.values()) <= found.allocated <= found.peak <= found.usable_bytes
    assert any("h100-80gb" in line for line in found.assumptions)
    assert any("as if nothing were compiled" in line for line in found.assumptions)
    assert not torch.distributed.is_initialized() and not hasattr(torch, "fakegpu")
    assert caplog.messages == ["Tracing a step in a process of its own, for at most 100 s."]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forward": lambda model, batch: None}, "forward: .* cannot be imported"),
        ({"memory": None}, "memory: a CPU has none of its own"),
        ({"ranks": 0}, "ranks: 0 must be a whole number, 1 or more"),
    ],
)
def test_misuse_is_refused_at_once(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        planned(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"worst_case": two_rows_at_most}, "worst_case: .* so it has too few rows"),
        ({"ranks": 2}, "there are 2 ranks, but nothing reduces its gradients"),
        ({"build": partial(build, sharded=False, width="x")}, "build: it failed on the meta"),
    ],
)
def test_misuse_that_only_tracing_finds(changes: dict[str, Any], why: str) -> None:
    with pytest.raises((UsageError, NoPrediction), match=why) as refused:
        planned(**changes)
    assert "\n" not in str(refused.value)
