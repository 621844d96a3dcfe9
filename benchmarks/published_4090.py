"""Steps of Qwen3-0.6B on one RTX 4090 and on two that others have published, and what the planner predicts.

    python benchmarks/published_4090.py --predict  # writes docs/results/published_4090.json; six minutes
    python benchmarks/published_4090.py            # writes docs/results/published_4090.md

``published_4090_numbers`` says what was measured, which no prediction reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_4090_numbers import NUMBERS
from published_4090_page import page
from published_steps import OwnLoop, folder_of

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published_4090.json"
PROFILED, PARALLEL, TUNED = "08", "09", "10"


@dataclass(frozen=True)
class Run:
    experiment: str
    name: str
    settings: dict[str, Any]
    """Of the step."""


def _profiled(rows: int, length: int, checkpointed: bool = False) -> Run:
    return Run(
        PROFILED,
        f"{rows} x {length}" + (", checkpointed" if checkpointed else ""),
        {
            "per_device_train_batch_size": rows,
            "max_length": length,
            "gradient_checkpointing": checkpointed,
            "keeps_output": "step",
        },
    )


def _run(experiment: str, name: str, rows: int, ranks: int, **more: Any) -> Run:
    settings = {"per_device_train_batch_size": rows, "ranks": ranks, "keeps_output": ""}
    return Run(experiment, name, {**settings, **more})


LORA = {
    "lora": True,
    "r": 16,
    "target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dtype": "bfloat16",
}
RUNS = [
    *(_profiled(rows, 512) for rows in (1, 2, 4, 6)),
    *(_profiled(2048 // length, length) for length in (256, 1024, 2048)),
    *(_profiled(rows, 512, True) for rows in (4, 8, 12)),
    _profiled(1, 2048, True),
    _run(PARALLEL, "one GPU, 2 rows", 2, 1),
    _run(PARALLEL, "one GPU, 4 rows", 4, 1),
    _run(PARALLEL, "one GPU, LoRA", 2, 1, **LORA),
    _run(PARALLEL, "DDP", 2, 2),
    _run(PARALLEL, "DDP, LoRA", 2, 2, **LORA),
    _run(PARALLEL, "FSDP", 2, 2, fsdp=True),
    # What is wrapped has one type, and FSDP casts what it gathers, without autocast.
    _run(PARALLEL, "FSDP, LoRA", 2, 2, fsdp=True, **LORA, bf16=False, half_adapters=True),
    _run(TUNED, "one GPU, 2 rows, again", 2, 1),
    _run(TUNED, "one GPU, 4 rows, again", 4, 1),
    _run(TUNED, "one GPU, 8 x 4 rows", 4, 1, gradient_accumulation_steps=8),
    _run(TUNED, "DDP, 2 rows", 2, 2),
    _run(TUNED, "DDP, 2 rows, gradients beside buckets", 2, 2),
    *(
        _run(TUNED, f"DDP, {number} x 2 rows", 2, 2, gradient_accumulation_steps=number)
        for number in (2, 4, 8, 16)
    ),
    _run(TUNED, "DDP, 4 rows", 4, 2),
    _run(TUNED, "DDP, 2 rows, fused AdamW", 2, 2, optim="adamw_torch_fused"),
    _run(TUNED, "DDP, 8 x 4 rows", 4, 2, gradient_accumulation_steps=8),
]
_OF_ALL = {
    "max_length": 512,
    "bf16": True,
    "gradient_checkpointing": False,
    "waits_for_each_step": True,
}


def predict() -> None:
    """Write the predictions of all runs."""
    found = []
    with tempfile.TemporaryDirectory() as under:
        for run in RUNS:
            folder = folder_of("Qwen3-0.6B", Path(under))
            step = OwnLoop(folder=folder, **{**_OF_ALL, **run.settings})
            rows = step.settings["per_device_train_batch_size"]
            plan = step.plan("rtx4090", ceiling=rows, headroom=0, cache=f"{under}/cache")
            assert plan.speed is not None
            said = {"experiment": run.experiment, "run": run.name, "gpus": step.ranks}
            said |= {"allocated": plan.allocated, "reserved": plan.peak}
            found.append({**said, "seconds": plan.speed.seconds})
            print(said, f"{plan.speed.seconds:.4f}", flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    RESULT.write_text(json.dumps({"versions": versions, "runs": found}, indent=1) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the runs anew")
    if arguments.parse_args().predict:
        predict()
    else:
        RESULT.with_suffix(".md").write_text(page(json.loads(RESULT.read_text()), NUMBERS))


if __name__ == "__main__":
    main()
