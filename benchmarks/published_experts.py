"""Runs of models with experts that others have published, and what the planner predicts.

    python benchmarks/published_experts.py --predict  # writes docs/results/published_experts.json; 5 minutes
    python benchmarks/published_experts.py --again    # adds those that were predicted again; 3 minutes
    python benchmarks/published_experts.py            # writes docs/results/published_experts.md

Their settings are published in part. The page has what is assumed beside each table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_experts_page import GPT_OSS, NEMO, QWEN, UNSLOTH, page
from published_steps import folder_of

from torchtune_adaptive.library.transformers_step import TransformersStep
from torchtune_adaptive.planner.speed.speed import SLOWEST_EXPERTS

RESULT = Path(__file__).parent.parent / "docs" / "results" / "published_experts.json"


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
        "trainer": "Trainer",
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
AGAIN: dict[str, dict[str, Any]] = {f"{GPT_OSS}8,": {}, f"{QWEN}64,": {"optim": "adamw_torch"}}
"""Runs that were predicted again, by how their names begin, with what is different."""
_OF_ALL = {"per_device_train_batch_size": 1, "dtype": "bfloat16"}


def _predicted(run: Run, under: str, **more: Any) -> dict[str, Any]:
    folder = folder_of(run.model, Path(under))
    step = TransformersStep(folder=folder, **{**_OF_ALL, **run.settings, **more})
    plan = step.plan(run.gpu, ceiling=1, headroom=0, cache=f"{under}/cache")
    assert plan.speed is not None
    said = {"fits": plan.peak <= plan.usable_bytes, "allocated": plan.allocated}
    found = {**said, "reserved": plan.peak, "seconds": plan.speed.seconds}
    print(run.name, found, flush=True)
    return found


def predict() -> None:
    """Write the predictions of all runs."""
    with tempfile.TemporaryDirectory() as under:
        found = [{"table": one.table, "run": one.name} | _predicted(one, under) for one in RUNS]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    _write({"versions": versions, "runs": found})


def predict_again() -> None:
    """Add those of runs for which the published numbers say what was wrong, or what ran."""
    result = json.loads(RESULT.read_text())
    with tempfile.TemporaryDirectory() as under:
        for run, found in zip(RUNS, result["runs"], strict=True):
            for name, more in AGAIN.items():
                if run.name.startswith(name):
                    found["again"] = _predicted(run, under, **more)
    _write(result)


def _write(result: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--predict", action="store_true", help="predict the runs anew")
    arguments.add_argument("--again", action="store_true", help="predict some again")
    asked = arguments.parse_args()
    if asked.predict:
        predict()
    elif asked.again:
        predict_again()
    else:
        RESULT.with_suffix(".md").write_text(page(json.loads(RESULT.read_text()), SLOWEST_EXPERTS))


if __name__ == "__main__":
    main()
