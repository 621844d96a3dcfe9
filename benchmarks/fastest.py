"""The speed that the choice of the fastest configuration loses against trying everything, on a CPU.

    python benchmarks/fastest.py measure table.json    # 40 minutes: CPU time and peak of each configuration
    python benchmarks/fastest.py report table.json     # the table for docs/results/fastest.md

Small models are trained at a fixed global batch with every configuration that `rounding` allows. Under each
of many memory limits, rules choose one of those that fit, and lose what the best is faster. Trials see one
half of the measurements, as many steps as in a run, and regret is computed from the other half.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.step.knobs import (
    CHECKPOINT,
    LOSS,
    MICRO_BATCH,
    OFFLOADING,
    RECOMPUTE_LOSS,
    Choice,
    checkpointed_share,
)
from torchtune_adaptive.recipe.plan import background
from torchtune_adaptive.recipe.registry import load_config
from torchtune_adaptive.recipe.search.timings import fastest, fitting
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import choices, configured_choice
from torchtune_adaptive.recipe.tracing.self_check import _real_kind, _real_step

ROWS = 8
TRIALS = 3
LIMITS = 48
"""Number of memory limits for each model."""
WARM_UP, ROUNDS, STEPS = 2, 6, 2
"""Rounds and steps. In each half of the measurements 12 steps count, as many as a run times of what it
chooses; and their median, as in a run: on a shared machine, single steps are also shorter than most."""
MODELS = {
    "6 layers of 256, vocabulary 4096": (
        {"vocab_size": 4096, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 256}
        | {"intermediate_dim": 704},
        64,
    ),
    "4 layers of 128, vocabulary 8192": (
        {"vocab_size": 8192, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 128}
        | {"intermediate_dim": 352},
        64,
    ),
    "8 layers of 192, vocabulary 2048": (
        {"vocab_size": 2048, "num_layers": 8, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 192}
        | {"intermediate_dim": 512},
        96,
    ),
}


def config_of(model: str) -> DictConfig:
    """A config as they are shipped: all layers checkpointed, micro-batches of 2 rows."""
    cfg = load_config("tiny/full")
    size, length = MODELS[model]
    cfg.model = {"_component_": "torchtune.models.llama2.llama2", **size, "max_seq_len": 512}
    cfg.update({"batch_size": 2, "gradient_accumulation_steps": ROWS // 2, "dtype": "fp32"})
    cfg.update({"enable_activation_checkpointing": True, "use_maximum_batch_size": False})
    cfg.tokenizer.max_seq_len = length
    cfg.adaptive_batching.update(
        {"memory_limit": "64GiB", "cache": False, "may_change": "rounding"}
    )
    return cfg


def measure(model: str) -> list[dict[str, Any]]:
    """Peak bytes and CPU seconds of a step with every configuration."""
    cfg, length = config_of(model), MODELS[model][1]
    memory = SimulatedMemory(1 << 50)
    step = _real_step(_real_kind(Asked.of(cfg)), memory)
    tokens = torch.randint(0, cfg.model.vocab_size, (ROWS, length))

    def take(choice: Choice) -> float:
        started = time.process_time()
        for part in tokens.split(choice[MICRO_BATCH]):
            step.forward_backward({"tokens": part.clone(), "labels": part.clone()})
        step.apply()
        return time.process_time() - started

    found: list[dict[str, Any]] = []
    layers = step.options.switches.layers
    for choice in choices(Asked.of(cfg), 1, "rounding", layers=layers, switches_only=True):
        step.switch(choice)
        if not found:
            take(choice)  # the optimizer creates its state
        memory.watch()
        take(choice)
        found.append({"choice": choice, "peak": memory.usage().peak_bytes, "seconds": [[], []]})
    memory.limit = None  # nothing is counted any more, which takes time
    rounds = WARM_UP + 2 * ROUNDS
    for number in range(rounds):  # in turns: a machine may become slower while it is measured
        for one in found:
            step.switch(one["choice"])
            seconds = [take(one["choice"]) for _ in range(STEPS)]
            if number >= WARM_UP:
                one["seconds"][number % 2] += seconds
        print(f"{model}: round {number + 1} of {rounds}, {time.strftime('%H:%M:%S')}", flush=True)
    return found


def predictions(
    cfg: DictConfig, length: int, device: str = "simulated device", capacity: int = 1 << 36
) -> dict[str, float]:
    """Predicted seconds by configuration, as a run asks for them."""
    asked = Asked.of(OmegaConf.merge(cfg, {"use_fastest_configuration": True}))  # type: ignore[arg-type]
    background.PATIENCE = 600  # the machine may have something to measure meanwhile
    planner = background.RankPlanner(asked, 1, device)
    try:
        found = planner.ranked(length, capacity)
    finally:
        planner.close()
    assert found is not None, "no prediction"
    return {name_of(choice): seconds for choice, seconds in found}


def name_of(choice: Choice) -> str:
    keys = (CHECKPOINT, RECOMPUTE_LOSS, MICRO_BATCH, LOSS, OFFLOADING)
    return ", ".join(str(choice[key]).rpartition(".")[2] for key in keys if key in choice)


def regrets(table: list[dict[str, Any]], own: Choice, predicted: dict[str, float]) -> Any:
    """The share of the best speed that each rule loses, limit by limit."""
    timed = {name_of(one["choice"]): one["seconds"][0] for one in table}
    true = {name_of(one["choice"]): median(one["seconds"][1]) for one in table}
    peaks = {name_of(one["choice"]): one["peak"] for one in table}
    by_name = {name_of(one["choice"]): Choice(one["choice"]) for one in table}

    def flops(name: str) -> tuple[float, float]:
        choice = by_name[name]
        by_operation = 0.02 * (choice[CHECKPOINT] == "operations")
        repeated = float(checkpointed_share(choice[CHECKPOINT])) + by_operation
        return repeated + 0.1 * choice[RECOMPUTE_LOSS], -choice[MICRO_BATCH]

    def shipped_but(name: str) -> bool:
        return {**by_name[name], MICRO_BATCH: 0} == {**own, MICRO_BATCH: 0}

    def best_of_all(names: list[str]) -> str:
        return min(names, key=lambda name: median(timed[name]))

    def best_in_trials(fit: list[str], ranked: list[str]) -> str:
        """The choice that a run makes."""
        mine = name_of(own) if name_of(own) in fit else None
        first = fitting(
            [name for name in ranked if name != mine],
            lambda name: True,
            lambda some, others: by_name[some].needs_as_much_as(by_name[others]),
            lambda name: by_name[name].of_any_layers(),
            TRIALS,
        )
        steps = {name: iter(timed[name]) for name in fit}
        best, _ = fastest(
            [mine, *first] if mine else first,
            lambda name, number: list(islice(steps[name], number)),
            mine,
            predicted.get,
        )
        assert best is not None
        return best.way

    rules: dict[str, Callable[[list[str]], str | None]] = {
        "trying everything": best_of_all,  # what is lost to the noise of the measurements
        f"ours, {TRIALS} timed trials": lambda fit: best_in_trials(
            fit, sorted(fit, key=predicted.__getitem__)
        ),
        "ours, first prediction only": lambda fit: min(fit, key=predicted.__getitem__),
        "fewest FLOPs": lambda fit: min(fit, key=flops),
        f"fewest FLOPs, {TRIALS} timed trials": lambda fit: best_in_trials(
            fit, sorted(fit, key=flops)
        ),
        "largest batch": lambda fit: max(
            filter(shipped_but, fit), key=lambda name: by_name[name][MICRO_BATCH], default=None
        ),
        "as shipped": lambda fit: name_of(own) if name_of(own) in fit else None,
    }
    low, high = min(peaks.values()), max(peaks.values())
    lost: dict[str, list[float]] = {rule: [] for rule in rules}
    for number in range(LIMITS):
        limit = low * (high / low * 1.02) ** (number / (LIMITS - 1))
        fit = [name for name, peak in peaks.items() if peak <= limit]
        best = min(true[name] for name in fit)
        for rule, choose in rules.items():
            if (chosen := choose(fit)) is not None:
                lost[rule].append(1 - best / true[chosen])
    return lost


def report(models: Iterable[tuple[str, list[dict[str, Any]], Choice, dict[str, float]]]) -> None:
    """Print the table for models, each with its measurements, its own configuration, and the predictions."""
    total: dict[str, list[float]] = {}
    for model, table, own, predicted in models:
        both = [[median(half) for half in one["seconds"]] for one in table]
        print(
            f"\n{model}: {len(table)} configurations, {LIMITS} limits; the halves of the measurements "
            f"differ by {median(abs(a / b - 1) for a, b in both):.1%} (median)",
            flush=True,
        )
        for rule, lost in regrets(table, own, predicted).items():
            total.setdefault(rule, []).extend(lost)
    print("\n| rule | limits | mean loss | worst loss |\n|---|---|---|---|")
    for rule, lost in total.items():
        if lost:
            print(f"| {rule} | {len(lost)} | {mean(lost):.1%} | {max(lost):.1%} |")


def main() -> None:
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "report":
        found = json.loads(path.read_text())
        configs = ((model, table, config_of(model)) for model, table in found.items())
        report(
            (model, table, configured_choice(Asked.of(cfg), 1), predictions(cfg, MODELS[model][1]))
            for model, table, cfg in configs
        )
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = {model: measure(model) for model in MODELS}
    path.write_text(json.dumps(table, indent=1, default=dict))


if __name__ == "__main__":
    main()
