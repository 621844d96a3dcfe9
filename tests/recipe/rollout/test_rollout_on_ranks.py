"""Rollouts of a sharded model: the responses and numbers of the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.modules import KVCache

from tests.helpers.decoder import adamw, same_bits
from tests.helpers.faults import FailingMemory, fail_at_each
from tests.helpers.models import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.rollouts import MAX_NEW, PADDING, answered, generation, policy, prompted
from tests.helpers.samples import Sample
from torchtune_adaptive.core import Phase
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.recipe.kinds.recipe_kind import without_adapters
from torchtune_adaptive.recipe.rollout.losses import GRPOObjective
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import Row, collate
from torchtune_adaptive.recipe.rollout.score import OfTokens, Scoring

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


class Run:
    """A policy that is sharded, generates, scores and is trained."""

    def __init__(self, max_new: int = MAX_NEW, **settings: Any) -> None:
        self.ranks, self.memory = Ranks(timeout=200), FailingMemory()
        self.model = policy(sharded=True, **settings)
        self.objective = GRPOObjective(LogProbs(self.model))
        self.step = train_step(
            self.model,
            [adamw(self.model)],
            objective=self.objective,
            memory=self.memory,
            ranks=self.ranks,
            clip_grad_norm=1.0,
        )
        generate = generation(self.model, max_new=max_new)
        self.together = Phase("generation, sharded", self.step, generate.together)
        self.alone = Phase(
            "generation", self.step, generate.alone, self.model, generate.together, generate.trial
        )
        log_probs: dict[str, OfTokens] = {"old": LogProbs(self.model)}
        if settings.get("lora"):
            log_probs["reference"] = without_adapters(self.model, log_probs["old"])
        score = Scoring(PADDING, torch.device("cpu"), log_probs)
        self.scoring = Phase("scoring", self.step, score)

    def responses(self, phase: Phase[Any, Any], rows: list[Row], size: int) -> list[list[int]]:
        phase.begin(size)
        return [each.tokens.tolist() for each in phase.of_rows(rows)]

    def scores(self, rows: list[Row], size: int, name: str = "old") -> list[torch.Tensor]:
        self.scoring.begin(size)
        return [each[name] for each in self.scoring.of_rows(rows)]

    def all_scores(self, rows: list[Row], size: int) -> list[torch.Tensor]:
        self.scoring.begin(size)
        return [torch.stack([*each.values()]) for each in self.scoring.of_rows(rows)]

    @property
    def adapters_are_on(self) -> bool:
        return not any(getattr(module, "disabled", False) for module in self.model.modules())

    def gradient_norm(self, rows: list[Row], size: int) -> float | None:
        for at in range(0, len(rows), size):
            self.step.forward_backward(collate(rows[at : at + size], PADDING))
        outcome = self.step.apply()
        assert not outcome.lost
        return outcome.gradient_norm


def roll_out(settings: dict[str, Any]) -> None:
    run, rows = Run(MAX_NEW // 2, **settings), prompted(8)
    with torch.no_grad():
        whole = policy(**settings)
        expected = [
            each.tokens.tolist() for each in generation(whole, max_new=MAX_NEW // 2).alone(rows)
        ]
        log_probs = LogProbs(whole)(collate(answered(4), PADDING)["tokens"])
    for phase in (run.alone, run.together):
        assert run.responses(phase, rows, 8) == expected
        assert run.responses(phase, rows, 3) == expected
    for row, found, wanted in zip(answered(4), run.scores(answered(4), 3), log_probs, strict=True):
        wanted = wanted[len(row.prompt) - 1 :][: len(found)]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)
        assert row.response is not None and len(row.response) == len(found)
    expected_norm = pytest.approx(norm_of(whole), rel=1e-5)
    assert run.gradient_norm(answered(4), 4) == expected_norm
    assert Run(**settings).gradient_norm(answered(4), 1) == expected_norm


def norm_of(model: nn.Module) -> float:
    """The gradient's norm of the same rows on one rank."""
    objective, batch = GRPOObjective(LogProbs(model)), collate(answered(4), PADDING)
    weight = objective.weight(batch)
    (objective.summed_loss(model, batch, weight).loss / weight).backward()
    return float(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    )


SETTINGS = {
    "full": {},
    "output sharded apart": {"output_apart": True},
    "not resharded": {"reshard": False},
    "lora": {"lora": True},
}


@pytest.mark.rotating
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_sharded_model_gives_what_a_whole_one_does(settings: dict[str, Any]) -> None:
    run_ranks(roll_out, 2, settings)


def fail_in_a_rollout(sample: Sample, settings: dict[str, Any]) -> tuple[int, int]:
    """Run out of memory on one rank after the other, in each phase."""
    run, rows = Run(max_new=4, **settings), prompted(4)
    tried = shrunk = 0
    for phase in (run.alone, run.together, run.scoring):
        take: Callable[[int], Any] = partial(run.responses, phase, rows)
        if phase is run.scoring:
            take = partial(run.all_scores, answered(4))
        expected = take(4)
        with run.memory.fail_at(0) as fault:
            take(4)
        for _, failing, failure in fail_at_each(sample.of(fault.seen), run.memory, run.ranks):
            with failure:
                found = take(4)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
            tried += 1
            shrunk += phase.size < 4
            assert not any(isinstance(module, KVCache) for module in run.model.modules())
            assert run.adapters_are_on
            if failing == run.ranks.rank:
                assert phase.size == 2 or phase is run.alone, "or parameters stayed sharded"
    return tried, shrunk


@pytest.mark.rotating
@pytest.mark.parametrize("settings", [{}, {"lora": True}], ids=["full", "lora"])
def test_a_rollout_survives_running_out_of_memory(settings: Any, sample: Sample) -> None:
    """At operations of each phase: the same responses and numbers, no caches left, and adapters on."""
    sample = sample.every(7, 499)
    for tried, shrunk in run_ranks(fail_in_a_rollout, 2, sample, settings, timeout=500):
        assert tried >= 3 and shrunk >= 1


def refer_to_the_base(settings: dict[str, Any]) -> None:
    """Train adapters: the reference stays what the model without adapters was, and the policy does not."""
    run, rows = Run(lora=True, **settings), answered(4)
    base, weights = policy(), policy(lora=True).state_dict()
    base.load_state_dict({name: weights[name] for name in base.state_dict()})
    with torch.no_grad():
        log_probs = LogProbs(base)(collate(rows, PADDING)["tokens"])
    seen = []
    for size in (4, 2, 4):
        policys, references = (run.scores(rows, 4, name) for name in ("old", "reference"))
        seen.append((policys, references))
        assert run.adapters_are_on
        run.gradient_norm(rows, size)
    for row, found, wanted in zip(rows, seen[0][1], log_probs, strict=True):
        wanted = wanted[len(row.prompt) - 1 :][: len(found)]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)
    for policys, references in seen[1:]:
        assert same_bits(references, seen[0][1]) and not same_bits(policys, seen[0][0])


OF_ADAPTERS = {
    "as it is": {},
    "checkpointed": {"checkpointing": True},
    "not resharded": {"reshard": False},
    "output sharded apart": {"output_apart": True},
}


@pytest.mark.parametrize("settings", OF_ADAPTERS.values(), ids=OF_ADAPTERS)
def test_the_reference_of_adapters_is_the_model_without_them(settings: dict[str, Any]) -> None:
    run_ranks(refer_to_the_base, 2, settings)
