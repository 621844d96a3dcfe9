"""Predictions compared with a real device: peaks, speed, and the largest size that fits.

    python benchmarks/gpu_plan.py                        # 15 configs of Llama 1B, 3B and 8B on one GPU
    python benchmarks/gpu_plan.py --device cpu           # small models on the simulated device

All predictions are made first, on the CPU, each in its own process. Then each config is measured in its own
process: torchtune's model in its real shape, with zeros for weights, sharded and stepped as in a
recipe; as one rank of several, the others do not exist. Seen are the peaks of a small micro-batch and of
the largest that is predicted to fit, whether one row more fits under the same limit, and, on a GPU, the
tokens/s of the small one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune import training

from torchtune_adaptive.common.amounts import amount_of_memory
from torchtune_adaptive.core.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.core.device.select import device_memory
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.planner.trace.step_tracer import FakeRanks
from torchtune_adaptive.planner.trace.weights import fill
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.kinds.recipe_kind import recipe_kind
from torchtune_adaptive.recipe.plan.pace import pace_for
from torchtune_adaptive.recipe.plan.predict import Prediction, Query, predict
from torchtune_adaptive.recipe.plan.request import PlanRequest, plan_request
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.kind_table import kind_of
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import initialize_ropes
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.setup.optimizer import build_optimizers

GIB = 1 << 30
SMALL = 2
FULL_1B, FULL_3B, FULL_8B = "llama3_2/1B_full", "llama3_2/3B_full", "llama3_1/8B_full"
LORA_3B, LORA_8B = "llama3_2/3B_lora", "llama3_1/8B_lora"
QLORA_3B, QLORA_8B = "llama3_2/3B_qlora_single_device", "llama3_1/8B_qlora_single_device"
CHECKPOINTED = {"enable_activation_checkpointing": True}
NOT_CHECKPOINTED = {"enable_activation_checkpointing": False}
WHOLE_LOSS = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}


@dataclass(frozen=True)
class Case:
    name: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    length: int = 2048
    ranks: int = 1


CASES = [
    Case("1B full", FULL_1B, NOT_CHECKPOINTED),
    Case("1B full, checkpointed", FULL_1B, CHECKPOINTED),
    Case("1B full, checkpointed, loss not in chunks", FULL_1B, {**CHECKPOINTED, **WHOLE_LOSS}),
    Case("1B full, checkpointed, rows of 8192", FULL_1B, CHECKPOINTED, length=8192),
    Case("1B full, 1 of 8", FULL_1B, NOT_CHECKPOINTED, ranks=8),
    Case("3B full, checkpointed", FULL_3B, CHECKPOINTED),
    Case("3B full, rows of 512", FULL_3B, NOT_CHECKPOINTED, length=512),
    Case("3B full, checkpointed, 1 of 8", FULL_3B, CHECKPOINTED, ranks=8),
    Case("3B LoRA, checkpointed", LORA_3B, CHECKPOINTED),
    Case("3B QLoRA, loss not in chunks", QLORA_3B, {**NOT_CHECKPOINTED, **WHOLE_LOSS}),
    Case("8B LoRA", LORA_8B, NOT_CHECKPOINTED),
    Case("8B LoRA, checkpointed", LORA_8B, CHECKPOINTED),
    Case("8B QLoRA, checkpointed", QLORA_8B, CHECKPOINTED),
    Case("8B full, checkpointed, 1 of 8", FULL_8B, CHECKPOINTED, ranks=8),
    Case("8B LoRA, checkpointed, rows of 8192, 1 of 8", LORA_8B, CHECKPOINTED, 8192, 8),
]
TINY = [
    Case("tiny full", "tiny/full", NOT_CHECKPOINTED, length=128),
    Case("tiny full, checkpointed", "tiny/full", CHECKPOINTED, length=128),
    Case("tiny LoRA, loss not in chunks", "tiny/lora", WHOLE_LOSS, length=256),
]


@dataclass(frozen=True)
class Measured:
    allocated: dict[int, int]
    reserved: dict[int, int]
    seconds: dict[int, float]
    """Seconds of a step, by rows."""
    first_that_failed: int | None = None


def config_of(case: Case, device: str) -> DictConfig:
    asked = {
        "device": device,
        "batch_size": SMALL,
        "compile": False,
        "tokenizer": {"max_seq_len": case.length},
        "adaptive_batching": {"headroom": 0.05, "probe_length": case.length, "cache": False},
    }
    loaded = OmegaConf.load(find_config(case.config))
    if "loss" in case.changes:
        del loaded.loss
    merged = OmegaConf.merge(loaded, asked, case.changes)
    assert isinstance(merged, DictConfig)
    return merged


def build_step(cfg: DictConfig, ranks: int, memory: DeviceMemory) -> TrainStep:
    """A step of torchtune's model in its real shape, with zeros for weights, as one of several ranks."""
    device = torch.device(cfg.device)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
    environment = Environment(device, dtype, FakeRanks(0, ranks))
    kind = recipe_kind(kind_of(cfg), cfg, environment)
    model = kind.model_without_weights()
    fill(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.zero_()
    initialize_ropes(model, environment)
    optimizers = build_optimizers(cfg, environment, model, None)
    objective = kind.objective(model, ())
    return TrainStep(
        model=model,
        objective=objective,
        optimizers=optimizers.steppers,
        device=device,
        memory=memory,
        ranks=environment.ranks,
        options=StepOptions(
            survive=False, switches=build_switches(cfg, environment, model, objective)
        ),
    )


def measure(case: Case, device_name: str, memory_limit: int, limit: int, largest: int) -> Measured:
    """The peaks of a small step, the largest that should fit, then of one row more and more; in its own
    process."""
    memory = device_memory(torch.device(device_name), memory_limit)
    step = build_step(config_of(case, device_name), case.ranks, memory)

    def take(rows: int, length: int) -> None:
        tokens = torch.zeros((rows, length), dtype=torch.int64)
        step.forward_backward({"tokens": tokens, "labels": tokens.clone()})
        step.apply()

    for _ in range(2):
        take(SMALL, case.length // SMALL)
    found = Measured({}, {}, {})
    with memory.capped(limit):
        for rows in (SMALL, *range(largest, largest + 4)):
            memory.release()
            memory.watch()
            try:
                for _ in range(2):
                    take(rows, case.length)
                found.seconds[rows] = timed(partial(take, rows, case.length), memory)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return replace(found, first_that_failed=rows)
            usage = memory.usage()
            if usage.retries:
                return replace(found, first_that_failed=rows)
            found.allocated[rows] = usage.peak_allocated_bytes
            found.reserved[rows] = usage.peak_bytes
    return found


def timed(take: Callable[[], None], memory: DeviceMemory, steps: int = 3) -> float:
    """Seconds of a step."""
    memory.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        take()
    memory.synchronize()
    return (time.perf_counter() - started) / steps


def query_of(case: Case, plan: PlanRequest, device_name: str) -> Query:
    """The query. Ranks that do not exist send nothing, so communication takes no time."""
    pace, _ = pace_for(plan.cfg, plan.settings, case.ranks, device_name)
    if pace is not None:
        pace = replace(pace, speeds=replace(pace.speeds, links=inf, network=inf), correction=None)
    return plan.query(pace=pace)


def predict_all(
    cases: list[Case], device: str, memory: int, device_name: str
) -> list[tuple[int, Prediction]]:
    """The bytes that may be used and the prediction, for each case."""
    plans = [plan_request(config_of(case, device), case.ranks, memory=memory) for case in cases]
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        asked = [
            run(predict, query_of(case, plan, device_name))
            for case, plan in zip(cases, plans, strict=True)
        ]
        return [
            (plan.device.usable_bytes, a.result()) for plan, a in zip(plans, asked, strict=True)
        ]


def in_a_process(work: Callable[..., Any], *arguments: Any, timeout: float = 300) -> Any:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply_async(work, arguments).get(timeout=timeout)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--memory", help="what a process may get; by default all there is")
    arguments.add_argument("--only", default="", help="part of the names of the cases")
    asked = arguments.parse_args()
    cases = [
        case for case in (CASES if asked.device == "cuda" else TINY) if asked.only in case.name
    ]
    if asked.memory:
        memory = amount_of_memory("--memory", asked.memory)
    elif asked.device == "cpu":
        memory = 64 << 20
    else:
        memory = torch.cuda.mem_get_info()[0] - GIB  # less what a context takes
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "simulated device"
    print(f"torch {torch.__version__}, {name}, {memory / GIB:.2f} GiB, headroom 5 %\n")
    print(
        "| config | rows | allocated: predicted, measured | error | reserved: predicted, measured | error |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    sizes, speeds = [], list[float]()
    for case, (limit, prediction) in zip(
        cases, predict_all(cases, asked.device, memory, name), strict=True
    ):
        try:
            seen = in_a_process(
                measure, case, asked.device, memory, limit, max(prediction.largest, 1)
            )
        except Exception as error:  # the other cases can still say something
            print(f"| {case.name} | not measured: {type(error).__name__}: {error} |", flush=True)
            continue
        for rows, peak in (
            (SMALL, prediction.configured),
            (prediction.largest, prediction.at_largest),
        ):
            if rows not in seen.allocated or peak is None:
                continue
            line = f"| {case.name} | {rows} "
            for what in errors:
                predicted, measured = getattr(peak, what), getattr(seen, what)[rows]
                error = predicted / measured - 1
                errors[what].append(abs(error))
                line += f"| {predicted / GIB:.3f}, {measured / GIB:.3f} GiB | {error:+.2%} "
            print(f"{line}|", flush=True)
        speed = prediction.speed if asked.device == "cuda" else None  # simulated devices are slow
        if speed is not None and SMALL in seen.seconds:
            predicted = speed.tokens_per_second_per_gpu
            measured = SMALL * case.length / seen.seconds[SMALL]
            speeds.append(abs(predicted / measured - 1))
            print(
                f"| {case.name} | {SMALL} | tokens/s: {predicted:,.0f}, {measured:,.0f} "
                f"| {predicted / measured - 1:+.1%} |",
                flush=True,
            )
        found = max((r for r in seen.allocated if r > SMALL), default=0)
        more = "" if seen.first_that_failed else " or more"
        print(
            f"| {case.name} | largest: predicted {prediction.largest}, found {found}{more} |",
            flush=True,
        )
        sizes.append(abs(found - prediction.largest) if found else prediction.largest)
    for what, off in errors.items():
        if off:
            print(f"\n{what}: mean error {sum(off) / len(off):.2%}, maximum {max(off):.2%}")
    if speeds:
        print(f"\ntokens/s: mean error {sum(speeds) / len(speeds):.1%}, maximum {max(speeds):.1%}")
    print(f"\nlargest size: {sum(n <= 1 for n in sizes)} of {len(sizes)} within one row")


if __name__ == "__main__":
    main()
