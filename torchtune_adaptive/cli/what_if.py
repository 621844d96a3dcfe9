"""The alternatives that a plan is compared with: the same run with one thing changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import counted
from torchtune_adaptive.core import knobs
from torchtune_adaptive.recipe import (
    ACCUMULATION,
    FUSED,
    KNOBS,
    TENSORS,
    WHOLE,
    Asked,
    PlanRequest,
    Query,
    overrides,
)

_ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
"""Adapters that torchtune's own LoRA configs train."""
_EIGHT_BIT = "torchao.optim.AdamW8bit"
_SPLITS = (2, 4, 8)
"""Ranks over which layers may be split; more would not be in one machine."""
_PLAN = "tensor_parallel_plan"
_CHECKPOINTING = "enable_activation_checkpointing"


@dataclass(frozen=True)
class WhatIf:
    """An alternative: its name, what to predict for it, and what to type for it."""

    name: str
    query: Query
    override: str


def what_ifs(plan: PlanRequest) -> Iterator[WhatIf]:
    """The alternatives that apply to this config."""
    for name, changes in _changes(plan.asked, plan.ranks):
        yield _what_if(plan, name, _merged(plan.cfg, changes))
    for name, parts in _other_parts(plan.asked):
        changed = plan.cfg.copy()
        changed.update(parts)
        yield _what_if(plan, name, changed)
    together = plan.asked.holders
    for ranks in (plan.ranks // 2, plan.ranks * 2):
        if ranks and ranks % together == 0:
            query = replace(plan, ranks=ranks).query()
            yield WhatIf(counted(ranks, "rank"), query, f"--nproc_per_node {ranks}")
    if plan.device.caching and not plan.device.expandable:
        device = replace(plan.device, expandable=True)
        override = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield WhatIf("expandable segments", plan.query(device=device), override)


def _what_if(plan: PlanRequest, name: str, changed: DictConfig) -> WhatIf:
    override = shlex.join(overrides(plan.cfg, changed))
    return WhatIf(name, replace(plan, asked=Asked.of(changed)).query(), override)


def _merged(cfg: DictConfig, changes: dict[str, Any]) -> DictConfig:
    merged = OmegaConf.merge(cfg, OmegaConf.create(changes))
    assert isinstance(merged, DictConfig)
    return merged


def splits(plan: PlanRequest) -> Iterator[WhatIf]:
    """The same run with its layers split over more or fewer ranks, where torchtune has a way to do so."""
    asked, cfg = plan.asked, plan.cfg
    split = asked[_PLAN] or _split_of_model(cfg)
    if TENSORS not in asked.kind.keys or not split:
        return
    if asked[knobs.COMPILE] or asked["optimizer_in_bwd"]:
        return  # a run that searches or recovers has neither with split layers
    for number in _SPLITS:
        if number == asked.holders or plan.ranks % number:
            continue
        changes: dict[str, Any] = {TENSORS: number, _PLAN: split}
        if cfg.optimizer.get("fused"):
            changes["optimizer"] = {"fused": False}
        name = f"layers split over {number} ranks, which share rows"
        yield _what_if(plan, name, _merged(cfg, changes))


def _split_of_model(cfg: DictConfig) -> dict[str, str] | None:
    """torchtune's plan for a model, if it has one."""
    component = cfg.model._component_
    if component.startswith("torchtune.models.llama3") and "vision" not in component:
        return {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
    return None


def other_checkpointing(asked: Asked) -> dict[str, Any]:
    """What turns activation checkpointing on if it is off, and off if it is on."""
    if asked[_CHECKPOINTING]:
        return {_CHECKPOINTING: False, knobs.OFFLOADING: False}
    selective = {} if asked.kind.adapters else {"ac_mode": None}
    return {_CHECKPOINTING: True, **selective}


def _changes(asked: Asked, ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = asked.kind
    now = {knob.key: knob.configured(asked) for knob in KNOBS}
    other = other_checkpointing(asked)
    yield (
        "activation checkpointing" if other[_CHECKPOINTING] else "no activation checkpointing",
        other,
    )
    if not now[knobs.OFFLOADING] and asked["device"] != "cpu" and asked.holders == 1:
        yield "activations offloaded", {_CHECKPOINTING: True, knobs.OFFLOADING: True}
    if kind.frozen or kind.sample == "pair":
        pass  # another loss would be another recipe, or would not go with the other model's
    elif now[knobs.LOSS] == knobs.CHUNKED:
        yield "loss not in chunks", {"loss": {"_component_": WHOLE}}
    else:
        yield "loss in chunks", {"loss": {"_component_": knobs.CHUNKED}}
    if kind.adapters:
        return
    together = asked.holders
    if together == 1 or together < ranks:
        kept_or_freed = "kept" if now[knobs.RESHARD] else "freed"
        yield f"parameters {kept_or_freed} after forward", {knobs.RESHARD: not now[knobs.RESHARD]}
    if together > 1:
        return  # what follows cannot be combined with layers that are split
    if not asked["optimizer_in_bwd"]:
        in_backward = {ACCUMULATION: 1, "clip_grad_norm": None}
        yield "optimizer in backward", {"optimizer_in_bwd": True, **in_backward}
    if asked.cfg.optimizer._component_ == "torch.optim.AdamW":
        name = "optimizer not fused" if now[FUSED] else "fused optimizer"
        yield name, {"optimizer": {"fused": not now[FUSED]}}


def _other_parts(asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Replacements for whole blocks: an optimizer with a smaller state; adapters, or quantized weights under
    them, if torchtune has the model with them."""
    cfg = asked.cfg
    module, _, name = cfg.model._component_.rpartition(".")
    given = {key: value for key, value in cfg.model.items() if key != "_component_"}
    if asked.kind.adapters:
        quantized = cfg.model.get("quantize_base") or asked["quantizer"]
        if name.startswith("lora_") and not quantized:
            yield "QLoRA", {"model": {**cfg.model, "quantize_base": True}}
        return
    if "8bit" not in cfg.optimizer._component_ and not asked["optimizer_in_bwd"]:
        not_in_torchao = ("fused", "foreach")
        kept = {key: value for key, value in cfg.optimizer.items() if key not in not_in_torchao}
        yield "8-bit optimizer (torchao)", {"optimizer": {**kept, "_component_": _EIGHT_BIT}}
    of_full = ("optimizer_in_bwd", "ac_mode", TENSORS, _PLAN)
    not_for_adapters = {key: None for key in of_full if cfg.get(key)}
    if _exists(adapted := f"{module}.lora_{name}"):
        model = {"_component_": adapted, **given, **_ADAPTERS}
        yield "LoRA (rank 8)", {"model": model, **not_for_adapters}
        if not asked["quantizer"]:
            yield "QLoRA (rank 8)", {"model": {**model, "quantize_base": True}, **not_for_adapters}


def _exists(component: str) -> bool:
    """Whether a module's file mentions a name; importing the module would import torch."""
    path, _, name = component.rpartition(".")
    package, *parts = path.split(".")
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent.joinpath(*parts)
    files = (folder / "__init__.py", folder.with_suffix(".py"))
    return any(f.is_file() and re.search(rf"\b{name}\b", f.read_text()) for f in files)
