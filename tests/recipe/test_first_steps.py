"""A run that does not search begins with a step as large as the others, computed from a small one."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.first_steps import in_use
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner import TracedRun
from torchtune_adaptive.planner.memory.recorded_step import first_of_its_size, kept_by
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.self_check import SMALL_RUN
from torchtune_adaptive.recipe.tracing.tracer import Tracer

pytestmark = pytest.mark.ranks

ROWS, LENGTH = 5, 128
LORA = {
    "model._component_": "torchtune.models.llama2.lora_llama2",
    "model.lora_attn_modules": ["q_proj", "v_proj"],
    "model.lora_rank": 4,
    "model.lora_alpha": 8,
}
QLORA = {**LORA, "model.quantize_base": True, "model.embed_dim": 256, "model.intermediate_dim": 256}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (1, {}),
    "two ranks": (2, {}),
    "two ranks, fused": (2, {"optimizer.fused": True}),
    "accumulation": (2, {"gradient_accumulation_steps": 2}),
    "in backward": (1, {"optimizer_in_bwd": True, "clip_grad_norm": None}),
    "in backward, two ranks": (2, {"optimizer_in_bwd": True, "clip_grad_norm": None}),
    "checkpointed": (1, {"enable_activation_checkpointing": True}),
    "8 bits": (1, {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-3}}),
    "LoRA": (1, LORA),
    "LoRA, two ranks": (2, LORA),
    "QLoRA": (1, {**QLORA, "model.num_kv_heads": 4}),
}


def first_steps(changes: dict[str, Any], ranks: int) -> tuple[list[Any], list[Any], int]:
    """A first step of many rows: as it follows from one of few, and as it is traced; and how many blocks it
    keeps."""
    cfg = OmegaConf.create(SMALL_RUN)
    for key, value in {"device": "cuda", **changes}.items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    asked = Asked.of(cfg)
    assert not asked.settings.adapts
    small, large = (Tracer(asked, ranks) for _ in range(2))
    first = small.take_step(*TracedRun.first_size(LENGTH))
    later = small.take_step(ROWS, LENGTH)
    kept = kept_by(first, later)
    as_traced = large.take_step(ROWS, LENGTH)
    return in_use(first_of_its_size(later, kept)), in_use(as_traced.events), len(kept)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", CASES)
def test_a_first_step_of_any_size_follows_from_a_small_one(name: str) -> None:
    ranks, changes = CASES[name]
    [(computed, as_traced, kept)] = run_ranks(first_steps, 1, changes, ranks, join=False)
    assert computed == as_traced
    assert kept
