"""Exact knobs are exact: with any of them, training has the bits that it has without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.accelerator import Card
from tests.helpers.decoder import batch, local_values, same_bits
from tests.helpers.faults import fail_at_each
from tests.helpers.knobs import STEPS, Training, config_of, differs
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.step.failures import StepHalfApplied
from torchtune_adaptive.core.step.knobs import CHECKPOINT, RECOMPUTE_LOSS, RESHARD, Choice
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import SHARDED_LAYERS, choices

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


def different_choices(
    models: Sequence[tuple[str, str, float]], keys: dict[str, Any], sample: int
) -> tuple[int, list[str]]:
    """How many choices were trained with, and those that did not give the bits of the config's own values."""
    different, tried = [], 0
    if keys.get("device") == "cuda":
        Card(1 << 40).install(pytest.MonkeyPatch())  # which activations can be offloaded from
    for kind, dtype, dropout in models:
        cfg = config_of(kind, dtype, dropout, **keys)
        trained = Training(cfg)
        own, *others = choices(
            Asked.of(cfg), trained.ranks.size, "exact", layers=4, switches_only=True
        )
        expected = trained.train(own)
        assert not differs(expected, trained.train(own)), "training is not repeatable"
        assert len(set(expected[0])) == STEPS, "nothing was learnt"
        for choice in others[tried % sample :: sample]:
            tried += 1
            if differs(expected, trained.train(choice)):
                different.append(f"{kind} {dtype} {dropout} {choice}")
    return tried, different


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_no_bit_depends_on_an_exact_knob(
    kind: str, device: str, ranks: int, exhaustive: bool
) -> None:
    sample = 1 if exhaustive else 5
    models = [(kind, dtype, dropout) for dtype in ("fp32", "bf16") for dropout in (0.0, 0.5)]
    found = run_ranks(different_choices, ranks, models, {"device": device}, sample)
    assert all(tried >= 8 for tried, _ in found)
    assert [different for _, different in found] == [[]] * ranks


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_nor_where_the_last_projection_is_sharded_apart(kind: str, exhaustive: bool) -> None:
    apart = {SHARDED_LAYERS: ["tok_embeddings", "output"]}
    sample = 1 if exhaustive else 7
    found = run_ranks(different_choices, 2, [(kind, "bf16", 0.0)], apart, sample)
    assert [different for _, different in found] == [[]] * 2


def built_differently(some: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[bool]:
    expected = Training(config_of("full", "bf16", 0.0, **some)).train()
    return [
        differs(expected, Training(config_of("full", "bf16", 0.0, **other)).train())
        for other in others
    ]


def test_a_config_with_a_knob_trains_like_the_config_without() -> None:
    """What is built is as exact as what is switched, whoever's key it is."""
    others = [
        {"enable_activation_checkpointing": True},
        {"ac_mode": "selective", "ac_option": 2},
        {CHECKPOINT: "operations", RECOMPUTE_LOSS: True},
        {CHECKPOINT: "every_3", RESHARD: False},
        {CHECKPOINT: "3_of_4", "enable_activation_checkpointing": True},
        {SHARDED_LAYERS: ["tok_embeddings", "output"]},
    ]
    assert run_ranks(built_differently, 2, {}, others) == [[False] * len(others)] * 2


def built_for_another_model() -> str:
    try:
        Training(config_of("full", "fp32", 0.0, **{CHECKPOINT: "3_of_5"}))
    except ConfigError as error:
        return str(error)
    return ""


def test_layers_of_another_model_are_refused() -> None:
    (said,) = run_ranks(built_for_another_model, 1)
    assert "3_of_5" in said and "a model of 5 layers, but this one has 4" in said
    assert "Set it to all" in said


class FailingAllocation(SimulatedMemory):
    """A simulated device that has no memory for a chosen allocation."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 40)
        self.seen, self.failing = 0, None

    def check(self, extra: int = 0) -> None:
        self.seen += 1
        if self.seen == self.failing:
            raise torch.OutOfMemoryError(f"injected at allocation {self.seen}")

    @contextmanager
    def fail_at(self, allocation: int | None) -> Iterator[FailingAllocation]:
        self.seen, self.failing = 0, allocation
        yield self
        self.failing = None


class FailingStep:
    """One step of two layers, taken again and again from the same start."""

    def __init__(self) -> None:
        self.memory = FailingAllocation()
        self.trained = Training(
            config_of("full", "fp32", 0.0, **{"model.num_layers": 2}), self.memory
        )

    def take(self) -> tuple[bool, list[torch.Tensor]]:
        """Whether it was lost, and the weights; then all is as before."""
        step = self.trained.step
        try:
            step.forward_backward(batch(length=10, seed=self.trained.ranks.rank))
            lost = step.apply().lost
        except StepHalfApplied:
            step.forget()
            lost = True
        weights = local_values(step.model)
        self.trained.snapshot.restore()
        return lost, weights

    def take_the_first(self) -> tuple[bool, list[torch.Tensor]]:
        """The same, without what steps before have left in the optimizer's state."""
        for optimizer in self.trained.step.optimizers:
            optimizer.state.clear()
        return self.take()


EXACT_CHOICES = [
    Choice({CHECKPOINT: checkpoint, RESHARD: reshard, RECOMPUTE_LOSS: recompute})
    for checkpoint in ("none", "1_of_2", "operations", "all")
    for reshard in (False, True)
    for recompute in (False, True)
]


def fail_at_allocations(choices: list[Choice], sample: Sample) -> tuple[int, list[str]]:
    """How many steps were lost, and those after which memory was kept, or the next step had other bits."""
    run = FailingStep()
    lost, wrong = 0, []
    for choice in choices:
        run.trained.step.switch(choice)
        run.take()  # the first step with these collectives
        with run.memory.fail_at(None):
            run.take()
        allocations = sample.of(run.memory.seen)
        _, expected = run.take_the_first()
        before = run.memory.in_use()
        for allocation, _, failure in fail_at_each(allocations, run.memory, run.trained.ranks):
            with failure:
                lost += run.take()[0]
            kept = run.memory.in_use() - before
            again, weights = run.take_the_first()
            if kept or again or not same_bits(weights, expected):
                wrong.append(f"{choice}, allocation {allocation}: {kept} bytes kept")
    return lost, wrong[:9]


def steps_after_switching_back() -> tuple[list[int], bool, bool]:
    """How often ranks agree in the step after each switch to a choice that steps were taken with; whether one
    in which rank 0 runs out of memory is lost, and whether the next one is not."""
    run = FailingStep()
    ranks, asked = run.trained.ranks, []
    agree = ranks.spread
    ranks.spread = lambda value: [asked.append(value), agree(value)][1]  # type: ignore[method-assign]
    kept, freed = (EXACT_CHOICES[0] | {RESHARD: reshard} for reshard in (False, True))
    for choice in (kept, freed):
        run.trained.step.switch(choice)
        run.take()
        run.take()
    agreements = []
    for choice in (kept, freed):
        run.trained.step.switch(choice)
        asked.clear()
        run.take()
        agreements.append(len(asked))
    run.trained.step.switch(kept)
    with run.memory.fail_at(40 if ranks.rank == 0 else None):
        lost, _ = run.take()
    again, _ = run.take()
    return agreements, lost, again


def test_a_sequence_of_collectives_is_kept_for_each_choice() -> None:
    """Or steps that are timed after a switch would be those in which ranks agree before each collective."""
    assert run_ranks(steps_after_switching_back, 2) == [([0, 0], True, False)] * 2


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_stays_of_a_step_that_runs_out_of_memory(ranks: int, sample: Sample) -> None:
    """With each exact choice, at a sample of allocations: of operations, and of what FSDP resizes."""
    numbers = sample.every(exhaustive=1, quick=3 * ranks).of(len(EXACT_CHOICES))
    choices = [EXACT_CHOICES[number - 1] for number in numbers]
    sample = sample.every(exhaustive=17, quick=149)
    for lost, wrong in run_ranks(fail_at_allocations, ranks, choices, sample, timeout=900):
        assert wrong == []
        assert lost > len(choices) * 200 // sample.stride
