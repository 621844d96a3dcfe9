"""What a config is estimated to take, by arithmetic: no model is built for it, and torch is not imported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
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
_ARGUMENTS = {
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "embed": "embed_dim",
    "intermediate": "intermediate_dim",
    "vocabulary": "vocab_size",
    "longest": "max_seq_len",
}
"""Arguments of builders of any size."""
_ADAPTERS_OF_MLP = ("w1", "w2", "w3")
_STATE = {"torch.optim.AdamW": 4.0, "torch.optim.Adam": 4.0, "torchao.optim.AdamW8bit": 2 + 2 / 64}
"""Bytes of the state for each number; of 8 bits, with a scale of 4 bytes for each block of 256."""


def estimated(plan: PlanRequest, rows: int | None = None) -> Peak | None:
    """The peak of a micro-batch, which is the configured one if ``rows`` is None; None for a config that no
    estimate is right for."""
    asked = plan.asked
    # On older GPUs attention may take more.
    if asked.kind.name not in ("full", "lora") or plan.device.before_ampere:
        return None
    decoder, how = _decoder(asked.cfg.model), _finetuning(asked, plan.ranks)
    if decoder is None or how is None:
        return None
    rows = rows or asked.batch(plan.ranks).micro_batch
    searches = asked.settings.tries_sizes
    return estimate.estimate(decoder, how, rows, plan.length, plan.device, searches)


def _decoder(model: DictConfig) -> estimate.Decoder | None:
    """The shape that a block of a config gives; None if it is not known."""
    shapes = _shapes()
    module, _, name = str(model.get("_component_")).rpartition(".")
    name = re.sub("^qlora_", "lora_", name)
    if shape := shapes.get(f"{module}.{name}"):
        return shape
    # A builder of any size has it in its arguments. What else it is, one of its models shows.
    beginning = f"{module}.{name}_"
    like = next((one for builder, one in shapes.items() if builder.startswith(beginning)), None)
    if like is None or any(key not in model for key in _ARGUMENTS.values()):
        return None
    arguments: dict[str, Any] = {ours: int(model[theirs]) for ours, theirs in _ARGUMENTS.items()}
    layers, heads = arguments["layers"], arguments["heads"]
    head_dim = int(model.get("head_dim") or arguments["embed"] // heads)
    in_each_layer = like.positions >= like.layers
    positions = like.positions // like.layers * layers if in_each_layer else like.positions
    tied = like.tied if "qwen" not in module else False
    return replace(
        like,
        **arguments,
        head_dim=head_dim,
        positions=positions,
        tied=bool(model.get("tie_word_embeddings", tied)),
    )


@cache
def _shapes() -> dict[str, estimate.Decoder]:
    """The shapes of torchtune's models, by builder."""
    rows = json.loads(_SHAPES.read_text())
    return {builder: estimate.Decoder(**row) for builder, row in rows.items()}


def _finetuning(asked: Asked, ranks: int) -> estimate.Finetuning | None:
    """How a config trains; None if some of it is not in the formulas."""
    cfg, model = asked.cfg, asked.cfg.model
    state = _STATE.get(str(cfg.optimizer.get("_component_")))
    checkpoint = configured_checkpoint(asked)
    unknown = (
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
