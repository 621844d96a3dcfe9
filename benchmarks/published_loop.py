"""A loop that trains without a trainer, to be planned: ``published_loop.py FOLDER SETTINGS``.

Settings are JSON, with the names that ``TransformersStep`` has for them, and those of ``_DEFAULTS``. Rows are
made up, each as long as it may be.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dtype": "float32",
    "bf16": False,
    "attn_implementation": "sdpa",
    "gradient_checkpointing": True,
    "max_grad_norm": 0.0,
    "optim": "adamw_torch",
    "fsdp": False,
    "lora": False,
    "lora_dropout": 0.0,
    "half_adapters": False,  # whether adapters have the type of the model, and not float32
    "cast_by_trl": False,  # whether adapters, embedding and head are cast, as TRL did in 2024
    "load_in_4bit": False,
    "keeps_output": "backward",  # until when all logits are kept: "backward", "step", or not: ""
    "waits_for_each_step": False,  # whether the host waits for the device, as loops do that time steps
}
_STEPS = 8


def main(folder: str, text: str) -> None:
    given = SimpleNamespace(**_DEFAULTS | json.loads(text))
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        init_process_group("nccl")
    model = _adapted(_loaded(folder, given), given)
    if given.fsdp:
        _shard(model, given)
    elif several:
        model = DistributedDataParallel(model, device_ids=[0])
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    fused = given.optim == "adamw_torch_fused" or None
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=fused)
    row = torch.ones(given.max_length, dtype=torch.long)
    rows = [row] * (_STEPS * given.gradient_accumulation_steps * given.per_device_train_batch_size)
    batches = iter(DataLoader(rows, given.per_device_train_batch_size))  # type: ignore[arg-type]
    for _ in range(_STEPS):
        _step(model, batches, given, several)
        if given.max_grad_norm:
            nn.utils.clip_grad_norm_(trained, given.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if given.waits_for_each_step:
            torch.cuda.synchronize()


def _loaded(folder: str, given: Any) -> Any:
    how: dict[str, Any] = {}
    if given.load_in_4bit:
        bits = {name: value for name, value in vars(given).items() if name.startswith("bnb_")}
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", **bits
        )
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, given.dtype),
        attn_implementation=given.attn_implementation,
        device_map="cuda",
        **how,
    )


def _adapted(model: Any, given: Any) -> Any:
    """The model, with its adapters and checkpoints."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    checkpoints = given.gradient_checkpointing
    if given.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
    elif checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    if not given.lora:
        return model
    lora = LoraConfig(
        r=given.r,
        lora_dropout=given.lora_dropout,
        target_modules=given.target_modules,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=not given.half_adapters)
    if given.cast_by_trl:
        for name, module in model.named_modules():
            if name.endswith(("embed_tokens", "lm_head")) or "lora_" in name:
                module.to(torch.bfloat16)
    return model


def _shard(model: Any, given: Any) -> None:
    half = torch.bfloat16 if given.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for layer in next(part for part in model.modules() if isinstance(part, nn.ModuleList)):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _step(model: Any, batches: Any, given: Any, several: bool) -> None:
    """The gradients of a step."""
    output = None
    for left in reversed(range(given.gradient_accumulation_steps)):
        tokens = next(batches).to("cuda")
        with model.no_sync() if left and several and not given.fsdp else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=given.bf16):
                output = model(input_ids=tokens, labels=tokens, use_cache=False)
            loss = output.loss
            if not given.keeps_output:
                output = None
            loss.backward()
            if given.keeps_output != "step":
                output = None


if __name__ == "__main__":
    main(*sys.argv[1:])
