"""The mask of packed rows does not fit on one of two ranks: a trial, a step or validation is lost on both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.helpers.decoder import adamw, local_values
from tests.helpers.faults import FailingMemory
from tests.helpers.models import distillation, tiny_llama, train_step
from tests.helpers.packed import packs, room_for_masks_of
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.step.phase import Phase
from torchtune_adaptive.core.step.retry import StepRunner
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.data.packed import collate_packed

pytestmark = pytest.mark.ranks


def new_step(kind: str) -> TrainStep:
    model = tiny_llama(lora=kind != "full")
    objective = distillation(tiny_llama(seed=1)) if kind == "kd" else None
    return train_step(model, [adamw(model)], memory=FailingMemory(), objective=objective)


def worst(rows: int) -> dict[str, Any]:
    return collate_packed(packs(1) * rows)


def searched(step: TrainStep) -> list[Any]:
    """Where ranks failed in two trials and one of validation."""
    probe = Probe(
        step=step,
        accumulation=lambda size: 1,
        headroom=0.0,
        entering=lambda phase: None,
    )
    with probe:
        assert probe.prime(worst).fits
        trials = [probe.trial(4, worst), probe.trial(8, worst)]
        trials.append(probe.trial_of(Phase("validation", step, step.sums), 8, worst(8)))
    return [[report.failed_in for report in trial.reports] for trial in trials]


def trained(step: TrainStep) -> tuple[int, int]:
    """The size of micro-batches after a step of eight rows, and how many steps were retried."""
    runner = StepRunner(step, advice=lambda: "")
    runner.begin(8, Recovery(8, (1, 2, 4, 8), None))
    rows = packs(8, seed=step.ranks.rank)
    runner.run(
        lambda size: (collate_packed(rows[at : at + size]) for at in range(0, 8, size)), number=1
    )
    return runner.size, runner.retried_steps


def one_rank_has_room_for_five(kind: str) -> list[Any]:
    here = room_for_masks_of(5) if Ranks(timeout=200).rank == 1 else nullcontext()
    first, second, unharmed = (new_step(kind) for _ in range(3))
    trained(unharmed)
    with here:
        found = [trained(first), searched(second), trained(second)]
    for step in (first, second):
        for one, other in zip(*map(local_values, (step.model, unharmed.model)), strict=True):
            torch.testing.assert_close(one, other)
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora", "kd"])
def test_what_one_rank_has_no_room_for_is_lost_on_all(kind: str) -> None:
    failed = [[None, None], [None, "forward"], [None, "validation"]]
    for found in run_ranks(one_rank_has_room_for_five, 2, kind):
        assert found == [(4, 1), failed, (4, 1)]
