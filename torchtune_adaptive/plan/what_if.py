"""The alternatives that a plan is compared with: the same run with one thing changed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.plan.predict import Query
from torchtune_adaptive.plan.request import PlanRequest
from torchtune_adaptive.settings.kinds import kind_of

_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_WHOLE = "torch.nn.CrossEntropyLoss"
_EIGHT_BIT = "torchao.optim.AdamW8bit"

_ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}


@dataclass(frozen=True)
class WhatIf:
    """An alternative: its name, and what to predict for it."""

    name: str
    query: Query


def what_ifs(plan: PlanRequest) -> Iterator[WhatIf]:
    """The alternatives that apply to this config."""
    cfg = plan.cfg
    for name, changes in _changes(cfg):
        changed = OmegaConf.merge(cfg, OmegaConf.create(changes))
        assert isinstance(changed, DictConfig)
        yield WhatIf(name, replace(plan, cfg=changed).query())
    for name, parts in _other_parts(cfg):
        changed = cfg.copy()
        for key, part in parts.items():
            changed[key] = part
        yield WhatIf(name, replace(plan, cfg=changed).query())
    for ranks in (plan.ranks // 2, plan.ranks * 2):
        if ranks:
            yield WhatIf(f"{ranks} rank{'s'[: ranks > 1]}", plan.query(ranks=ranks))
    if plan.device.caching and not plan.device.expandable:
        device = replace(plan.device, expandable=True)
        yield WhatIf("expandable segments", plan.query(device=device))


def _changes(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    full = kind_of(cfg) == "full"
    checkpointing = "enable_activation_checkpointing"
    offloading = "enable_activation_offloading"
    if cfg.get(checkpointing, False):
        yield "no activation checkpointing", {checkpointing: False, offloading: False}
    else:
        selective = {"ac_mode": None} if full else {}
        yield "activation checkpointing", {checkpointing: True, **selective}
    if not cfg.get(offloading, False) and cfg.device != "cpu":
        yield "activations offloaded", {checkpointing: True, offloading: True}
    if cfg.loss._component_ == _CHUNKED:
        yield "loss not in chunks", {"loss": {"_component_": _WHOLE}}
    else:
        yield "loss in chunks", {"loss": {"_component_": _CHUNKED}}
    if not full:
        return
    reshard = not cfg.get("fsdp_reshard_after_forward", True)
    name = "parameters freed after forward" if reshard else "parameters kept after forward"
    yield name, {"fsdp_reshard_after_forward": reshard}
    if not cfg.get("optimizer_in_bwd", False):
        in_backward = {"gradient_accumulation_steps": 1, "clip_grad_norm": None}
        yield "optimizer in backward", {"optimizer_in_bwd": True, **in_backward}
    if cfg.optimizer._component_ == "torch.optim.AdamW":
        fused = not cfg.optimizer.get("fused", False)
        name = "fused optimizer" if fused else "optimizer not fused"
        yield name, {"optimizer": {"fused": fused}}


def _other_parts(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Replacements for whole blocks of a full finetuning config: an optimizer with a smaller state; adapters,
    if torchtune has the model with them."""
    if kind_of(cfg) == "lora":
        return
    if "8bit" not in cfg.optimizer._component_ and not cfg.get("optimizer_in_bwd", False):
        not_in_torchao = ("fused", "foreach")
        given = {key: value for key, value in cfg.optimizer.items() if key not in not_in_torchao}
        yield "8-bit optimizer (torchao)", {"optimizer": {**given, "_component_": _EIGHT_BIT}}
    module, _, name = cfg.model._component_.rpartition(".")
    for prefix, label in (("lora_", "LoRA (rank 8)"), ("qlora_", "QLoRA (rank 8)")):
        if hasattr(importlib.import_module(module), prefix + name):
            given = {key: value for key, value in cfg.model.items() if key != "_component_"}
            model = {"_component_": f"{module}.{prefix}{name}", **given, **_ADAPTERS}
            yield label, {"model": model, "optimizer_in_bwd": None, "ac_mode": None}
