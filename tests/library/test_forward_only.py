"""Phases without gradients in a caller's loop: a size of their own, and the same results whatever fails."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.helpers.faults import fail_at_each
from tests.helpers.library import Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import TrainingOutOfMemory, UsageError, find_batch_size

ROWS = 16


class Scored(Trained):
    """A model that scores rows between steps."""

    def __init__(self, way: str, gathers: bool = False, **settings: Any) -> None:
        super().__init__(way, **settings)
        self.score = self.step.forward_only(self.distances, gathers=gathers)
        self.rows = rows_of(ROWS, seed=self.step.ranks.rank)

    def distances(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        assert not self.model.training and not torch.is_grad_enabled()
        return (self.model(inputs) - targets).square().sum(1)

    def scores(self, size: int = 8) -> torch.Tensor:
        return torch.stack(self.score(self.rows, collate, size))

    def train(self) -> float:
        return self.step(self.rows, collate, 8).loss


def worst(rows: int) -> Any:
    return collate(rows_of(rows))


def scored_and_trained(way: str, gathers: bool) -> tuple[bool, bool]:
    """Whether scores are those of the model, and whether training continues as without them."""
    run, plain = Scored(way, gathers), Scored(way)
    expected = [plain.train() for _ in range(3)]
    before = run.scores()
    losses = [run.train()]
    same = torch.equal(before, run.scores()), torch.equal(before, Scored(way).scores())
    losses += [run.train(), run.train()]
    return same == (False, True), losses == expected


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "way", "gathers"),
    [
        (1, "alone", False),
        (2, "fsdp", False),
        (2, "fsdp", True),
        (2, "ddp", True),
        (4, "hsdp", True),
    ],
)
def test_scores_are_those_of_the_model_and_training_is_as_without(
    ranks: int, way: str, gathers: bool
) -> None:
    assert run_ranks(scored_and_trained, ranks, way, gathers) == [(True, True)] * ranks


def search(gathers: bool) -> tuple[int, int, bool, bool]:
    """The sizes of training and of scoring in little memory; the next is too large; there is no trace."""
    run = Scored("fsdp", gathers, width=32, layers=4, memory_limit="150KiB")
    rows = lambda count: collate(rows_of(count, width=32))  # noqa: E731
    state = torch.get_rng_state()
    training = find_batch_size(run.step, rows, ceiling=512)
    scoring = find_batch_size(run.step, rows, phase=run.score, ceiling=512)
    larger = any(trial.size == 2 * scoring and not trial.fits for trial in scoring.trials)
    clean = torch.equal(state, torch.get_rng_state()) and not run.optimizer.state
    return int(training), int(scoring), larger, clean


@pytest.mark.ranks
@pytest.mark.parametrize("gathers", [False, True], ids=["together", "gathered"])
def test_a_phase_has_a_size_of_its_own(gathers: bool) -> None:
    for training, scoring, larger_fails, clean in run_ranks(search, 2, gathers):
        assert training < scoring and larger_fails and clean


def fail_at_operations(sample: Sample, way: str, gathers: bool) -> int:
    """Score where memory runs out on one rank after the other; train after each; how often it failed."""
    run, memory = failing(way, Scored, gathers=gathers)
    plain = Scored(way, gathers)
    assert isinstance(run, Scored)
    expected = run.scores()
    with memory.fail_at(0) as fault:
        run.scores()
    failed = 0
    for _, _, failure in fail_at_each(sample.of(fault.seen), memory, run.step.ranks):
        run.score = run.step.forward_only(run.distances, gathers=gathers)
        with failure:
            found = run.scores()
        failed += run.score.phase.size < 8
        torch.testing.assert_close(found, expected)
        assert run.train() == plain.train()
        expected = plain.scores()
        assert torch.equal(run.scores(), expected)
    return failed


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "gathers"), [("fsdp", False), ("ddp", True)])
def test_memory_runs_out_at_operations_of_a_phase(way: str, gathers: bool, sample: Sample) -> None:
    sample = sample.every(exhaustive=1, quick=7)
    failed = run_ranks(fail_at_operations, 2, sample, way, gathers)
    assert all(failed)


def cleared_up(way: str) -> tuple[list[int], bool, bool]:
    """How often memory is given back in a healthy phase that gathers, in one that loses memory in its work,
    in one that loses it at first, and in one that raises; whether parameters are as sharded after each as
    before; and whether training goes on as without."""
    run, memory = failing(way, Scored, gathers=True)
    plain, healthy = Scored(way), run.score  # type: ignore[attr-defined]
    assert isinstance(run, Scored)
    raising = run.step.forward_only(lambda batch: [1 / 0], name="raising", gathers=True)
    release, releases = memory.release, list[int]()
    memory.release = lambda: (releases.append(1), release())[1]  # type: ignore[method-assign]
    losses, counts, kinds = [run.train()], [], [[*map(type, run.model.parameters())]]
    with memory.fail_at(0) as fault:
        run.scores()
    for work, operation in [(healthy, None), (healthy, fault.seen), (healthy, 1), (raising, None)]:
        releases.clear()
        # Where gathering is lost, so is the phase.
        with memory.fail_at(operation), suppress(ZeroDivisionError, TrainingOutOfMemory):
            work(run.rows, collate, 8)
        counts.append(len(releases))
        kinds.append([*map(type, run.model.parameters())])
        losses.append(run.train())
    alike = all(each == kinds[0] for each in kinds)
    return counts, alike, losses == [plain.train() for _ in range(5)]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "way"), [(1, "alone"), (2, "fsdp")])
def test_a_phase_that_gathers_clears_up_only_where_something_was_lost(ranks: int, way: str) -> None:
    for (healthy, *others), sharded, as_without in run_ranks(cleared_up, ranks, way):
        assert healthy == 0 and all(others)
        assert sharded and as_without


def test_a_retry_that_clears_up_after_a_phase_is_not_the_steps() -> None:
    run, memory = failing("alone", Scored, gathers=True)
    assert isinstance(run, Scored)
    plain = run.step.forward_only(run.distances)
    sizes = []
    for phase, retries in [(run.score, 1), (run.score, 1), (run.score, 2), (plain, 1)]:
        phase(run.rows, collate, 8)
        memory.retried += retries
        outcome = run.step(run.rows, collate, 8)
        sizes.append((outcome.allocation_retries, run.step.micro_batch))
    assert sizes == [(0, 8), (0, 8), (1, 8), (1, 4)]


class TestRefused:
    """What cannot work is refused in one line."""

    def test_the_phase_of_another_step(self) -> None:
        run, other = Scored("alone", memory_limit="1MiB"), Scored("alone", memory_limit="1MiB")
        with pytest.raises(UsageError, match="phase: pass what forward_only of this step made"):
            find_batch_size(run.step, worst, phase=other.score)

    @pytest.mark.parametrize("value", [3, None])
    def test_work_that_is_no_function(self, value: Any) -> None:
        with pytest.raises(UsageError, match="work: "):
            Scored("alone").step.forward_only(value)

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda batch: None, "gave a NoneType for 8 rows"),
            (lambda batch: torch.zeros(3), "gave a Tensor of 3 for 8 rows"),
            (lambda batch: torch.zeros(()), "gave a Tensor for 8 rows"),
            (lambda batch: [1.0], "gave a list of 1 for 8 rows"),
        ],
    )
    def test_not_one_result_for_each_row(self, made: Any, said: str) -> None:
        run = Scored("alone")
        score = run.step.forward_only(made, name="scoring")
        with pytest.raises(UsageError, match=f"forward_only: scoring {said}"):
            score(run.rows, collate, 8)
        assert run.train() == Scored("alone").train()  # nothing is left of it


def test_a_phase_continues_where_its_state_was_taken() -> None:
    run, lost = Scored("alone"), []

    def losing(*_: Any) -> None:
        if len(lost) < 2:
            lost.append(run.score.phase.size)
            raise torch.OutOfMemoryError

    hook = run.model.register_forward_pre_hook(losing)
    scores = run.scores()
    hook.remove()
    assert lost == [8, 4]
    resumed = Scored("alone")
    resumed.score.load_state_dict(run.score.state_dict())
    assert resumed.score.phase.size == 2
    assert torch.equal(resumed.scores(), scores) and resumed.score.phase.size == 2
    resumed.scores(size=4)
    assert resumed.score.phase.size == 4, "another size begins anew"
    resumed.score.load_state_dict(Scored("alone").score.state_dict())
    torch.testing.assert_close(resumed.scores(), scores)
    assert resumed.score.phase.size == 8, "what has lost nothing begins at its size"
