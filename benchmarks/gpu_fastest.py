"""The choice of the fastest configuration against trying everything, on a GPU.

    python benchmarks/gpu_fastest.py                # Llama 1B and 3B on one GPU
    python benchmarks/gpu_fastest.py --device cpu   # a tiny model on the simulated device

Each model trains at a fixed global batch with every configuration that `rounding` allows and that fits. Under
each of many memory limits, rules choose one of those that fit, and lose what the best is faster; see
fastest.py, which does the same with small models on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from fastest import LIMITS, predictions, report
from gpu_plan import CHECKPOINTED, FULL_1B, FULL_3B, GIB, Case, build_step, config_of, in_a_process
from omegaconf import DictConfig

from torchtune_adaptive.core.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.core.device.select import device_memory
from torchtune_adaptive.core.step.knobs import MICRO_BATCH, Choice
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.settings.knob_table import choices, configured_choice

ROUNDS, STEPS = 4, 2
"""Rounds of measurements, and steps in each; every second round is one half of them."""
CASES = {
    "cuda": [
        (Case("1B", FULL_1B, CHECKPOINTED, length=1024), 8),
        (Case("3B", FULL_3B, CHECKPOINTED, length=1024), 4),
    ],
    "cpu": [(Case("tiny", "tiny/full", CHECKPOINTED, length=64), 4)],
}
"""Each with the rows of a step."""


def config_for(case: Case, rows: int, device: str) -> DictConfig:
    cfg = config_of(case, device)
    cfg.gradient_accumulation_steps = rows // cfg.batch_size
    cfg.adaptive_batching.update({"memory_limit": None, "may_change": "rounding"})
    return cfg


def measure(case: Case, rows: int, device: str, capacity: int) -> list[dict[str, Any]]:
    """Peak bytes and seconds of a step with every configuration that fits, measured in its own process."""
    cfg = config_for(case, rows, device)
    memory = device_memory(torch.device(device), capacity if device == "cpu" else None)
    step = build_step(cfg, case.ranks, memory)
    found = []
    for choice in choices(cfg, case.ranks, "rounding", switches_only=True):
        step.switch(choice)
        try:
            peak = peak_of(step, memory, choice, rows, case.length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            step.forget()
            continue
        found.append({"choice": choice, "peak": peak, "seconds": [[], []]})
    for number in range(ROUNDS):  # in turns: a device may become slower while it is measured
        for one in found:
            choice = one["choice"]
            step.switch(choice)
            take(step, choice, rows, case.length)
            for _ in range(STEPS):
                memory.synchronize()
                started = time.perf_counter()
                take(step, choice, rows, case.length)
                memory.synchronize()
                one["seconds"][number % 2].append(time.perf_counter() - started)
    return found


def peak_of(step: TrainStep, memory: DeviceMemory, choice: Choice, rows: int, length: int) -> int:
    take(step, choice, rows, length)  # the optimizer creates its state
    memory.release()
    memory.watch()
    take(step, choice, rows, length)
    return memory.usage().peak_bytes


def take(step: TrainStep, choice: Choice, rows: int, length: int) -> None:
    for part in torch.zeros((rows, length), dtype=torch.int64).split(choice[MICRO_BATCH]):
        step.forward_backward({"tokens": part.clone(), "labels": part.clone()})
    step.apply()


def measured(
    device: str, only: str, name: str, capacity: int
) -> Iterator[tuple[str, list[dict[str, Any]], Choice, dict[str, float]]]:
    for case, rows in CASES[device]:
        if only not in case.name:
            continue
        cfg = config_for(case, rows, device)
        predicted = predictions(cfg, case.length, name, capacity)
        table = in_a_process(measure, case, rows, device, capacity, timeout=480)
        label = f"{case.name}, {rows} rows of {case.length} tokens"
        yield label, table, configured_choice(cfg, case.ranks), predicted


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=sorted(CASES))
    arguments.add_argument("--only", default="", help="part of the names of the models")
    asked = arguments.parse_args()
    on_gpu = asked.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "simulated device"
    capacity = (
        torch.cuda.mem_get_info()[0] - GIB if on_gpu else 1 << 36
    )  # less what a context takes
    print(f"torch {torch.__version__}, {name}, {capacity / GIB:.2f} GiB, {LIMITS} limits each")
    report(measured(asked.device, asked.only, name, capacity))


if __name__ == "__main__":
    main()
