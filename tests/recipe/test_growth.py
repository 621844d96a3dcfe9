"""What is asked for, and what the run can have."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from tests.helpers.growing import GROWING, WITHIN_EPOCHS
from tests.helpers.ranks import Alone, run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import RESUME, assert_same_end, refused, stopped_after, train, undisturbed
from torchtune_adaptive.common.errors import BatchIncreaseError, ConfigError
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.sizes.split import Epochs, Split
from torchtune_adaptive.recipe.setup.optimizer import Optimizers
from torchtune_adaptive.recipe.train.growth import Growth
from torchtune_adaptive.recipe.train.learning_rate import LearningRate
from torchtune_adaptive.schedule import Geometric, Moment, Schedule


def rfc(epoch: int, current_batch_size: int) -> int:
    """The RFC's own example: grow by 2 in every second epoch."""
    return 2 if epoch % 2 == 1 else 0


ALONE = Split(2, 1, 1)


def growth(grow: Any, *, start: Split = ALONE, **settings: Any) -> Growth:
    return Growth(
        **{
            "start": start,
            "largest": 8,
            "grow": grow,
            "past_memory": False,
            "samples": 100 * start.ranks,
            "ranks": Alone(start.ranks),
            **settings,
        }
    )


def sizes(growing: Growth, epochs: int) -> list[tuple[int, int]]:
    seen = []
    for epoch in range(epochs):
        growing.as_epoch_begins(epoch, epoch * 100)
        seen.append((growing.split.micro_batch, growing.split.accumulation))
    return seen


def test_the_rfcs_function() -> None:
    assert sizes(growth(rfc), 5) == [(2, 1), (4, 1), (4, 1), (6, 1), (6, 1)]


def test_what_does_not_fit_is_skipped() -> None:
    growing = growth(lambda epoch, size: 5)
    assert sizes(growing, 4) == [(7, 1)] * 4 and growing.decisions == [[0, 7]]


def test_accumulation_stays_as_configured_while_the_micro_batch_grows() -> None:
    assert sizes(growth(lambda epoch, size: size, start=Split(2, 3, 2)), 4) == [
        (4, 3), (8, 3), (8, 3), (8, 3),
    ]  # fmt: skip


def test_past_memory_it_goes_on_by_accumulation_up_to_one_step_per_epoch() -> None:
    growing = growth(lambda epoch, size: size, past_memory=True)
    assert sizes(growing, 7) == [(4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 13), (8, 13)]
    assert growing.split.rows == 100


WRONG: list[tuple[Callable[[int, int], Any], str]] = [
    (lambda e, s: 1.5, "returned 1.5, which is not a whole number"),
    (lambda e, s: float("nan"), "returned nan"),
    (lambda e, s: float("inf"), "returned inf"),
    (lambda e, s: "2", "returned '2'"),
    (lambda e, s: None, "returned None"),
    (lambda e, s: True, "returned True"),
    (lambda e, s: -1, "returned -1: a batch never shrinks"),
    (lambda e, s: 1 // 0, "raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("answer", "said"), WRONG)
def test_a_wrong_answer_names_the_function_the_epoch_and_the_value(
    answer: Callable[[int, int], Any], said: str
) -> None:
    with pytest.raises(BatchIncreaseError) as raised:
        growth(answer).as_epoch_begins(3, 300)
    message = str(raised.value)
    assert said in message and "epoch 3 and batch size 2" in message and "<lambda>" in message
    assert "on rank 0" in message


def test_whole_floats_count_as_whole_numbers() -> None:
    growing = growth(lambda epoch, size: 2.0)  # type: ignore[arg-type, return-value]
    assert sizes(growing, 1) == [(4, 1)]


def ask_ranks_that_disagree(fail_on: int | None) -> int | str:
    ranks = Ranks(timeout=200)

    def function(epoch: int, size: int) -> int:
        if ranks.rank == fail_on:
            raise RuntimeError("no idea")
        return 1 + ranks.rank

    growing = growth(function, start=Split(2, 1, ranks.size), ranks=ranks)
    try:
        growing.as_epoch_begins(0, 0)
    except BatchIncreaseError as error:
        return str(error)
    dist.barrier()
    return growing.split.micro_batch


def test_ranks_that_disagree_follow_rank_zero_and_fail_together() -> None:
    assert run_ranks(ask_ranks_that_disagree, 2, None) == [3, 3]
    for said in run_ranks(ask_ranks_that_disagree, 2, 1):
        assert "raised RuntimeError: no idea (on rank 1)" in said


class Own(Schedule):
    """A schedule of the user's own, which may fail or say something else on some ranks."""

    def __init__(self, says: Callable[[Moment], Any]) -> None:
        self.says = says

    def global_batch(self, now: Moment) -> int:
        return self.says(now)


def test_a_schedule_of_the_users_own_counts_from_the_next_step_on_and_in_whole_rows() -> None:
    growing = growth(Own(lambda now: now.start * 1.5))
    assert growing.before_step(Moment(0, 0.0, 2, 2)) is None and growing.split == ALONE
    assert growing.asks
    grown = growing.agree(2)
    assert grown is not None and growing.split == Split(3, 1, 1)
    assert type(growing.split.micro_batch) is int and growing.decisions == [[2, 3]]
    growing.before_step(Moment(2, 0.02, 2, 3))
    assert not growing.asks, "it wants what there is"


def test_no_rank_asks_for_what_it_cannot_have_or_what_a_schedule_of_ours_says() -> None:
    growing = growth(Own(lambda now: 1000), start=Split(8, 1, 2))
    growing.before_step(Moment(0, 0.0, 16, 16))
    assert not growing.asks
    growing = growth(Geometric())
    assert growing.before_step(Moment(100, 1.0, 2, 2)) is not None
    assert growing.split == Split(4, 1, 1) and not growing.asks
    assert not growth(rfc).asks


@pytest.mark.parametrize(("answer", "said"), WRONG)
def test_a_wrong_answer_of_a_schedule_is_said_once_the_step_is_done(
    answer: Callable[[int, int], Any], said: str
) -> None:
    growing = growth(Own(lambda now: answer(0, 0)))
    growing.before_step(Moment(300, 3.0, 2, 2))
    assert growing.asks and growing.split == ALONE
    with pytest.raises(BatchIncreaseError) as raised:
        growing.agree(302)
    assert said in str(raised.value) and "Own, called with Moment(samples=300," in str(raised.value)
    assert raised.value.everywhere


def test_steps_of_a_schedule_of_the_users_own_can_be_counted_ahead() -> None:
    epochs = Epochs(samples=100, base_batch=2)
    assert growth(Own(lambda now: 4)).steps_ahead(epochs, 1) == 1 + 24
    assert growth(Own(lambda now: 1 // 0)).steps_ahead(epochs, 1) == 50, "a step says what is wrong"


class OnEachRank(Schedule):
    """A schedule that reads what differs between ranks."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails

    def global_batch(self, now: Moment) -> int:
        rank = int(os.environ["RANK"])
        if rank == self.fails and now.samples >= 8:
            raise RuntimeError("no idea")
        return now.start * (1 + (now.samples >= 8 * (1 + rank)))


def grow_on_each_rank(cfg: Any) -> tuple[list[float], list[str]]:
    """The batches of a run, and what this rank warns of."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("torchtune_adaptive").addHandler(Kept(logging.WARNING))
    records = run_ours("full", cfg)
    return [record["global_batch_size"] for record in records], said


def own(**settings: Any) -> dict[str, Any]:
    schedule = {"_component_": f"{__name__}.OnEachRank", **settings}
    return {**GROWING, "max_steps_per_epoch": 6, "epochs": 1, "batch_increase_function": schedule}


@pytest.mark.runs
def test_a_schedule_that_differs_between_ranks_is_found_and_that_of_rank_zero_counts(
    tmp_path: Path,
) -> None:
    cfg = tiny_config("full", tmp_path, **own())
    (batches, said), (_, beside) = run_ranks(grow_on_each_rank, 2, cfg, join=False, timeout=200)
    assert batches == [4, 4, 4, 8], "asked before the third step"
    for warned in (said, beside):
        assert [each for each in warned if "ranks ([8, 4]); using rank 0's" in each], warned


@pytest.mark.runs
def test_a_schedule_that_fails_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    said = refused("BatchIncreaseError", "full", tmp_path, 2, **own(fails=1))
    found = "OnEachRank, called with Moment(samples=8,"
    assert found in said and "raised RuntimeError: no idea (on rank 1)" in said


class Mine(Geometric):
    """As ours, and not ours."""


@pytest.mark.exhaustive
def test_a_run_with_a_schedule_of_the_users_own_goes_on_to_the_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**WITHIN_EPOCHS, "batch_size": 4, "save_every_n_steps": 1}
    changes |= {"max_steps_per_epoch": 8, "epochs": 1, "keep_last_n_checkpoints": 99}
    changes["batch_increase_function"] = {"_component_": f"{__name__}.Mine", "every": 0.5}
    whole, expected = undisturbed("full", 1, **changes)
    sizes = [record["global_batch_size"] for record in expected]
    assert sizes == [4] * 5 + [8], "asked for before the fifth step"
    for stop in (4, 5):
        folder = stopped_after(stop, whole, tmp_path / str(stop))
        assert_same_end(train("full", folder, 1, **changes, **RESUME), expected)


def test_steps_can_be_counted_ahead() -> None:
    epochs = Epochs(samples=100, base_batch=2)
    assert growth(None).steps_ahead(epochs, 3) == 150
    assert growth(Geometric()).steps_ahead(epochs, 3) == 50 + 25 + 12
    assert growth(rfc).steps_ahead(epochs, 3) is None


def test_a_saved_growth_goes_on() -> None:
    first = growth(Geometric(), start=Split(2, 2, 2))
    first.before_step(Moment(200, 1.0, 8, 8))
    second = growth(Geometric(), start=Split(2, 2, 2))
    second.resume(first.state())
    assert second.split == first.split == Split(4, 2, 2) and second.decisions == [[200, 16]]


def test_a_first_batch_whose_last_micro_batch_is_smaller_is_resumed_with_its_rows() -> None:
    saved = growth(Geometric(), start=Split(3, 2, 2, rows=5)).state()
    assert saved.start_on(1, 8) == Split(5, 2, 1, rows=10)
    assert replace(saved, first_batch=None).start_on(1, 8).rows == 12
    assert growth(Geometric(), start=Split(3, 2, 2)).state().first_batch is None


def test_after_a_detour_over_other_ranks_the_first_batch_is_as_it_was() -> None:
    first = growth(None, start=Split(8, 1, 2)).state()
    detour = first.start_on(1, 8)
    assert detour == Split(8, 2, 1)
    alone = growth(None, start=detour, began=first).state()
    assert (alone.decided, alone.start_on(1, 8)) == ([8, 1, 2], detour)
    back = growth(None, start=alone.start_on(2, 8), began=alone)
    assert back.split == Split(8, 1, 2) and back.state() == first


@pytest.mark.parametrize("asking", [rfc, Geometric(1.3)], ids=["rfc", "1.3"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("largest", [3, 8, 100])
@pytest.mark.parametrize("past_memory", [False, True])
def test_on_other_ranks_it_grows_as_on_those_that_it_began_with(
    asking: Any, ranks: int, largest: int, past_memory: bool
) -> None:
    def course(resumed_on: int | None) -> list[int]:
        how: dict[str, Any] = {"past_memory": past_memory, "samples": 400}
        growing = growth(asking, start=Split(2, 2, 4), **how)
        batches = []
        for epoch in range(8):
            if epoch in (2, 5) and resumed_on is not None:
                on = resumed_on if epoch == 2 else 4
                saved, fits = growing.state(), largest if epoch == 2 else 8
                start = saved.start_on(on, fits)
                how["largest"] = fits
                growing = growth(asking, start=start, began=saved, **how)
                growing.resume(saved)
            growing.as_epoch_begins(epoch, 0)
            current = growing.split.global_batch
            growing.before_step(Moment(0, float(epoch), 16, current))
            split = growing.split
            assert split.micro_batch <= (largest if resumed_on and 2 <= epoch < 5 else 8)
            assert (split.rows - 1) * split.ranks < split.global_batch <= split.rows * split.ranks
            batches.append(split.global_batch)
        return batches

    undisturbed = course(None)
    assert undisturbed[-1] > undisturbed[0] and course(ranks) == undisturbed


@pytest.mark.parametrize(
    ("configured", "kept"),
    [
        (Split(4, 1, 1), True),
        (Split(2, 2, 4), True),  # another split of the same batch
        (Split(8, 1, 1), False),
        (Split(4, 2, 1), False),
    ],
)
def test_a_config_with_another_batch_than_the_run_began_with_wins(
    configured: Split, kept: bool
) -> None:
    assert growth(None, start=Split(4, 1, 2)).state().keeps(configured) is kept


def test_other_ranks_keep_the_global_batch() -> None:
    start = growth(Geometric(), start=Split(2, 2, 3)).state().start
    assert Split.of(math.prod(start), 2, 8, start[1]) == Split(3, 2, 2)
    uneven = Split.of(math.prod(start), 5, 8, start[1])
    assert uneven == Split(2, 2, 5, rows=3, global_batch=12)
    assert uneven.text() == "micro-batch 2 x accumulation 2 x 5 ranks, the last ones smaller"
    with pytest.raises(
        ConfigError, match=r"batch_size: 12 is all rows of a step, and not one for each"
    ):
        Split.of(math.prod(start), 13, 8, start[1])


class TestLearningRate:
    """The base schedule moves with samples; what the batch does is never multiplied into it."""

    def make(self, rule: str = "none", half_life: bool = False, **optimizer: Any) -> LearningRate:
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.parameter], **{"lr": 0.1, **optimizer})

        def halving(position: int) -> torch.optim.lr_scheduler.LRScheduler:
            # One that computes each rate from the one that it finds.
            return torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=10, gamma=0.5)

        optimizers = Optimizers((self.optimizer,), self.optimizer)
        rate = LearningRate(optimizers, halving, 0, rule, half_life, start=8)
        self.optimizer.step()
        return rate

    def test_a_larger_step_moves_it_further(self) -> None:
        rate = self.make()
        rate.move_to(9)
        assert rate.now == 0.1
        rate.move_to(25)
        assert rate.now == pytest.approx(0.025) and rate.base_factor == pytest.approx(0.25)

    def test_scaling_does_not_leak_into_the_base_schedule(self) -> None:
        rate = self.make("linear")
        for position in range(1, 26):
            rate.move_to(position)
            rate.follow(8 * (1 + position // 5), None)
        assert rate.now == pytest.approx(0.025 * 6)
        rate.follow(8, None)
        assert rate.now == pytest.approx(0.025)

    def test_a_rate_that_is_a_tensor_stays_one(self) -> None:
        rate = self.make("sqrt", lr=torch.tensor(0.1))
        rate.move_to(10)
        rate.follow(32, None)
        assert isinstance(self.optimizer.param_groups[0]["lr"], torch.Tensor)
        assert rate.now == pytest.approx(0.1)

    @pytest.mark.parametrize("steps", [1, 10, 300])
    def test_beta2_can_change_without_a_jump(self, steps: int) -> None:
        """With a constant gradient Adam's update is 1 whatever beta2 is, if the moment is right."""
        rate = self.make(half_life=True, lr=0.0, weight_decay=0.0, eps=0.0)
        for _ in range(steps):
            self.parameter.grad = torch.full((3,), 0.3)
            self.optimizer.step()
        rate.follow(32, None)
        assert self.optimizer.param_groups[0]["betas"] == (0.9, pytest.approx(0.999**4))
        self.optimizer.param_groups[0]["lr"] = 1.0
        before = self.parameter.detach().clone()
        self.parameter.grad = torch.full((3,), 0.3)
        self.optimizer.step()
        assert torch.allclose(before - self.parameter.detach(), torch.ones(3), atol=1e-4)
        assert self.optimizer.state[self.parameter]["exp_avg"].abs().min() > 0

    def cosine(
        self, rate: float, total: int, position: int = 0, saved: Any = None, anew: bool = False
    ) -> LearningRate:
        """A rate that falls to zero; resumed with a saved state, if there is one."""
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=rate)
        if saved is not None:  # what an optimizer's state has of it
            optimizer.param_groups[0] |= {"lr": 0.123, "initial_lr": 0.1}

        def make(position: int) -> torch.optim.lr_scheduler.LRScheduler:
            return get_cosine_schedule_with_warmup(optimizer, 5, total, last_epoch=position - 1)

        optimizers = Optimizers((optimizer,), optimizer)
        made = LearningRate(optimizers, make, position, "sqrt", False, 8, total, anew)
        if saved is not None:
            made.load_state_dict(saved)
        return made

    @pytest.mark.parametrize(
        ("rate", "total", "anew"),
        [(0.03, 20, True), (0.03, 40, True), (0.03, 20, False), (0.1, 40, False), (0.1, 12, False)],
    )
    @pytest.mark.parametrize("position", [3, 11, 20])
    def test_a_resumed_rate_is_that_of_a_run_with_these_settings_from_the_beginning(
        self, rate: float, total: int, anew: bool, position: int
    ) -> None:
        """To the bit, with another length or, if it is asked for, another rate; and when it is resumed once
        more."""
        before = self.cosine(0.1, 20)
        expected = self.cosine(rate if anew else 0.1, total)
        for made in (before, expected):
            made.move_to(position)
            made.follow(16, None)
        first = self.cosine(rate, total, position, before.state_dict(), anew)
        second = self.cosine(rate, total, position, first.state_dict(), anew)
        third = self.cosine(rate, total, position, first.state_dict(), False)
        for resumed in (first, second, third):
            assert (resumed.now, resumed.base_factor) == (expected.now, expected.base_factor)
        for made in (expected, first, second, third):
            made.move_to(position + 1)
            assert made.now == expected.now

    def test_a_constant_rate_can_be_changed(self) -> None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.03)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizers = Optimizers((optimizer,), optimizer)
        rate = LearningRate(optimizers, lambda _: None, 7, "none", False, 8, 20, anew=True)
        assert rate.now == 0.03 and rate.base_factor == 1.0

    def test_a_saved_rate_goes_on(self) -> None:
        first = self.make("sqrt")
        for position in range(1, 15):
            first.move_to(position)
        first.follow(16, None)
        state = first.state_dict()
        second = self.make("sqrt")
        second.load_state_dict(state)
        assert second.now == first.now
        for rate in (first, second):
            rate.move_to(30)
        assert second.now == first.now
