"""Peaks of cases of ``real_trainers``, planned by running a program and by settings, as JSON.

A program for an environment that has the trainers and ours, beside ``real_trainers.py`` and
``program_trainer.py``, which is the program that is planned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from real_trainers import CASES, LENGTH, NOT_SETTINGS, shape_of

from torchtune_adaptive import TransformersStep
from torchtune_adaptive.planner import DeviceLimits, gpus, planned_gpu
from torchtune_adaptive.planner.programs import Program, plan_program

GPU = gpus.gpu("h100-80gb")


def by_running(name: str, folder: Path) -> int:
    script = Path(__file__).parent / "program_trainer.py"
    ranks = CASES[name].get("ranks", 1)
    program = Program((str(script), str(folder), name), GPU, ranks=ranks)
    return plan_program(program, on_gpu, timeout=600).answers[0].peak.allocated


def on_gpu(ranks: int) -> list[tuple[DeviceLimits, None]]:
    return [(planned_gpu(GPU, ranks, 0.05)[0], None)]


def by_settings(name: str, folder: Path) -> int:
    case = CASES[name]
    settings = {key: value for key, value in case.items() if key not in NOT_SETTINGS}
    step = TransformersStep(folder=str(folder), max_length=case.get("length", LENGTH), **settings)
    rows = step.per_device_train_batch_size
    return step.plan(gpu=GPU.name, ceiling=rows, cache=False).allocated


def main(names: Sequence[str]) -> None:
    results = {}
    for number, name in enumerate(names):
        folder = Path(f"model{number}").absolute()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape_of(CASES[name])))
        results[name] = by_running(name, folder), by_settings(name, folder)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
