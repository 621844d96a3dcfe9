"""A deep model is planned by a few of its layers: its steps are those of the model itself, to the byte."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import run_ranks
from tests.recipe.test_plan_is_exact import a_config
from torchtune_adaptive.planner import RecordedStep, deep_step
from torchtune_adaptive.planner.trace import any_depth
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.phase_names import GATHERING, GENERATION, SCORING
from torchtune_adaptive.recipe.tracing import tracer
from torchtune_adaptive.recipe.tracing.traces import Traces

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

ON_GPUS = {
    "device": "cuda",
    "dtype": "bf16",
    "batch_size": 2,
    "adaptive_batching": {"cache": False},
}
EVERY_SECOND = {"ac_mode": "selective", "ac_option": 2}
IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}


def a_small_run(kind: str, changes: dict[str, Any], layers: int) -> Asked:
    cfg = a_config(kind, "ac_mode" in changes, 2 - ("optimizer_in_bwd" in changes), 512)
    merged = OmegaConf.merge(cfg, ON_GPUS, {"model": {"num_layers": layers}}, changes)
    assert isinstance(merged, DictConfig)
    return Asked.of(merged)


def numbered(*steps: RecordedStep) -> list[Any]:
    """What steps do, in terms of places in them: two traces number blocks and events each in its own way."""
    noted = [deep_step._of_operations(step.operations) for step in steps if step.operations]
    return [deep_step._of_memory(*steps), *noted]


def traced(asked: Asked, ranks: int, length: int) -> tuple[list[Any], list[int]]:
    """All steps that a plan is made of; and the number of layers of each model that was traced for them."""
    made: list[int] = []

    class Counted(tracer.Tracer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.layers)

    with mock.patch.object(tracer, "Tracer", Counted):
        traces = Traces(asked, ranks, 0)
        start_up = traces.start_up(length)
        found = [numbered(start_up.set_up, start_up.first_step), traces.layers, traces.uneven]
        found += [numbered(traces.step(rows, length)) for rows in (2, 3)]
        found.append(numbered(traces.noted(2, length)))
        if asked.kind.generates:
            phases = [*([GATHERING] if ranks > 1 else []), GENERATION, SCORING]
            found += [numbered(traces.of_phase(phase, 2, length)) for phase in phases]
    return found, made


def few_and_all(asked: Asked, ranks: int, length: int) -> list[int]:
    """Compare what few layers tell with what all do; returns the numbers of layers that were traced."""
    few, made = traced(asked, ranks, length)
    with mock.patch.object(any_depth, "_KEPT", ()):
        whole, whole_made = traced(asked, ranks, length)
    assert whole_made == [whole[1]]
    assert few[1:3] == whole[1:3]
    for one, other in zip(few[0], whole[0], strict=True):
        assert one == other
    assert few == whole
    return made


def few_and_all_of_small_runs(kinds: list[tuple[str, dict[str, Any]]], ranks: int) -> None:
    for kind, changes in kinds:
        in_pairs = changes == EVERY_SECOND
        made = few_and_all(a_small_run(kind, changes, 21 if in_pairs else 12), ranks, 64)
        assert made == ([9, 11] if in_pairs else [4, 5]), (kind, changes)


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_are_those_of_all_layers(ranks: int) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("full", {}),
        ("lora", {"ac_mode": None}),
        ("full_dpo", {}),
        ("full", EVERY_SECOND),
        ("full", IN_BACKWARD),
        ("qat", {}),
    ]
    if ranks < 3:
        kinds.append(("qlora", {}))  # its parts must come out even
    run_ranks(few_and_all_of_small_runs, 1, kinds, ranks, join=False)


def few_and_all_of_a_config(name: str, ranks: int, length: int, changes: list[str]) -> list[int]:
    cfg = with_overrides(load_config(name), ["adaptive_batching.cache=False", *changes])
    return few_and_all(plan_request(cfg, ranks, "h100-80gb", length=length).asked, ranks, length)
