"""The choice of the fastest configuration against trying everything, on a GPU.

    python benchmarks/gpu_fastest.py 1B                # Llama 1B (or 3B) on one GPU
    python benchmarks/gpu_fastest.py 1B --device cpu   # a small model on the simulated device

The model trains at a fixed global batch with every configuration that `rounding` allows and that fits. Under
each of many memory limits, rules choose one of those that fit, and lose what the best is faster; see
fastest.py, which does the same with small models on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from fastest import LIMITS, name_of, predictions, report
from gpu_cases import FASTEST, Case
from gpu_facts import tell
from gpu_plan import GIB, SHORTER, build_step, config_of, random_batch
from omegaconf import DictConfig

from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.step.knobs import CHECKPOINT, MICRO_BATCH, checkpointed_share
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import choices, configured_choice

ROWS = 4
"""Rows of a step."""
ROUNDS, STEPS = 4, 2
"""Rounds of measurements at most, and steps in each; every second round is one half of them."""
SHOWN = 5
"""The fastest configurations that are printed."""


def config_for(case: Case, device: str) -> DictConfig:
    cfg = config_of(case, device)
    cfg.gradient_accumulation_steps = ROWS // cfg.batch_size
    cfg.adaptive_batching.update({"memory_limit": None, "may_change": "rounding"})
    return cfg


def measure(cfg: DictConfig, length: int, capacity: int, seconds: float) -> list[dict[str, Any]]:
    """Peak bytes and seconds of a step with every configuration that fits.

    There are two rounds of measurements, and two more as long as ``seconds`` have not passed.
    """
    began = time.perf_counter()
    on_cpu = cfg.device == "cpu"
    memory = device_memory(torch.device(cfg.device), capacity if on_cpu else None)
    step = build_step(cfg, 1, memory)
    take(step, 1, length)  # the optimizer creates its state
    found = []
    layers = step.options.switches.layers
    for choice in choices(Asked.of(cfg), 1, "rounding", layers=layers, switches_only=True):
        if checkpointed_share(choice[CHECKPOINT]) * 4 % 1:
            continue  # of how many layers, quarters are enough to compare
        step.switch(choice)
        try:
            peak = peak_of(step, memory, choice[MICRO_BATCH], length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            step.abandon()
            continue
        found.append({"choice": choice, "peak": peak, "seconds": [[], []]})
    if isinstance(memory, SimulatedMemory):
        memory.limit = None  # nothing is counted any more, which takes time
    print(f"{len(found)} configurations fit, {time.perf_counter() - began:.0f} s", flush=True)
    for number in range(ROUNDS):  # in turns: a device may become slower while it is measured
        if number in range(2, ROUNDS, 2) and time.perf_counter() - began > seconds:
            break
        for one in found:
            size = one["choice"][MICRO_BATCH]
            step.switch(one["choice"])
            take(step, size, length)
            for _ in range(STEPS):
                started = memory.clock()
                take(step, size, length)
                one["seconds"][number % 2].append(memory.clock() - started)
        print(f"round {number + 1}, {time.perf_counter() - began:.0f} s", flush=True)
        if number:
            best = min(found, key=seconds_of)
            tell(
                f"fastest of {len(found)}",
                f"{seconds_of(best):.3f} s a step in {number + 1} rounds, {name_of(best['choice'])}",
            )
    return found


def peak_of(step: TrainStep, memory: DeviceMemory, size: int, length: int) -> int:
    memory.release()
    memory.watch()
    take(step, size, length)
    return memory.usage().peak_bytes


def take(step: TrainStep, size: int, length: int) -> None:
    """Take a step in micro-batches of a size."""
    for _ in range(ROWS // size):
        step.forward_backward(random_batch(step, size, length))
    step.apply()


def seconds_of(one: dict[str, Any]) -> float:
    first, second = one["seconds"]
    return median([*first, *second])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("case", choices=FASTEST, metavar="MODEL")
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument(
        "--seconds", type=float, default=60, help="after these, two rounds are enough (default: 60)"
    )
    asked = arguments.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # why there is no prediction
    case, on_gpu = FASTEST[asked.case], asked.device == "cuda"
    if on_gpu:
        name, capacity = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    else:
        case = replace(case, length=case.length // SHORTER)
        name, capacity = "simulated device", 1 << 36
    print(f"torch {torch.__version__}, {name}, {capacity / GIB:.2f} GiB, {LIMITS} limits each")
    cfg = config_for(case, asked.device)
    with ThreadPoolExecutor(1) as waiting:  # for another process, which predicts meanwhile
        predicted = waiting.submit(predictions, cfg, case.length, name, capacity)
        table = measure(cfg, case.length, capacity, asked.seconds)
        for one in sorted(table, key=seconds_of)[:SHOWN]:
            peak = one["peak"] / GIB
            print(f"{seconds_of(one):.3f} s, {peak:.2f} GiB: {name_of(one['choice'])}", flush=True)
        label = f"{case.name}, {ROWS} rows of {case.length} tokens"
        report([(label, table, configured_choice(Asked.of(cfg), 1), predicted.result())])


if __name__ == "__main__":
    main()
