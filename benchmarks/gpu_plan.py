"""A prediction compared with a real device: peaks, speed, and the largest size that fits.

    python benchmarks/gpu_plan.py "1B full"                # the names are in gpu_cases.py
    python benchmarks/gpu_plan.py "1B full" --device cpu   # a small model on the simulated device

The prediction is made on the CPU, in a process of its own. Meanwhile torchtune's model is built in its real
shape, with random weights, sharded and stepped as in a recipe; as one rank of several, the others do not
exist. First it is seen whether the largest micro-batch that is predicted to fit does, and one row more does
not; then the peaks of it and of a small one, and, on a GPU, the tokens/s of both. As one rank of several,
links are infinitely fast: neither the predicted speed nor the measured one has communication in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import PREDICTED, Case
from gpu_facts import tell
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune import training

from torchtune_adaptive.common import amount_of_memory, counted
from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.device.memory import DeviceMemory, Usage, is_out_of_memory
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.planner.trace.step_tracer import FakeRanks
from torchtune_adaptive.planner.trace.weights import fill
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.kinds.by_name import recipe_kind
from torchtune_adaptive.recipe.plan.device import pace_for
from torchtune_adaptive.recipe.plan.predict import predict
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.plan.request import PlanRequest, plan_request
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import initialize_ropes
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.setup.offloading import Offloading
from torchtune_adaptive.recipe.setup.optimizer import build_optimizers

GIB = 1 << 30
SMALL = 2
NEAR = 3
"""So many rows more and less than predicted are tried."""
STEPS = 3
"""Timed steps of the small micro-batch."""
SHORTER = 16
"""On the simulated device rows are so many times shorter."""
SMALL_MODEL = {
    "vocab_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 512,
}


def config_of(case: Case, device: str) -> DictConfig:
    asked = {
        "device": device,
        "batch_size": SMALL,
        "gradient_accumulation_steps": 1,
        "compile": False,
        "use_maximum_batch_size": True,  # sizes are tried here as in a search: a small step is the first
        "tokenizer": {"max_seq_len": case.length},
        "adaptive_batching": {"headroom": 0.05, "probe_length": case.length, "cache": False},
    }
    loaded = OmegaConf.load(find_config(case.config))
    assert isinstance(loaded, DictConfig)
    if "loss" in case.changes:
        del loaded.loss
    if device == "cpu":
        loaded.model = _small(loaded.model)
        loaded.dtype = "fp32"
    merged = OmegaConf.merge(loaded, asked, case.changes)
    assert isinstance(merged, DictConfig)
    return merged


def _small(model: DictConfig) -> dict[str, Any]:
    """A small model of the same kind."""
    if "lora_rank" not in model:
        return {"_component_": "torchtune.models.llama2.llama2", **SMALL_MODEL}
    quantized = {"quantize_base": "qlora" in model._component_}
    lora = {key: value for key, value in model.items() if key.startswith(("lora", "apply"))}
    return {
        **lora,
        "_component_": "torchtune.models.llama2.lora_llama2",
        **SMALL_MODEL,
        **quantized,
    }


def build_step(cfg: DictConfig, ranks: int, memory: DeviceMemory) -> TrainStep:
    """A step of torchtune's model in its real shape, with random weights, as one of several ranks."""
    device = torch.device(cfg.device)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
    environment = Environment(device, dtype, FakeRanks(0, ranks))
    asked = Asked.of(cfg)
    kind = recipe_kind(asked, environment)
    model = kind.model_without_weights()
    fill(model, device)
    randomize(model)
    initialize_ropes(model, environment)
    optimizers = build_optimizers(asked, environment, model, None)
    objective = kind.objective(model, ())
    offloading = Offloading(model, asked["enable_activation_offloading"])
    return TrainStep(
        model=model,
        objective=objective,
        optimizers=optimizers.steppers,
        device=device,
        memory=memory,
        ranks=environment.ranks,
        options=StepOptions(
            survive=False,
            activations=offloading,
            switches=build_switches(asked, environment, model, objective, offloading),
        ),
    )


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Give all parameters values like those of a trained model: with zeros, a GPU runs faster."""
    for parameter in model.parameters():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if mine.is_floating_point():
            # A copy, because quantized tensors have no distribution to draw from.
            values = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
            mine.copy_(values.normal_(std=0.02))


def random_batch(step: TrainStep, rows: int, length: int) -> dict[str, torch.Tensor]:
    vocabulary = step.model.tok_embeddings.num_embeddings
    assert isinstance(vocabulary, int)
    tokens = torch.randint(0, vocabulary, (rows, length))
    return {"tokens": tokens, "labels": tokens.clone()}


class Measuring:
    """The steps of a case on a device."""

    def __init__(self, case: Case, device: str, capacity: int) -> None:
        self.length = case.length
        self.memory = device_memory(torch.device(device), capacity)
        self.step = build_step(config_of(case, device), case.ranks, self.memory)
        for _ in range(2):  # the optimizer creates its state, the device its workspaces
            self._take(SMALL, case.length // SMALL)

    def _take(self, rows: int, length: int) -> None:
        self.step.forward_backward(random_batch(self.step, rows, length))
        self.step.apply()

    def usage(self, rows: int) -> Usage | None:
        """The peaks of one step; None if it does not fit, or only once torch has freed what it had cached."""
        self.memory.release()
        self.memory.watch()
        if not self._fits(rows):
            self.step.abandon()  # or the next peak has what is left of it: gradients, gathered parameters
            return None
        usage = self.memory.usage()
        if usage.retries:
            tried = counted(usage.retries, "retry", "retries")
            tell(f"{rows} rows", f"fit after {tried} of torch's allocator")
            return None
        return usage

    def _fits(self, rows: int) -> bool:
        try:
            self._take(rows, self.length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def seconds(self, rows: int) -> float:
        """Seconds of a step, after one that is not counted; only one is timed if it is large."""
        steps = STEPS if rows == SMALL else 1
        self.memory.release()  # what is left of a size that did not fit is in pieces
        self._take(rows, self.length)
        started = self.memory.clock()
        for _ in range(steps):
            self._take(rows, self.length)
        return (self.memory.clock() - started) / steps


def query_of(case: Case, plan: PlanRequest, device_name: str) -> Query:
    """The query. Ranks that do not exist send nothing, so communication takes no time."""
    pace, _ = pace_for(plan.asked, case.ranks, device_name)
    if pace is not None:
        pace = replace(pace, speeds=replace(pace.speeds, links=inf, network=inf), correction=None)
    return plan.query(pace=pace)


def largest_near(predicted: int, fits: Callable[[int], bool]) -> str:
    """The largest number of rows that fit, or what is known of it, if it is not near the predicted one."""
    rows = max(predicted, 1)
    if fits(rows):
        larger = range(rows + 1, rows + NEAR + 1)
        too_large = next((number for number in larger if not fits(number)), None)
        return f"{larger[-1]} or more" if too_large is None else str(too_large - 1)
    fewer = range(rows - 1, max(rows - NEAR - 1, 0), -1)
    return str(next((n for n in fewer if fits(n)), f"fewer than {min(fewer, default=rows)}"))


def compare(case: Case, device: str, capacity: int, device_name: str) -> Iterator[str]:
    """The rows of the table, each as soon as it is known."""
    plan = plan_request(config_of(case, device), case.ranks, memory=capacity)
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        asked = run(predict, query_of(case, plan, device_name))
        measuring = Measuring(case, device, capacity)
        prediction = asked.result()
    largest = prediction.largest
    usages: dict[int, Usage | None] = {}
    with measuring.memory.capped(plan.device.usable_bytes):

        def fits(rows: int) -> bool:
            usages[rows] = measuring.usage(rows)
            return usages[rows] is not None

        found = largest_near(largest, fits)
        tell("largest micro-batch", f"predicted {largest}, found {found}")
        yield f"| {case.name} | largest: predicted {largest}, found {found} |"
        for rows, peak in {largest: prediction.at_largest, SMALL: prediction.configured}.items():
            usage = usages[rows] if rows in usages else measuring.usage(rows)
            if usage is None or peak is None:
                continue
            line = f"| {case.name} | {rows} "
            for kind, predicted, measured in (
                ("allocated", peak.allocated, usage.peak_allocated_bytes),
                ("reserved", peak.reserved, usage.peak_bytes),
            ):
                both, error = (
                    f"{predicted / GIB:.3f}, {measured / GIB:.3f} GiB",
                    predicted / measured,
                )
                line += f"| {both} | {error - 1:+.2%} "
                tell(f"{kind}, {rows} rows", f"predicted, measured: {both}")
            yield f"{line}|"
            if device == "cuda":  # simulated devices are slow
                per_second = rows * case.length / measuring.seconds(rows)
                said = f"{per_second:,.0f}"
                if rows == SMALL and prediction.speed is not None:
                    said += f", predicted {prediction.speed.tokens_per_second_per_gpu:,.0f}"
                tell(f"tokens/s, {rows} rows", said)
                yield f"| {case.name} | {rows} | tokens/s: {said} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("case", choices=PREDICTED, metavar="CASE")
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--memory", help="what the process may get, if there is more")
    asked = arguments.parse_args()
    case, on_gpu = PREDICTED[asked.case], asked.device == "cuda"
    if on_gpu:
        capacity = torch.cuda.mem_get_info()[0]
        if asked.memory:
            capacity = min(capacity, amount_of_memory("--memory", asked.memory))
    else:
        case, capacity = replace(case, length=case.length // SHORTER), 128 << 20
    name = torch.cuda.get_device_name() if on_gpu else "simulated device"
    print(f"torch {torch.__version__}, {name}, {capacity / GIB:.2f} GiB, headroom 5 %\n")
    print(
        "| config | rows | allocated: predicted, measured | error | reserved: predicted, measured | error |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for line in compare(case, asked.device, capacity, name):
        print(line, flush=True)


if __name__ == "__main__":
    main()
