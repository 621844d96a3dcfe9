"""The runs of published tables of memory, as their own scripts and configs describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from published_steps import CastByTrl, OwnLoop

from torchtune_adaptive.library.planning import Plan
from torchtune_adaptive.library.step_choices import PLAIN
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

    def planned(self, folder: str, rows: int) -> Plan:
        step = self.step(folder=folder, **{**self.settings, "per_device_train_batch_size": rows})
        return step.plan(gpu=self.gpu, ceiling=rows)


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
                "trainer": PLAIN,
                "per_device_train_batch_size": self.rows,
                "max_length": 4096,
                "dtype": "bfloat16",
                "bf16": self.bf16,
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
_POWER, _LLAMA, _MISTRAL = "PowerLM-3b", "Meta-Llama-3-8B", "Mistral-7B-v0.1"
_SHARES = ((1, 4), (1, 8), (2, 2), (2, 4))


def power(table: str, sharded_in_float32: bool) -> Iterator[Fms]:
    """The rows of PowerLM in a version of its table."""
    for method, kernels in (("full", "none"), ("LoRA", "none"), ("full", "foak")):
        for gpus, rows in _SHARES:
            bf16 = sharded_in_float32 and gpus > 1
            yield Fms(_POWER, kernels, gpus, rows, method, bf16, table)
    for kernels, prepared in (("baseline bnb", True), ("accelerated bnb", False)):
        more = {**FOUR_BIT, "prepare_for_kbit_training": prepared}
        step = CastByTrl if prepared else TransformersStep
        for rows in (4, 8):
            yield Fms(_POWER, kernels, 1, rows, "QLoRA", True, table, more, step)


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
    *(Fms(_POWER, "none", 1, rows, "LoRA", True, FMS_BF16) for rows in (4, 8)),
]


def fitcheck(
    model: str,
    rows: int,
    length: int,
    *,
    attention: str = "eager",
    quant: str = "none",
    double_quant: bool = False,
    precision: str = "fp16",
    lora_r: int | None = 32,
    targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    optimizer: str = "adamw",
    checkpoint: bool = True,
    table: str = FITCHECK,
) -> Row:
    """A row of fitcheck's, by the arguments of its ``measure.py``."""
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[precision]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "max_length": length,
        "gradient_checkpointing": checkpoint,
        "attention": attention,
        "optim": {"adamw": "adamw_torch", "adam8bit": "adamw_8bit", "sgd": "sgd"}[optimizer],
        # What plain AdamW trains is cast to float32, in full fine-tuning the whole model.
        "dtype": "float32" if lora_r is None and optimizer == "adamw" else dtype,
    }
    if lora_r is not None:
        settings |= {"lora": True, "r": lora_r, "target_modules": tuple(targets)}
    if quant == "nf4":
        settings |= {
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_use_double_quant": double_quant,
            "prepare_for_kbit_training": True,
        }
    method = "full" if lora_r is None else f"{'QLoRA' if quant == 'nf4' else 'LoRA'} r{lora_r}"
    words = (
        f"{model} {method}",
        attention,
        "checkpointed" if checkpoint else "not checkpointed",
        f"{rows} x {length}",
    )
    return Row(
        table=table,
        name=", ".join(words),
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
