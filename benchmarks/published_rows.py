"""The runs of published tables of memory, as their own scripts and configs describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from published_steps import OwnLoop

from torchtune_adaptive.library.planning import Plan
from torchtune_adaptive.library.transformers_step import TransformersStep

FMS, FMS_LATER, FMS_BF16 = (
    "fms-acceleration",
    "fms-acceleration, 18 October",
    "fms-acceleration, bf16 on one GPU, too",
)
FITCHECK, LATER, FINAL = "fitcheck", "fitcheck, a day later", "fitcheck, its last run"
TABLES = {
    FMS: "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs: a100_80gb_granite.csv as of 1 "
    "October 2024 (commit ff14d4f) and a100_80gb_liger.csv; A100-80, transformers 4.45, PEFT 0.12, "
    "torch 2.4, FSDP1; mem_peak_torch_mem_alloc_in_bytes",
    FMS_LATER: "The same, a100_80gb_granite.csv as of 18 October 2024 (commit fc78b55), whose scenarios ask "
    "for bf16 with QLoRA only. Described after its numbers had been read",
    FMS_BF16: "Two rows of the first table described anew, after its numbers had been read: its scenarios "
    "ask for bf16 on one GPU, too",
    FITCHECK: "Anassbzdd/fitcheck, data/measurements/t4-sweep-2026-09-15.json: T4, transformers 5.17, PEFT "
    "0.20, torch 2.14, a loop of its own (scripts/measure.py); peak_allocated_mib",
    LATER: "The same, t4-phase3-2026-09-16.json: transformers 5.0, PEFT 0.19, torch 2.10",
    FINAL: "The same, final-t4-20260921.json (commit 83aea54): transformers 5.0, PEFT 0.19, torch 2.10",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    table: str
    name: str
    model: str
    gpu: str
    settings: dict[str, Any]
    """Of the step."""
    step: type[TransformersStep] = TransformersStep
    fused: bool = False
    """Whether fused kernels ran. Plain ones are planned, which take more. So the peak must be one that rows
    do not change, that of the optimizer; where it is not, nothing is predicted."""

    @property
    def rows(self) -> int:
        rows: int = self.settings["per_device_train_batch_size"]
        return rows

    def planned(self, folder: str, rows: int, cache: str) -> Plan:
        step = self.step(folder=folder, **{**self.settings, "per_device_train_batch_size": rows})
        return step.plan(gpu=self.gpu, ceiling=rows, headroom=0, cache=cache)


@dataclass(frozen=True)
class Fms:
    """A row of fms-acceleration's tables: rows of 4,096 tokens, gradient checkpointing, plain AdamW."""

    model: str
    kernels: str
    gpus: int
    rows: int
    method: str = "full"
    bf16: bool = False
    """Whether mixed precision was asked for. With FSDP, accelerate then has in float32 what is trained."""
    table: str = FMS
    more: dict[str, Any] = field(default_factory=dict)
    step: type[TransformersStep] = TransformersStep

    def row(self) -> Row:
        adapters: dict[str, Any] = {}
        if self.method != "full":
            targets = ("q_proj", "k_proj", "v_proj", "o_proj")
            adapters = {"lora": True, "r": 16, "lora_dropout": 0.1, "target_modules": targets}
        return Row(
            table=self.table,
            name=f"{self.model} {self.method}, {self.kernels}, {self.gpus} x {self.rows}",
            model=self.model,
            gpu="a100-80gb",
            step=self.step,
            fused="foak" in self.kernels,
            settings={
                "trainer": "Trainer",
                "per_device_train_batch_size": self.rows,
                "max_length": 4096,
                "dtype": "bfloat16",
                "bf16": self.bf16,
                "gradient_checkpointing": True,
                "optim": "adamw_torch",
                "ranks": self.gpus,
                "fsdp": self.gpus > 1,
                **adapters,
                **self.more,
            },
        )


FOUR_BIT = {
    "load_in_4bit": True,
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
_CAST_BY_TRL = {"cast_by_trl": True, "max_grad_norm": 1.0, "keeps_output": ""}
"""QLoRA by SFTTrainer of 2024, which cast what no trainer of today does."""
POWER, _LLAMA, _MISTRAL = "PowerLM-3b", "Meta-Llama-3-8B", "Mistral-7B-v0.1"
_SHARES = ((1, 4), (1, 8), (2, 2), (2, 4))


def power(table: str, sharded_in_float32: bool) -> Iterator[Fms]:
    """The rows of PowerLM in a version of its table."""
    for method, kernels in (("full", "none"), ("LoRA", "none"), ("full", "foak")):
        for gpus, rows in _SHARES:
            bf16 = sharded_in_float32 and gpus > 1
            yield Fms(POWER, kernels, gpus, rows, method, bf16, table)
    for kernels, prepared in (("baseline bnb", True), ("accelerated bnb", False)):
        more = {**FOUR_BIT, **(_CAST_BY_TRL if prepared else {"prepare_for_kbit_training": False})}
        step = OwnLoop if prepared else TransformersStep
        for rows in (4, 8):
            yield Fms(POWER, kernels, 1, rows, "QLoRA", True, table, more, step)


FMS_ROWS = [
    *power(FMS, sharded_in_float32=True),
    *(
        Fms(model, kernels, gpus, rows, bf16=True)
        for model, finished in (
            (
                _LLAMA,
                {
                    "foak": ((1, 4), (2, 4), (4, 4), (4, 8)),
                    "foak and Liger": (
                        (1, 4),
                        (1, 8),
                        (2, 4),
                        (2, 8),
                        (4, 4),
                        (4, 8),
                        (4, 16),
                        (4, 32),
                    ),
                },
            ),
            (
                _MISTRAL,
                {
                    "foak": ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (4, 32)),
                    "foak and Liger": (
                        *((1, 4), (1, 8), (1, 16), (2, 4), (2, 8)),
                        *((4, 4), (4, 8), (4, 16), (4, 32)),
                    ),
                },
            ),
        )
        for kernels, shares in finished.items()
        for gpus, rows in shares
    ),
    *power(FMS_LATER, sharded_in_float32=False),
    *(Fms(POWER, "none", 1, rows, "LoRA", True, FMS_BF16) for rows in (4, 8)),
]


def fitcheck(
    model: str,
    rows: int,
    length: int,
    *,
    attention: str,
    quant: str,
    lora_r: int = 32,
    table: str = FITCHECK,
) -> Row:
    """A row of fitcheck's, by the arguments of its ``measure.py``."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "max_length": length,
        "attn_implementation": attention,
        "dtype": "float16",
        "lora": True,
        "r": lora_r,
        "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    }
    if quant == "nf4":
        settings |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}
    method = f"{'QLoRA' if quant == 'nf4' else 'LoRA'} r{lora_r}"
    return Row(
        table=table,
        name=f"{model} {method}, {attention}, checkpointed, {rows} x {length}",
        model=model,
        gpu="t4-16gb",
        step=OwnLoop,
        settings=settings,
    )


_GRID = (  # of its calibration_sweep.py
    ("SmolLM2-135M", 2, 512),
    ("SmolLM2-360M", 1, 4096),
    ("TinyLlama-1.1B", 2, 512),
    ("TinyLlama-1.1B", 2, 1024),
    ("TinyLlama-1.1B", 2, 2048),
    ("SmolLM2-135M", 1, 4096),
    ("SmolLM2-1.7B", 4, 1024),
    ("Qwen2.5-1.5B", 2, 1024),
)
FITCHECK_ROWS = [
    fitcheck(*cell, attention=attention, quant=quant)
    for quant in ("none", "nf4")
    for attention in ("eager", "sdpa")
    for cell in _GRID
]
_LATER = [
    *(("TinyLlama-1.1B", rows, 1024, "sdpa", "nf4") for rows in (1, 2, 4, 8, 12)),
    *(("TinyLlama-1.1B", rows, 1024, "eager", "nf4") for rows in (1, 2, 4, 8)),
    *(
        (model, 1, 2048, attention, quant)
        for model in ("Qwen2.5-1.5B", "SmolLM2-1.7B")
        for quant in ("none", "nf4")
        for attention in ("eager", "sdpa")
    ),
]
FITCHECK_ROWS += [
    fitcheck(model, rows, length, attention=attention, quant=quant, table=LATER)
    for model, rows, length, attention, quant in _LATER
]
FITCHECK_ROWS += [
    fitcheck(model, 1, 1024, attention=attention, quant="nf4", lora_r=16, table=FINAL)
    for model in (
        "Qwen2.5-7B",
        "Mistral-7B-v0.3",
        "deepseek-coder-1.3b",
        "Qwen2.5-1.5B",
        "Llama-3.2-3B",
        "Llama-3.2-1B",
    )
    for attention in ("eager", "sdpa")
]

ROWS = [*(one.row() for one in FMS_ROWS), *FITCHECK_ROWS]
