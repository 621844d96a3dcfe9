"""Runs of models with experts that others have published, and what the planner predicts.

    python benchmarks/published_experts.py --predict  # writes docs/results/published_experts.json; five minutes
    python benchmarks/published_experts.py            # writes docs/results/published_experts.md

Their settings are published in part. What is assumed stands beside each table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_steps import folder_of

from torchtune_adaptive.library.step_choices import PLAIN
from torchtune_adaptive.library.transformers_step import TransformersStep

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published_experts.json"
UNSLOTH, NEMO = "unsloth", "nemo"


@dataclass(frozen=True)
class Run:
    table: str
    name: str
    model: str
    gpu: str
    settings: dict[str, Any]
    """Of the step."""


def _lora(model: str, rank: int, length: int) -> Run:
    settings = {
        "max_length": length,
        "router_aux_loss_coef": 0.0,
        "lora": True,
        "r": rank,
        "target_modules": (),
        "target_parameters": ("experts.gate_up_proj", "experts.down_proj"),
    }
    return Run(UNSLOTH, f"{model}, rank {rank}, 1 x {length}", model, "b200", settings)


def _full(checkpointed: bool) -> Run:
    name = "Qwen3-30B-A3B, 1 x 4096" + (", checkpointed" if checkpointed else "")
    settings = {
        "trainer": PLAIN,
        "max_length": 4096,
        "ranks": 8,
        "fsdp": True,
        "bf16": False,
        "gradient_checkpointing": checkpointed,
    }
    return Run(NEMO, name, "Qwen3-30B-A3B", "h100", settings)


LENGTHS = (1024, 2048, 4096, 8192, 16384)
RUNS = [
    *(
        _lora(model, rank, length)
        for model in ("gpt-oss-20b", "Qwen3-30B-A3B")
        for rank in (64, 8)
        for length in LENGTHS
    ),
    *(_full(checkpointed) for checkpointed in (False, True)),
]
_OF_ALL = {"per_device_train_batch_size": 1, "dtype": "bfloat16"}


def predict() -> None:
    """Write the predictions of all runs."""
    found = []
    with tempfile.TemporaryDirectory() as under:
        for run in RUNS:
            folder = folder_of(run.model, Path(under))
            step = TransformersStep(folder=folder, **{**_OF_ALL, **run.settings})
            plan = step.plan(run.gpu, ceiling=1, headroom=0, cache=f"{under}/cache")
            assert plan.speed is not None
            said = {"table": run.table, "run": run.name, "fits": plan.peak <= plan.usable_bytes}
            said |= {"allocated": plan.allocated, "reserved": plan.peak}
            said |= {"seconds": plan.speed.seconds, "band": plan.speed.band}
            found.append(said)
            print(said, flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    RESULT.write_text(json.dumps({"versions": versions, "runs": found}, indent=1) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the runs anew")
    if arguments.parse_args().predict:
        predict()


if __name__ == "__main__":
    main()
