"""FSDP2 that reduces with the last micro-batch, as accelerate does: the same collectives and bits."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

from tests.helpers.counting import Launches
from tests.integrations.real.trainers import (
    Loss,
    Result,
    distance,
    fsdp2_on_cpu,
    lose_memory,
    make,
    on_ranks,
    result,
)
from tests.integrations.real.ways import FSDP2
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
WITH_LAST = Adaptive(search=False, sync_each_batch=False)


def trained(
    kind: str, options: Adaptive | None, lost: Loss | None = None, **settings: Any
) -> Result:
    """The result of a training, with its reduce-scatters and the branches of accelerate that were taken."""
    taken: list[str] = []
    clip = Accelerator.clip_grad_norm_

    def clipping(self: Any, parameters: Any, *args: Any, **named: Any) -> Any:
        taken.append(f"is_fsdp2 {self.is_fsdp2}")
        taken.append(f"sharded {all(isinstance(m, FSDPModule) for m in self._models)}")
        return clip(self, parameters, *args, **named)

    settings = FSDP2 | {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5} | settings
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Accelerator, "clip_grad_norm_", clipping),
        Launches() as launches,
    ):
        trainer = make(kind, options, folder, **settings)
        left = lose_memory(trainer, lost) if lost else lambda: 0
        trainer.train()
        assert not left()
        found = result(trainer)
    scatters = sum(count for name, count in launches.counts.items() if "scatter" in name)
    found.more = {"scatters": scatters, "branches": {*taken}}
    return found


def beside_plain(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    fsdp2_on_cpu()
    plain, ours = trained(kind, None, **settings), trained(kind, WITH_LAST, **settings)
    each = trained(kind, Adaptive(search=False), **settings)
    searching = Adaptive(memory_limit="64MiB", sync_each_batch=False)
    searched = trained(kind, searching, **settings)
    lost = [
        trained(kind, WITH_LAST, Loss(step, rank), **settings) for step, rank in ((0, 1), (2, 0))
    ]
    return {
        "branches": plain.more["branches"] | ours.more["branches"],
        "scatters": [one.more["scatters"] for one in (plain, ours, each)],
        "weights": torch.equal(plain.weights, ours.weights),
        "logs": plain.without_times() == ours.without_times(),
        "lost": max(distance(one, plain) for one in lost),
        "searched": distance(searched, plain),
        "found": searched.sizes,
    }


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sft", {}), ("trainer", {}), ("trainer", {"bf16": True}), ("dpo", {})],
)
def test_the_same_as_accelerate(kind: str, settings: dict[str, Any]) -> None:
    for seen in on_ranks(beside_plain, 2, kind, settings):
        assert seen["branches"] == {"is_fsdp2 True", "sharded True"}
        plain, ours, each = seen["scatters"]
        assert ours == plain and each == 4 * plain
        assert seen["weights"] and seen["logs"]
        close = 1e-2 if settings else 1e-6
        assert seen["lost"] <= close and seen["searched"] <= close and seen["found"][0] > 4
