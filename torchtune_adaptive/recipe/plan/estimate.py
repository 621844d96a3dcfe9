"""What a config is estimated to take, by arithmetic: no model is built for it, and torch is not imported."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.core import knobs
from torchtune_adaptive.planner import Peak, estimate
from torchtune_adaptive.recipe.plan.request import PlanRequest
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import COPIES
from torchtune_adaptive.recipe.settings.knob_table import SHARDED_LAYERS, configured_checkpoint

_SHAPES = Path(__file__).with_name("decoders.json")  # made by docs/make/decoders.py
_ADAPTERS_OF_MLP = ("w1", "w2", "w3")
_STATE = {"torch.optim.AdamW": 4.0, "torch.optim.Adam": 4.0, "torchao.optim.AdamW8bit": 2 + 2 / 64}
"""Bytes of the state for each number; of 8 bits, with a scale of 4 bytes for each block of 256."""


def estimated(plan: PlanRequest) -> Peak | None:
    """The peak at the configured batch size; None for a config that no estimate is right for."""
    asked = plan.asked
    decoder = _decoder(asked.cfg.get("model") or {})
    how = _finetuning(asked, plan.ranks)
    if decoder is None or how is None:
        return None
    rows = asked.batch(plan.ranks).micro_batch
    return estimate.estimate(decoder, how, rows, plan.length, plan.device)


def _decoder(model: DictConfig) -> estimate.Decoder | None:
    """The shape that a block of a config gives; None if it is not known."""
    module, _, name = str(model.get("_component_")).rpartition(".")
    name = re.sub("^qlora_", "lora_", name)
    if shape := json.loads(_SHAPES.read_text()).get(f"{module}.{name}"):
        return estimate.Decoder(**shape)
    return None


def _finetuning(asked: Asked, ranks: int) -> estimate.Finetuning | None:
    """How a config trains; None if some of it is not in the formulas."""
    cfg, model = asked.cfg, asked.cfg.get("model")
    state = _STATE.get(str(cfg.optimizer.get("_component_")))
    checkpoint = configured_checkpoint(asked)
    unknown = (
        asked.kind.name not in ("full", "lora"),
        state is None,
        checkpoint == "operations",
        asked["compile"],
        asked["device"] == "cpu",
        asked["dtype"] not in ("bf16", "fp16"),
        asked.settings.recompute_loss,
        asked.settings.dropout != "torch" and model.get("lora_dropout"),
        asked.sharers > 1,
        asked[COPIES] > 1,
        model.get("use_dora"),
        not str(cfg.loss.get("_component_")).endswith(".CEWithChunkedOutputLoss"),
        asked.packed(),
        asked.images,
    )
    if any(unknown):
        return None
    assert state is not None
    adapted = None
    if asked.kind.adapters:
        names = {*model.lora_attn_modules}
        names |= {*_ADAPTERS_OF_MLP} if model.get("apply_lora_to_mlp") else set()
        names |= {"output"} if model.get("apply_lora_to_output") else set()
        adapted = frozenset(names)
    fused = bool(cfg.optimizer.get("fused")) or "torchao" in cfg.optimizer._component_
    return estimate.Finetuning(
        ranks=ranks,
        adapted=adapted,
        adapter_rank=int(model.get("lora_rank", 8)),
        dropout=bool(model.get("lora_dropout")),
        quantized=asked.quantized_weights,
        state=state,
        copied=0 if fused or asked["optimizer_in_bwd"] else 2,
        in_backward=asked["optimizer_in_bwd"],
        checkpointed=partial(knobs.is_checkpointed, checkpoint),
        offloads=asked[knobs.OFFLOADING],
        chunks=int(cfg.loss.get("num_output_chunks", 8)),
        apart=frozenset(asked[SHARDED_LAYERS] or ()),
        micro_batches=min(asked.accumulation, 2),
        reshards=asked[knobs.RESHARD],
        on_host=asked["fsdp_cpu_offload"],
    )
