"""Steps of transformers' Trainer and TRL's trainers, by their settings, that plans are compared on."""

from __future__ import annotations

from typing import Any

LENGTH, VOCABULARY = 128, 8192
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "use_cache": False}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
PLAIN = {"trainer": "Trainer", "gradient_checkpointing": False, "per_device_train_batch_size": 4}
SFT = {"trainer": "SFTTrainer", "per_device_train_batch_size": 4}
DPO = {"trainer": "DPOTrainer", "per_device_train_batch_size": 2}
FP16 = {"bf16": False, "fp16": True}
HALF = {"dtype": "bfloat16"}
LIGER = {"use_liger_kernel": True}
QLORA = {**HALF, "lora": True, "load_in_4bit": True}
EIGHT_BITS = {**HALF, "lora": True, "load_in_8bit": True}
SHARDED = {"ranks": 2, "fsdp": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
EXPERTS |= {"router_aux_loss_coef": 0.01, "head_dim": 32, "vocab_size": 256}
"""What a mixture of experts has besides, by the names of Qwen3-MoE: its peak is where experts run."""
MOE = {"model_type": "qwen3_moe"}
WINDOW = {"max_length": 256, "sliding_window": 64, "head_dim": 32, "vocab_size": 512}
"""Rows that are longer than what a layer sees, so attention has a mask."""
ONE_BY_ONE = {**PLAIN, **MOE, "experts_implementation": "eager", "bf16": False, "optim": "sgd"}
CASES: dict[str, dict[str, Any]] = {  # those of Liger last: it replaces functions of whole modules
    "Trainer in fp32": {**PLAIN, "bf16": False},
    "Trainer with some adapters": {
        **PLAIN,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
    },
    "SFT": SFT,
    "SFT with accumulation": {
        **SFT,
        **HALF,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 2,
    },
    "SFT with a window": {
        **SFT,
        **HALF,
        **WINDOW,
        "model_type": "mistral",
        "gradient_checkpointing": False,
    },
    "SFT with a window, checkpointing and adapters": {
        **SFT,
        **HALF,
        **WINDOW,
        "model_type": "phi3",
        "lora": True,
    },
    "Trainer with a window in some layers": {
        **PLAIN,
        **WINDOW,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "Trainer with a window in every second layer": {
        **PLAIN,
        **HALF,
        **WINDOW,
        "model_type": "gemma2",
    },
    "DPO with a window": {**DPO, **HALF, **WINDOW, "model_type": "gemma3_text"},
    "SFT with adapters": {
        **SFT,
        "lora": True,
        "lora_dropout": 0.1,
        "gradient_checkpointing": False,
    },
    "SFT with adapters and checkpointing": {**SFT, **HALF, "lora": True},
    "DPO": DPO,
    "DPO in bfloat16": {**DPO, **HALF},
    "DPO with adapters": {**DPO, **HALF, "lora": True},
    **{
        f"SFT with {name}": {**SFT, **HALF, "optim": name}
        for name in ("adamw_torch", "adafactor", "sgd", "adamw_8bit")
    },
    "SFT with packing": {**SFT, **HALF, "packing": True, "gradient_checkpointing": False},
    "SFT in one row": {**SFT, **HALF, "padding_free": True, "gradient_checkpointing": False},
    "Trainer in fp16": {**PLAIN, **FP16},
    "SFT in fp16": {**SFT, **FP16},
    "SFT in fp16 with adapters": {**SFT, **FP16, "dtype": "float16", "lora": True},
    "Trainer with QLoRA": {
        **PLAIN,
        **QLORA,
        "gradient_checkpointing": True,
        "bnb_4bit_use_double_quant": True,
    },
    "Trainer with QLoRA as Axolotl and LLaMA-Factory have it": {
        **PLAIN,
        **QLORA,
        "gradient_checkpointing": True,
        "bnb_4bit_use_double_quant": True,
        "prepare_for_kbit_training": False,
    },
    "SFT with QLoRA": {**SFT, **QLORA, "bnb_4bit_use_double_quant": True, "lora_dropout": 0.1},
    "SFT with QLoRA in float32": {**SFT, **QLORA, "dtype": "float32"},
    "SFT with QLoRA and no checkpointing": {**SFT, **QLORA, "gradient_checkpointing": False},
    "DPO with QLoRA": {**DPO, **QLORA},
    "Trainer with 8 bits": {**PLAIN, **EIGHT_BITS, "gradient_checkpointing": True},
    "Trainer with 8 bits whose layers take most": {
        **PLAIN,
        **EIGHT_BITS,
        "gradient_checkpointing": True,
        "vocab_size": 256,
    },
    "Trainer with 8 bits in fp16": {
        **PLAIN,
        **EIGHT_BITS,
        **FP16,
        "dtype": "float16",
        "prepare_for_kbit_training": False,
    },
    "SFT with 8 bits": {**SFT, **EIGHT_BITS, "lora_dropout": 0.1},
    "SFT with 8 bits in float32": {**SFT, **EIGHT_BITS, "dtype": "float32"},
    "SFT with 8 bits and no checkpointing": {**SFT, **EIGHT_BITS, "gradient_checkpointing": False},
    "SFT with 8 bits and biases": {**SFT, **EIGHT_BITS, "model_type": "qwen2"},
    "DPO with 8 bits": {**DPO, **EIGHT_BITS},
    **{
        f"{name} and reentrant checkpointing": {
            **case,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        }
        for name, case in (
            ("Trainer in fp32", {**PLAIN, "bf16": False}),
            ("Trainer with adapters", {**PLAIN, **HALF, "lora": True}),
            ("Trainer with QLoRA", {**PLAIN, **QLORA}),
            ("SFT with accumulation", {**SFT, **HALF, "gradient_accumulation_steps": 2}),
            ("SFT with adapters", {**SFT, **HALF, "lora": True, "lora_dropout": 0.1}),
            ("DPO with adapters", {**DPO, **HALF, "lora": True}),
        )
    },
    "SFT on two ranks": {**SFT, **SHARDED},
    "SFT with adapters on two ranks": {**SFT, **SHARDED, **HALF, "lora": True},
    "SFT with QLoRA on two ranks": {**SFT, **SHARDED, **QLORA, "bnb_4bit_use_double_quant": True},
    **{
        f"{name} that is shared": {**case, **SHARDED, **QLORA, "bnb_4bit_quant_storage": "bfloat16"}
        for name, case in (
            ("SFT with QLoRA", SFT),
            ("SFT with QLoRA and no checkpointing", {**SFT, "gradient_checkpointing": False}),
            ("Trainer with QLoRA", {**PLAIN, "gradient_checkpointing": True}),
            ("DPO with QLoRA", DPO),
        )
    },
    "SFT with DDP": {**SFT, "ranks": 2},
    "SFT with DDP and adapters": {**SFT, **HALF, "lora": True, "ranks": 2},
    "Trainer with DDP and accumulation": {
        **PLAIN,
        **HALF,
        "ranks": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "Trainer with DDP whose optimizer takes most": {
        **PLAIN,
        "bf16": False,
        "optim": "adamw_torch",
        "ranks": 2,
        "per_device_train_batch_size": 1,
    },
    "Trainer with 32-bit moments": {**PLAIN, "bf16": False, "optim": "paged_adamw_32bit"},
    "Trainer with experts": {**PLAIN, **MOE, "bf16": False},
    "Trainer with experts in batches": {
        **PLAIN,
        **MOE,
        **HALF,
        "experts_implementation": "batched_mm",
    },
    "Trainer with experts one by one": ONE_BY_ONE,
    "Trainer with experts that balances them": {**PLAIN, **MOE, **HALF, "balanced": True},
    "SFT with experts": {**SFT, **MOE},
    "SFT with experts in bfloat16": {**SFT, **MOE, **HALF},
    "SFT with experts one by one": {
        **SFT,
        **MOE,
        **HALF,
        "experts_implementation": "eager",
        "gradient_checkpointing": False,
    },
    "SFT with experts and no balance": {**SFT, **MOE, **HALF, "router_aux_loss_coef": 0.0},
    "SFT with experts that have adapters": {**SFT, **MOE, **HALF, "lora": True},
    "SFT with adapters beside experts": {
        **SFT,
        **MOE,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
        "gradient_checkpointing": False,
    },
    "SFT with adapters of parameters": {
        **SFT,
        **MOE,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
        "target_parameters": ("experts.down_proj",),
        "gradient_checkpointing": False,
    },
    "SFT with QLoRA and experts": {**SFT, **MOE, **QLORA, "target_modules": ("q_proj", "v_proj")},
    "DPO with experts": {**DPO, **MOE, **HALF},
    "Trainer with Liger": {**PLAIN, **LIGER},
    "Trainer with Liger in fp32": {**PLAIN, **LIGER, "bf16": False},
    "Trainer with Liger in fp16": {**PLAIN, **LIGER, **FP16},
    "Trainer with Liger in bfloat16": {**PLAIN, **LIGER, **HALF},
    "Trainer with Liger and checkpointing": {
        **PLAIN,
        **LIGER,
        **HALF,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "Trainer with Liger and adapters": {**PLAIN, **LIGER, **HALF, "lora": True},
    "Trainer with Liger and QLoRA": {
        **PLAIN,
        **LIGER,
        **QLORA,
        "gradient_checkpointing": True,
        "prepare_for_kbit_training": False,
    },
    **{
        f"Trainer with Liger's {name}": {
            **PLAIN,
            **LIGER,
            **HALF,
            "model_type": name,
            "optim": "sgd",
        }
        for name in ("qwen3", "phi3", "gemma2")
    },
    "SFT with Liger": {**SFT, **LIGER},
    "SFT with Liger and packing": {
        **SFT,
        **LIGER,
        **HALF,
        "packing": True,
        "gradient_checkpointing": False,
    },
    "SFT with Liger and adapters": {
        **SFT,
        **LIGER,
        **HALF,
        "lora": True,
        "gradient_checkpointing": False,
    },
    "DPO with Liger": {**DPO, **LIGER, **HALF},
    "Trainer with Liger's loss of all logits": {
        **PLAIN,
        **LIGER,
        "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": False},
    },
}
OF_MODEL = ("vocab_size", "sliding_window", "head_dim", "use_sliding_window", "max_window_layers")
"""Settings of a case that are of its model."""


def shape_of(case: dict[str, Any]) -> dict[str, Any]:
    """The config of the model of a case."""
    shape: dict[str, Any] = {"model_type": case.get("model_type", "llama"), **SHAPE}
    shape |= {name: case[name] for name in OF_MODEL if name in case}
    if shape["model_type"] == MOE["model_type"]:
        shape |= {**EXPERTS, "output_router_logits": case.get("balanced", False)}
    return shape
