"""The ways in which other libraries' trainers spread a model over ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk

from tests.integrations.real.trainers import (
    fsdp2_on_cpu,
    lora,
    texts,
    tokens,
)
from torchtune_adaptive.integrations.host_state import state_of

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


WAYS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": FSDP2}


CASES: dict[str, dict[str, Any]] = {
    "trainer": {"gradient_accumulation_steps": 4},
    "trainer, bf16": {"bf16": True},
    "sft": {},
    "sft, padding-free": {"packing": True, "max_length": 16},
    "sft, lora": {"peft_config": "lora"},
    "sft, compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "dpo": {},
    "dpo, lora": {"peft_config": "lora"},
    "dpo, precomputed": {"precompute_ref_log_probs": True},
    "reward": {},
    "reward, lora": {"peft_config": "lora"},
    "kto": {},
    "kto, lora": {"peft_config": "lora"},
    "kto, precomputed": {"precompute_ref_log_probs": True},
}


def settings_of(name: str, way: str, folder: str = "") -> dict[str, Any]:
    """The settings of a case; its folder has the rows of one that precomputes."""
    kind = name.partition(",")[0]
    settings = CASES[name] | WAYS[way]
    if kind == "trainer":
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tokens(16)}
    if "peft_config" in settings:
        settings["peft_config"] = lora("SEQ_CLS" if kind == "reward" else "CAUSAL_LM")
    if "packing" in settings:
        settings["data"] = texts("text", count=200)
    if "precompute_ref_log_probs" in settings:
        settings["data"] = load_from_disk(folder)
    if way == "fsdp2":
        fsdp2_on_cpu()
    return settings


def everything(trainer: Any) -> list[Any]:
    """What a step may change."""
    model = [t.detach().clone() for t in (*trainer.model.parameters(), *trainer.model.buffers())]
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    optimizer = trainer.optimizer.state_dict()
    metrics = state_of(trainer).values
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return [model, gradients, optimizer["param_groups"], optimizer["state"], repr(metrics), drawn]
