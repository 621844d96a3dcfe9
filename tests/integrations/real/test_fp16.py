"""fp16 with accelerate's gradient scaler, which it makes for devices only: here it is one for the CPU."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_ACCELERATE,
    SEARCHING,
    Loss,
    Result,
    distance,
    fsdp2_on_cpu,
    lose_memory,
    make,
    on_ranks,
    result,
)
from tests.integrations.real.ways import WAYS
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
SCALES = {"fits": 2.0**14, "overflows": 2.0**19}
"""What losses are multiplied by at first. The second is halved in steps that are left out until it fits."""

CLOSE = 1e-2
"""By how much losses may differ where gradients are rounded to fp16 in other sums."""


def in_fp16(
    kind: str, options: Adaptive | None, scale: float, lost: Loss | None = None, **settings: Any
) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(kind, options, folder, max_steps=8, **settings)
        accelerator = trainer.accelerator
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        if settings.get("fsdp"):
            accelerator.state.fsdp_plugin.set_mixed_precision("fp16", override=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        left = lose_memory(trainer, lost) if lost else lambda: 0
        trainer.train()
        assert not left()
        found = result(trainer)
        found.more["scale"] = accelerator.scaler.get_scale()
        return found


def beside_plain(kind: str, way: str, scale: float, lost: Loss) -> dict[str, Any]:
    if way == "fsdp2":
        fsdp2_on_cpu()
    run = lambda *how: in_fp16(kind, *how, **WAYS.get(way, {}))  # noqa: E731
    plain, ours = run(None, scale), run(AS_ACCELERATE, scale)
    searched, retried = (
        run(replace(SEARCHING, sync_each_batch=False), scale),
        run(AS_ACCELERATE, scale, lost),
    )
    norms = [norm for [norm] in plain.column("grad_norm")]
    return {
        "weights": float((plain.weights - ours.weights).abs().max()),
        "logs": distance(ours, plain, "loss"),
        "scales": [each.more["scale"] for each in (plain, ours, searched, retried)],
        "overflows": [not torch.isfinite(torch.tensor(norm)).item() for norm in norms],
        "searched": distance(searched, plain, "loss"),
        "retried": distance(retried, plain, "loss"),
        "found": searched.sizes,
    }


CASES = [
    ("trainer", "alone", "fits"),
    ("sft", "alone", "overflows"),
    ("sft", "ddp", "overflows"),
    ("sft", "fsdp2", "overflows"),
    ("dpo", "alone", "fits"),
    ("grpo", "ddp", "fits"),
]


@pytest.mark.parametrize(("kind", "way", "scale"), CASES)
def test_beside_the_plain_trainer(kind: str, way: str, scale: str) -> None:
    """Undisturbed to the bit; where micro-batches are others, as far as fp16 goes."""
    count = 1 if way == "alone" else 2
    lost = Loss(step=6, rank=count - 1)
    for seen in on_ranks(beside_plain, count, kind, way, SCALES[scale], lost):
        assert seen["weights"] == seen["logs"] == 0.0
        assert len({*seen["scales"]}) == 1
        assert seen["overflows"][-1] is False
        assert any(seen["overflows"]) == (scale == "overflows")
        if kind != "grpo":  # whose completions are drawn by what fp16 rounds
            assert seen["searched"] <= CLOSE and seen["retried"] <= CLOSE
        assert seen["found"][0] > 4
