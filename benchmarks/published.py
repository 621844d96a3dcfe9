"""Peaks of memory that others have published, and what the planner says of their runs.

    python benchmarks/published.py --predict            # writes docs/results/published.json; many minutes
    python benchmarks/published.py --predict --only bnb # only rows with this in their names

The rows say what ran, in the words of the table's own scripts; what was measured is not here. Predictions are
of tensors, which is what ``torch.cuda.max_memory_allocated`` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_steps import CastByTrl, OwnLoop, folder_of

from torchtune_adaptive.common import AdaptiveBatchingError
from torchtune_adaptive.library.planning import Plan
from torchtune_adaptive.library.transformers_step import PLAIN, TransformersStep

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published.json"
NUMBER = ("per_device_train_batch_size",)
NOT_OF_THE_OPTIMIZER = (
    "with plain kernels the peak is not the optimizer's, and what fused ones take is not planned"
)
FMS, FMS_LATER, FMS_BF16 = (
    "fms-acceleration",
    "fms-acceleration, 18 October",
    "fms-acceleration, bf16 on one GPU, too",
)
FITCHECK, LATER = "fitcheck", "fitcheck, a day later"
TABLES = {
    FMS: "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs: a100_80gb_granite.csv as of 1 "
    "October 2024 (commit ff14d4f) and a100_80gb_liger.csv; A100-80, transformers 4.45, PEFT 0.12, "
    "torch 2.4, FSDP1; mem_peak_torch_mem_alloc_in_bytes",
    FMS_LATER: "the same, a100_80gb_granite.csv as of 18 October 2024 (commit fc78b55), whose scenarios ask "
    "for bf16 with QLoRA only",
    FMS_BF16: "two rows of the first table described anew: its scenarios ask for bf16 on one GPU, too",
    FITCHECK: "Anassbzdd/fitcheck, data/measurements/t4-sweep-2026-09-15.json: T4, transformers 5.17, PEFT "
    "0.20, torch 2.14, a loop of its own (scripts/measure.py); peak_allocated_mib",
    LATER: "the same, t4-phase3-2026-09-16.json: transformers 5.0, PEFT 0.19, torch 2.10",
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
    note: str = ""

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

ROWS = [*(one.row() for one in FMS_ROWS), *FITCHECK_ROWS]


def predicted(rows: Sequence[Row], under: Path) -> Iterator[dict[str, Any]]:
    """What the planner says of rows, or why it says nothing; ascending ones of the same run."""
    known: dict[int, Plan] = {}
    changes = False
    """Whether the peak changes with rows."""
    for row in sorted(rows, key=lambda row: row.rows):
        folder = folder_of(row.model, under)
        said: dict[str, Any] = {"table": row.table, "row": row.name}
        if row.fused and changes:
            yield {**said, "not_predicted": NOT_OF_THE_OPTIMIZER}
            continue
        try:
            for number in (row.rows, 1) if row.fused else (row.rows,):
                if number not in known:
                    known[number] = row.planned(folder, number)
        except AdaptiveBatchingError as error:
            yield {**said, "not_predicted": str(error)}
            continue
        plan = known[row.rows]
        if row.fused and known[1].allocated != plan.allocated:
            changes = True  # with more rows, too
            yield {**said, "not_predicted": NOT_OF_THE_OPTIMIZER}
            continue
        yield {**said, "allocated": plan.allocated, "reserved": plan.peak, "parts": plan.parts}


def run_of(row: Row) -> tuple[str, ...]:
    """What rows have in common of which only the number of rows differs."""
    others = {name: value for name, value in row.settings.items() if name not in NUMBER}
    return (row.table, row.model, row.gpu, row.step.__name__, repr(others))


def predict(only: str) -> None:
    """Write predictions of the rows, and keep those of others."""
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    found = {(each["table"], each["row"]): each for each in known}
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in ROWS:
        if only in f"{row.table} {row.name}":
            runs.setdefault(run_of(row), []).append(row)
    with tempfile.TemporaryDirectory() as under, ThreadPoolExecutor(2) as pool:

        def of_run(run: list[Row]) -> None:
            for each in predicted(run, Path(under)):
                found[each["table"], each["row"]] = each
                said = each.get("allocated") or each["not_predicted"]
                print(f"{each['row']}: {said}", flush=True)

        list(pool.map(of_run, runs.values()))
    order = [(row.table, row.name) for row in ROWS]
    kept = sorted(found.values(), key=lambda each: order.index((each["table"], each["row"])))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    RESULT.write_text(json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the rows anew")
    arguments.add_argument("--only", default="", help="part of the names of the rows to predict")
    asked = arguments.parse_args()
    if asked.predict:
        predict(asked.only)


if __name__ == "__main__":
    main()
