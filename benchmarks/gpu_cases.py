"""The configs that the benchmarks for a GPU predict and measure. No torch in here: ``gpu.py`` lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FULL_1B, FULL_3B, FULL_8B = "llama3_2/1B_full", "llama3_2/3B_full", "llama3_1/8B_full"
LORA_3B, LORA_8B = "llama3_2/3B_lora", "llama3_1/8B_lora"
QLORA_3B, QLORA_8B = "llama3_2/3B_qlora_single_device", "llama3_1/8B_qlora_single_device"
CHECKPOINTED = {"enable_activation_checkpointing": True}
NOT_CHECKPOINTED = {"enable_activation_checkpointing": False}
WHOLE_LOSS = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}


@dataclass(frozen=True)
class Case:
    """A config, what is changed in it, and the tokens in a row; as one rank of several."""

    name: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    length: int = 2048
    ranks: int = 1


FIRST = (
    Case("1B full", FULL_1B, NOT_CHECKPOINTED),
    Case("3B full, checkpointed", FULL_3B, CHECKPOINTED),
    Case("8B LoRA, checkpointed", LORA_8B, CHECKPOINTED),
)
"""Those that we want to know most."""
OTHERS = (
    Case("1B full, checkpointed", FULL_1B, CHECKPOINTED),
    Case("1B full, checkpointed, loss not in chunks", FULL_1B, {**CHECKPOINTED, **WHOLE_LOSS}),
    Case("1B full, checkpointed, rows of 8192", FULL_1B, CHECKPOINTED, length=8192),
    Case("1B full, 1 of 8", FULL_1B, NOT_CHECKPOINTED, ranks=8),
    Case("3B full, rows of 512", FULL_3B, NOT_CHECKPOINTED, length=512),
    Case("3B full, checkpointed, 1 of 8", FULL_3B, CHECKPOINTED, ranks=8),
    Case("3B LoRA, checkpointed", LORA_3B, CHECKPOINTED),
    Case("3B QLoRA, loss not in chunks", QLORA_3B, {**NOT_CHECKPOINTED, **WHOLE_LOSS}),
    Case("8B LoRA", LORA_8B, NOT_CHECKPOINTED),
    Case("8B QLoRA, checkpointed", QLORA_8B, CHECKPOINTED),
    Case("8B full, checkpointed, 1 of 8", FULL_8B, CHECKPOINTED, ranks=8),
    Case("8B LoRA, checkpointed, rows of 8192, 1 of 8", LORA_8B, CHECKPOINTED, 8192, 8),
)
PREDICTED = {case.name: case for case in (*FIRST, *OTHERS)}

FASTEST = {
    "1B": Case("1B", FULL_1B, CHECKPOINTED, length=1024),
    "3B": Case("3B", FULL_3B, CHECKPOINTED, length=1024),
}
"""Those that train with every configuration."""
