"""Phases beside training: the same results whatever fails, on all ranks together and on each by itself."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.decoder import adamw, batch, local_values, same_bits, tiny_decoder, train_step
from tests.helpers.faults import FailingMemory, fail_at_each
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.common.errors import TrainingOutOfMemory
from torchtune_adaptive.core.private import launches_of
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.sizes.packing import Budget
from torchtune_adaptive.core.step import phase as phase_module
from torchtune_adaptive.core.step import train_step as train_step_module
from torchtune_adaptive.core.step.phase import Phase

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

ROWS = 7


class Run:
    """A model that is trained, and scores rows between steps, on one rank."""

    def __init__(
        self, memory: FailingMemory | None = None, unlike: bool = False, **kind_of_model: Any
    ) -> None:
        self.ranks = Ranks(timeout=200)
        self.memory = memory or FailingMemory()
        self.model = tiny_decoder(layers=2, **kind_of_model)
        optimizer = adamw(self.model)
        self.step = train_step(
            self.model, [optimizer], memory=self.memory, ranks=self.ranks, clip_grad_norm=1.0
        )
        self.events: list[tuple[str, int, int]] = []
        self.rows = [(torch.arange(6) + n + 5 * self.ranks.rank) % 16 for n in range(ROWS)]
        if unlike:
            self.rows = [
                row[: 1 + (n + 2 * self.ranks.rank) % 6] for n, row in enumerate(self.rows)
            ]
        self.lengths = [[*map(len, rows)] for rows in self.ranks.gather(self.rows)]

    def phase(self, gathers: bool, size: int = 4) -> Phase[Any, Any]:
        made = Phase(
            "scoring",
            self.step,
            self.scores,
            gathers=self.model if gathers else None,
            sharded=self.scores,
            adjusted=lambda *event: self.events.append(event),
        )
        made.begin(size)
        return made

    def results(self, phase: Phase[Any, Any]) -> list[float]:
        """The scores of all rows; of a size that is a number of tokens, where rows differ in length."""

        def divide(done: int, size: int) -> list[list[int]]:
            budget = Budget.of_tokens(6 * size, 6)
            return budget.micro_batches(self.lengths, self.ranks.rank, done)

        unlike = len({*self.lengths[0]}) > 1
        return phase.of_rows(self.rows, divide if unlike else None)

    def scores(self, rows: list[torch.Tensor]) -> list[float]:
        padded = pad_sequence(rows, batch_first=True)
        logits = torch.cat(self.model(padded), dim=1).double().square().sum(2)
        return [float(of_row[: len(row)].sum()) for of_row, row in zip(logits, rows, strict=True)]

    def train(self, number: int) -> None:
        torch.manual_seed(number)
        for n in range(2):
            self.step.forward_backward(batch(rows=2, seed=10 * number + n + self.ranks.rank))
        assert not self.step.apply().lost


def train_and_score(settings: dict[str, Any], gathers: bool | None) -> list[torch.Tensor]:
    """The state after a few steps, with a phase between them or without; before the first step as well."""
    run = Run(**settings)
    phase = run.phase(bool(gathers))
    for number in range(4):
        if gathers is not None:
            assert len(phase.of_rows(run.rows)) == ROWS
        run.train(number)
    return [*local_values(run.model), torch.get_rng_state()]


def phases_change_nothing(settings: dict[str, Any]) -> list[bool]:
    expected = train_and_score(settings, None)
    return [same_bits(train_and_score(settings, gathers), expected) for gathers in (False, True)]


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {"dropout": 0.3}),
    "adapters": (2, {"adapters": True}),
    "not resharded": (2, {"reshard": False}),
    "checkpointed": (2, {"checkpointing": True, "dropout": 0.3}),
    "output sharded apart": (2, {"output_apart": True}),
    "one rank, not sharded": (1, {"sharded": False, "dropout": 0.3}),
}


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("ranks", "settings"), KINDS.values(), ids=KINDS)
def test_training_is_the_same_with_phases_and_without(ranks: int, settings: dict[str, Any]) -> None:
    assert run_ranks(phases_change_nothing, ranks, settings) == [[True, True]] * ranks


def launches_while_gathered() -> tuple[list[int], bool]:
    """The collectives of a phase in micro-batches of each size, and whether its results were the same."""
    run = Run()
    group = torch.distributed.group.WORLD
    assert group is not None
    found, launched = [], []
    for size in (1, 1, 2, 7):
        phase = run.phase(gathers=True, size=size)
        before = launches_of(group)
        found.append(phase.of_rows(run.rows))
        launched.append((launches_of(group) or 0) - (before or 0))
    sharded = run.phase(gathers=False).of_rows(run.rows)
    return launched, all(each == pytest.approx(sharded, rel=1e-6) for each in found)


def resets_around_a_phase() -> list[int]:
    """How often FSDP is reset in a phase of many micro-batches, in the step after it, and in another step."""
    run, resets = Run(), []
    run.train(0)
    with patch.object(train_step_module.fsdp, "reset", side_effect=resets.append):
        found = []
        for work in (
            lambda: run.phase(gathers=False, size=1).of_rows(run.rows),
            lambda: run.train(1),
            lambda: run.train(2),
        ):
            work()
            found.append(len(resets))
            resets.clear()
    return found


def test_fsdp_is_reset_once_after_a_phase() -> None:
    assert run_ranks(resets_around_a_phase, 2) == [[0, 1, 0]] * 2


def stay_sharded_with_other_sizes() -> tuple[int, bool]:
    """A phase whose parameters do not fit, after memory ran out on one rank alone: its size, and whether its
    results were the same."""
    run = Run()
    expected = run.phase(gathers=False).of_rows(run.rows)
    phase = run.phase(gathers=True, size=4 if run.ranks.is_zero else 1)
    with run.memory.fail_at(3 if run.ranks.is_zero else None):
        found = phase.of_rows(run.rows)
    return phase.size, found == pytest.approx(expected, rel=1e-6)


def test_parameters_are_gathered_once_for_all_rows() -> None:
    for launched, same in run_ranks(launches_while_gathered, 2):
        assert launched == [launched[0]] * 4 and launched[0] > 0
        assert same
    assert run_ranks(stay_sharded_with_other_sizes, 2) == [(1, True)] * 2


def fail_in_a_phase(
    sample: Sample, gathers: bool, recording: bool, settings: dict[str, Any]
) -> Any:
    """Run out of memory on one rank after the other, and train after each; which sizes came of it."""
    run, reference = Run(**settings), Run(**settings)
    expected = run.results(run.phase(gathers))
    assert run.results(reference.phase(gathers)) == expected
    gc.freeze()
    with run.memory.fail_at(0) as fault:
        run.results(run.phase(gathers))
    run.results(reference.phase(gathers))
    sizes = []
    failures = fail_at_each(sample.of(fault.seen), run.memory, run.ranks)
    for number, (_, failing, failure) in enumerate(failures):
        if recording:
            run, reference = Run(run.memory, **settings), Run(**settings)
        phase = run.phase(gathers)
        with failure:
            found = run.results(phase)
        sizes.append((run.ranks.rank == failing, phase.size))
        healthy = run.results(run.phase(gathers))
        assert healthy == run.results(reference.phase(gathers))
        assert found == pytest.approx(healthy, rel=1e-6)
        run.train(number)
        reference.train(number)
        assert same_bits(local_values(run.model), local_values(reference.model))
    return sizes


OF_MODELS = {
    "full": {},
    "adapters": {"adapters": True},
    "not resharded": {"reshard": False},
    "in tokens": {"unlike": True},
}
IN_BRIEF = {
    ("full", "together", "known"),
    ("full", "gathered", "recording"),
    ("in tokens", "together", "known"),
}
FAILURES = [
    pytest.param(
        OF_MODELS[name],
        way == "gathered",
        known == "recording",
        id=f"{name}-{way}-{known}",
        marks=() if (name, way, known) in IN_BRIEF else pytest.mark.exhaustive,
    )
    for name in OF_MODELS
    for way in ("together", "gathered")
    if (name, way) != ("in tokens", "gathered")
    for known in ("known", "recording")
]


@pytest.mark.parametrize(("settings", "gathers", "recording"), FAILURES)
def test_one_rank_at_every_operation_of_a_phase(
    settings: dict[str, Any], gathers: bool, recording: bool, sample: Sample
) -> None:
    # In tokens there are more micro-batches, and so more operations.
    sample = sample.every(exhaustive=13 if "unlike" in settings else 3, quick=41)
    for sizes in run_ranks(fail_in_a_phase, 2, sample, gathers, recording, settings):
        assert {size for failed_here, size in sizes if failed_here} <= {2, 4}
        others = {size for failed_here, size in sizes if not failed_here}
        assert others <= ({4} if gathers else {2, 4})


def fit_nothing() -> tuple[str, bool]:
    run = Run()
    phase = run.phase(gathers=False, size=1)
    with run.memory.fail_at(5), pytest.raises(TrainingOutOfMemory) as raised:
        phase.of_rows(run.rows)
    return str(raised.value), phase.of_rows(run.rows) == run.phase(gathers=False, size=1).of_rows(
        run.rows
    )


def test_not_even_one_row_fits() -> None:
    said = "out of memory in scoring on ranks 0 and 1, with a single row."
    assert run_ranks(fit_nothing, 2) == [(said, True)] * 2


def fit_after_a_wait() -> tuple[list[float], list[tuple[str, int, int]], bool]:
    run, waited = Run(), []
    phase = run.phase(gathers=False, size=1)
    phase.wait_for_memory = 5.0
    with run.memory.fail_at(5), patch.object(phase_module.time, "sleep", waited.append):
        found = phase.of_rows(run.rows)
    return waited, run.events, found == run.phase(gathers=False, size=1).of_rows(run.rows)


def test_not_even_one_row_fits_for_a_moment() -> None:
    said = "out of memory in scoring on ranks 0 and 1, with a single row: retrying in 1 s"
    assert run_ranks(fit_after_a_wait, 2) == [([1.0], [(said, 1, 1)], True)] * 2


def try_a_size(gathers: bool) -> list[list[str | None]]:
    run = Run()
    probe = Probe(
        step=run.step,
        accumulation=lambda size: 1,
        headroom=0.0,
        entering=lambda phase: None,
    )
    before = [value.clone() for value in local_values(run.model)]
    # As in a search, it has no size yet.
    gathered = run.model if gathers else None
    phase = Phase("scoring", run.step, run.scores, gathers=gathered, sharded=run.scores)
    tried = []
    with probe:
        assert probe.prime(lambda rows: batch(rows=rows)).fits
        with run.memory.fail_at(0) as fault:
            tried.append(probe.trial_of(phase, 4, run.rows[:4]))
        with run.memory.fail_at(fault.seen - 2 if run.ranks.is_zero else None):
            tried.append(probe.trial_of(phase, 4, run.rows[:4]))
        with run.memory.fail_at(3 if run.ranks.is_zero else None):
            tried.append(probe.trial_of(phase, 4, run.rows[:4]))
    assert same_bits(local_values(run.model), before)
    return [[report.failed_in for report in trial.reports] for trial in tried]


@pytest.mark.parametrize("gathers", [False, True], ids=["together", "gathered"])
def test_a_phase_is_tried_like_a_step(gathers: bool) -> None:
    sharded = [None if gathers else "scoring", None]  # what is not gathered is tried sharded
    expected = [[None, None], ["scoring", None], sharded]
    assert run_ranks(try_a_size, 2, gathers) == [expected] * 2
