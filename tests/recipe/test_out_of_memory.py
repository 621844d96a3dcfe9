"""Memory runs out on one rank, at every operation there is; the others never wait, and no bit changes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torchtune import training
from torchtune.rlhf.loss import DPOLoss

from tests.helpers.decoder import adamw, batch, local_values, same_bits
from tests.helpers.faults import FailingMemory, fail_at_each, survivable
from tests.helpers.models import distillation, tiny_llama, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.trial import SizeTrial
from torchtune_adaptive.core.step.objective import Objective
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.recipe.kinds.preference import Preference
from torchtune_adaptive.recipe.kinds.recipe_kind import without_adapters

pytestmark = pytest.mark.ranks


def second_model(name: str, model: nn.Module, kind_of_model: dict[str, Any]) -> Objective:
    """What is learnt with the help of another model, or of the same one without its adapters."""
    if name == "teacher":
        return distillation(tiny_llama(**kind_of_model, seed=1))
    model.set_num_output_chunks(0)  # type: ignore[operator]
    if name == "adapters off":
        return Preference(DPOLoss(), without_adapters(model, model))
    reference = tiny_llama(**kind_of_model, seed=1).requires_grad_(False)
    reference.set_num_output_chunks(0)  # type: ignore[operator]
    return Preference(DPOLoss(), reference, [reference])


class Everywhere:
    """A model and its step on one rank, to run out of memory at one operation after the other."""

    def __init__(
        self,
        *,
        accumulation: int = 1,
        in_backward: bool = False,
        output_apart: bool = False,
        measure_noise: bool = False,
        second: str | None = None,
        everywhere: bool = False,
        **kind_of_model: Any,
    ) -> None:
        self.ranks = Ranks(timeout=200)
        self.model = tiny_llama(output_apart=output_apart, **kind_of_model)
        self.objective = second_model(second, self.model, kind_of_model) if second else None
        self.in_backward = in_backward
        self.measure_noise = measure_noise
        if in_backward:
            by_parameter = {p: torch.optim.AdamW([p]) for p in self.model.parameters()}
            training.register_optim_in_bwd_hooks(self.model, by_parameter)
            self.optimizers: list[torch.optim.Optimizer] = list(by_parameter.values())
        else:
            self.optimizers = [adamw(self.model)]
        self.accumulation = accumulation
        self.memory = FailingMemory(everywhere)
        self.snapshot = Snapshot(self.model, self.optimizers, torch.device("cpu"))
        self.new_step()
        gc.freeze()  # or each collection after a failure would walk through all that is built

    def new_step(self) -> None:
        """A step that has not seen the sequence of collectives yet."""
        self.step = train_step(
            self.model,
            self.optimizers,
            objective=self.objective,
            memory=self.memory,
            ranks=self.ranks,
            clip_grad_norm=None if self.in_backward else 1.0,
            optimizer_in_backward=self.in_backward,
            measure_noise=self.measure_noise,
        )

    def probe(self) -> Probe:
        return Probe(
            step=self.step,
            accumulation=lambda size: self.accumulation,
            headroom=0.0,
            entering=lambda phase: None,
        )

    def worst(self, rows: int) -> dict[str, Any]:
        return batch(rows=1 if self.objective is None else 2)  # a pair

    def healthy_step(self) -> list[torch.Tensor]:
        """What a step makes of the model as it was in the beginning."""
        for optimizer in self.optimizers:
            optimizer.state.clear()  # a trial leaves numbers there until the search ends
        self.step.forward_backward(batch(rows=2, seed=self.ranks.rank))
        assert not self.step.apply().lost
        values = local_values(self.model)
        self.snapshot.restore()
        return values

    def operations(self, probe: Probe, sample: Sample) -> Iterable[int]:
        """The operations of a trial to fail at, once what a healthy step gives is known."""
        assert probe.prime(self.worst).fits
        self.expected = self.healthy_step()
        with self.memory.fail_at(0) as fault:
            assert probe.trial(1, self.worst).fits
        return sample.of(fault.seen)

    def what_came_of(self, trial: SizeTrial, victim: int | None) -> dict[str, int]:
        """Of a trial in which one rank failed, or all, and of a healthy step after it."""
        failed = trial.reports[victim or 0].failed_in is not None
        blamed = victim is None or trial.deciding_rank == victim
        wrong = not same_bits(self.healthy_step(), self.expected)
        disagreed = not (trial.fits or blamed)
        return {"tried": 1, "failed": failed, "disagreed": disagreed, "wrong": wrong}


def fail_in_trials(sample: Sample, everyone: bool, settings: dict[str, Any]) -> Counter[str]:
    """Fail at operations of a trial, on one rank after the other (or all); then take a healthy step."""
    run = Everywhere(**settings)
    counts: Counter[str] = Counter()
    with run.probe() as probe:
        operations = run.operations(probe, sample)
        for _, victim, failure in fail_at_each(operations, run.memory, run.ranks, everyone):
            with failure:
                trial = probe.trial(1, run.worst)
            counts.update(run.what_came_of(trial, None if everyone else victim))
    return counts


def fail_while_recording(sample: Sample, settings: dict[str, Any]) -> Counter[str]:
    """Fail before the sequence of collectives is known, when ranks agree before each one."""
    run = Everywhere(**settings)
    counts: Counter[str] = Counter()
    with run.probe() as probe:
        operations = run.operations(probe, sample)
    for _, victim, failure in fail_at_each(operations, run.memory, run.ranks):
        run.new_step()
        with run.probe() as probe:
            with failure:
                trial = probe.prime(run.worst)
            counts.update(run.what_came_of(trial, victim))
    return counts


def assert_survived(counts: list[Counter[str]], at_least: int) -> None:
    for count in counts:
        assert count["failed"] == count["tried"] >= at_least
        assert count["disagreed"] == count["wrong"] == 0


@pytest.mark.rotating(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_one_rank_at_every_operation_of_a_trial(
    lora: bool, checkpointing: bool, accumulation: int, sample: Sample
) -> None:
    settings = {"lora": lora, "checkpointing": checkpointing, "accumulation": accumulation}
    counts = run_ranks(fail_in_trials, 2, sample, False, settings, timeout=500)
    assert_survived(counts, at_least=150 // sample.stride)


def fail_where_nothing_is_allocated(sample: Sample) -> list[tuple[bool, bool, bool]]:
    """Fail at operations of all kinds: whether gradients were being scaled, whether the step went well all
    the same, and whether the next one has its bits."""
    run = Everywhere(everywhere=True)
    seen = []
    with run.probe() as probe:
        assert probe.prime(run.worst).fits
        expected = run.healthy_step()
        last, _ = survivable(run.memory, run.step, lambda: probe.trial(1, run.worst))
        before_scaling = last - 1  # which takes one operation for all gradients of a dtype
        operations = [*sample.of(before_scaling), last]
        for operation, _, failure in fail_at_each(operations, run.memory, run.ranks):
            with failure:
                trial = probe.trial(1, run.worst)
            same = same_bits(run.healthy_step(), expected)
            seen.append((operation > before_scaling, trial.fits, same))
    return seen


def test_only_the_scaling_of_gradients_in_place_is_done_again(sample: Sample) -> None:
    """What needs no memory may fail too: a hook does in Python, or a kernel that must be loaded."""
    sample = sample.every(exhaustive=7, quick=101)
    for seen in run_ranks(fail_where_nothing_is_allocated, 2, sample):
        assert len(seen) > 5
        for scaled, fits, same in seen:
            assert fits == scaled and same


SAMPLES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "three ranks": (3, False, {"layers": 2, "checkpointing": True, "accumulation": 2}),
    "all ranks at once": (2, True, {"layers": 2, "accumulation": 2}),
    "optimizer in backward": (2, False, {"layers": 2, "in_backward": True}),
    "not resharded": (2, False, {"layers": 2, "reshard": False, "accumulation": 2}),
    "output sharded apart": (2, False, {"output_apart": True, "checkpointing": True}),
    "distillation": (2, False, {"accumulation": 2, "lora": True, "second": "teacher"}),
    "quantised": (2, False, {"accumulation": 2, "quantised": True, "checkpointing": True}),
    "preference": (2, False, {"accumulation": 2, "second": "reference"}),
    "preference, adapters off": (2, False, {"lora": True, "second": "adapters off"}),
    "measuring noise": (2, False, {"layers": 2, "accumulation": 2, "measure_noise": True}),
    "one rank, measuring noise": (1, False, {"accumulation": 2, "measure_noise": True}),
    "one rank": (1, False, {"layers": 2, "accumulation": 2}),
    "one rank, not sharded": (1, False, {"sharded": False}),
}


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("ranks", "everyone", "settings"), SAMPLES.values(), ids=SAMPLES)
def test_other_kinds_of_run_at_a_sample_of_operations(
    ranks: int, everyone: bool, settings: dict[str, Any], sample: Sample
) -> None:
    sample = sample.every(exhaustive=13, quick=61)
    counts = run_ranks(fail_in_trials, ranks, sample, everyone, settings)
    assert_survived(counts, at_least=130 // sample.stride)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation": 2, "checkpointing": True},
        {"in_backward": True},
        {"lora": True},
        {"accumulation": 2, "measure_noise": True},
        {"second": "reference"},
    ],
    ids=["full", "optimizer in backward", "lora", "measuring noise", "preference"],
)
def test_while_the_sequence_is_being_recorded(settings: dict[str, Any], sample: Sample) -> None:
    sample = sample.every(exhaustive=11, quick=41)
    counts = run_ranks(fail_while_recording, 2, sample, settings)
    assert_survived(counts, at_least=110 // sample.stride)
