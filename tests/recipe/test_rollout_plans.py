"""Plans of runs that generate their rows: each phase takes what it takes in a search, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import tiny_config
from tests.helpers.runs import train
from torchtune_adaptive.planner.speed.operations import COLLECTIVE
from torchtune_adaptive.planner.traced_run import TracedRun
from torchtune_adaptive.recipe.install import install
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.plan.rollout import RolloutPlanner, RolloutPrediction
from torchtune_adaptive.recipe.settings.phase_names import SHARDED_GENERATION
from torchtune_adaptive.recipe.tracing.traces import PartTraces

ROWS = {"batch_size": 4, "grpo_samples": 4, "max_generated_tokens": 8}
Peaks = dict[str, dict[int, int]]
CHECKPOINTED = {"enable_activation_checkpointing": True}
LOSS = "torchtune_adaptive.recipe.kinds.grpo.GRPOLoss"
WITH_OLD = {"loss._component_": LOSS, "ppo_epochs": 2}
"""Settings with which the policy is scored before the first step."""
CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("grpo", 1, "8MiB", {**WITH_OLD, "dtype": "bf16"}),
    ("grpo", 2, "8MiB", {}),
    ("ppo", 1, "12MiB", {"ppo_batch_size": 8}),
    ("grpo", 1, "6MiB", CHECKPOINTED),
    ("grpo", 2, "6MiB", {**CHECKPOINTED, **WITH_OLD}),
    ("ppo", 2, "9MiB", {"ppo_batch_size": 16, **CHECKPOINTED}),
    ("grpo_lora", 1, "6MiB", WITH_OLD),
    ("grpo_lora", 2, "5MiB", {"model.use_dora": True, **CHECKPOINTED}),
    ("ppo", 1, "64MiB", {"ppo_batch_size": 8, "adaptive_batching.rounding": "none"}),
]


def planner_of(
    cfg: DictConfig, ranks: int, memory: int | None, prompt: int, rank: int = 0
) -> RolloutPlanner:
    install()  # what the variables of configs need
    query = plan_request(cfg, ranks, memory=memory, length=prompt).query(confirmed=True, rank=rank)
    return RolloutPlanner(query, query.traces())


def predicted(
    cfg: DictConfig, ranks: int, prompt: int, sizes: dict[str, list[int]]
) -> tuple[RolloutPrediction, Peaks]:
    planner = planner_of(cfg, ranks, None, prompt)
    peaks = {
        phase.name: {size: phase.peak(size).live for size in sizes[phase.name]}
        for phase in planner.phases()
    }
    return planner.predict(), peaks


def searched(kind: str, folder: Path, ranks: int, changes: dict[str, Any]) -> tuple[Any, Peaks]:
    """The report of a search, and the peak of each trial that fits."""
    train(kind, folder, ranks, **changes)
    report = json.loads((folder / "batch_size_search.json").read_text())
    peaks = {
        phase: {each["size"]: each["reports"][0]["peak_bytes"] for each in trials if each["fits"]}
        for phase, trials in report["trials"].items()
    }
    return report, peaks


@pytest.mark.runs
@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "ranks", "memory", "changes"), CASES)
def test_each_phase_takes_what_is_predicted(
    kind: str, ranks: int, memory: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {
        **(ROWS if kind.startswith("grpo") else {"batch_size": 16, "max_generated_tokens": 8}),
        "use_maximum_batch_size": True,
        "adaptive_batching.memory_limit": memory,
        "adaptive_batching.search_only": True,
        **changes,
    }
    report, measured = searched(kind, tmp_path, ranks, changes)
    prompt = int(report["row"].split()[0])
    sizes = {phase: list(peaks) for phase, peaks in measured.items()}
    cfg = tiny_config(kind, tmp_path, **changes)
    [(found, peaks)] = run_ranks(predicted, 1, cfg, ranks, prompt, sizes, join=False)
    assert peaks == measured and all(map(len, peaks.values()))  # to the byte
    assert report["overrides"].startswith(f"{found.overrides} ")


def predicted_of_gpus(cfg: DictConfig) -> tuple[list[bool], list[list[int]]]:
    """Whether each phase's sizes were traced one by one; the collectives of each part, of two ways."""
    planner = planner_of(cfg, 2, None, 40)
    run = TracedRun(PartTraces(planner.traces, SHARDED_GENERATION), planner.query.length)
    phases = [phase.run(4) for phase in planner.phases()]
    collectives = [
        [sum(one.kind == COLLECTIVE for one in part) for part in each.micro_batches]
        for each in (way.operations(4, planner.query.length) for way in (phases[0], run))
    ]
    return [phase.direct for phase in phases], collectives


def test_sizes_follow_from_few_traces_and_each_token_counts_by_itself() -> None:
    cfg = tiny_config("grpo", "out", device="cuda", **ROWS)
    [(direct, [gathered, sharded])] = run_ranks(predicted_of_gpus, 1, cfg, join=False)
    assert direct == [False, False, False]
    assert len(gathered) == 2 and gathered[0] > 0 == gathered[1]  # gathers once
    assert len(sharded) == 2 and sharded[0] == sharded[1] > 0


def predicted_generation(cfg: DictConfig, amounts: list[int]) -> list[tuple[bool, int]]:
    """Whether it is sharded, and the most rows, with so much memory."""
    phases = [planner_of(cfg, 2, memory, 46).phases()[0].predict() for memory in amounts]
    return [(phase.sharded, phase.largest) for phase in phases]


def test_where_the_whole_policy_does_not_fit_generation_is_sharded() -> None:
    cfg = tiny_config("grpo", "out", **ROWS, **{"adaptive_batching.headroom": 0.0})
    [found] = run_ranks(predicted_generation, 1, cfg, [2_000_000, 3_050_000, 3_200_000], join=False)
    (nothing, whole_policy_does_not_fit, fits) = found
    assert nothing == (True, 0)
    assert whole_policy_does_not_fit[0] and whole_policy_does_not_fit[1] >= 1
    assert not fits[0] and fits[1] >= 1


def scoring_on_the_last_of_two_gpus(cfg: DictConfig) -> tuple[bool, list[int]]:
    """Whether its sizes were traced one by one, and the peaks of some."""
    _, scoring, _ = planner_of(cfg, 2, 1 << 30, 64, rank=1).phases()
    return scoring.run(4).direct, [scoring.peak(rows).live for rows in (2, 3, 4)]


def test_a_rank_whose_parts_are_padded_is_planned() -> None:
    """The parts of models that are only scored with are replaced when they score for the first time."""
    cfg = tiny_config("ppo", "out", device="cuda", batch_size=16, max_generated_tokens=8)
    [(direct, peaks)] = run_ranks(scoring_on_the_last_of_two_gpus, 1, cfg, join=False)
    assert not direct and peaks == sorted({*peaks})
