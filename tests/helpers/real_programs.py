"""Peaks of cases of ``trainer_cases``, planned by running the trainers on an H100 that is not there, as JSON.

A program for an environment that has the trainers and ours: ``python real_programs.py CASE...``, beside
``trainer_cases.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_cases import CASES, LENGTH, shape_of

from torchtune_adaptive import TransformersStep


def planned(name: str, folder: Path) -> int:
    """The bytes of tensors at the peak of a case."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    case = dict(CASES[name])
    shape = shape_of(case)
    shape["architectures"] = [KINDS[shape["model_type"]]]
    (folder / "config.json").write_text(json.dumps(shape))
    settings: dict[str, Any] = {"bf16": not case.get("fp16"), "max_length": LENGTH, **case}
    for key in ("model_type", "balanced", *shape):
        settings.pop(key, None)
    if case.get("packing") or case.get("padding_free"):
        settings["attn_implementation"] = "flash_attention_2"
    rows = case["per_device_train_batch_size"]
    step = TransformersStep(folder=str(folder), **settings)
    return step.plan(gpu="h100-80gb", ceiling=rows, cache=False).allocated


def main(names: Sequence[str]) -> None:
    results = {}
    for number, name in enumerate(names):
        folder = Path(f"model{number}").absolute()
        folder.mkdir()
        results[name] = planned(name, folder)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
