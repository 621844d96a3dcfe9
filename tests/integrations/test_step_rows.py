"""The rows of a trainer's step on other numbers of processes, as arithmetic."""

from __future__ import annotations

from dataclasses import astuple
from itertools import chain, product
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.step_rows import StepRows, deal


def test_a_step_keeps_its_rows_wherever_they_divide() -> None:
    for batch in (1, 3, 4):
        for accumulation in (1, 2, 3):
            for processes in (1, 2, 3, 4, 8):
                began = StepRows(batch, accumulation, processes)
                for others in range(1, 9):
                    given = StepRows(batch, accumulation, others)
                    if began.number % others:
                        with pytest.raises(UsageError, match=f"its steps have {began.number} row"):
                            given.resumed(astuple(began))
                        continue
                    kept, now = given.resumed([*astuple(began)])
                    assert kept == began and now.number == began.number
                    assert now.processes == others
                    share = began.number // others
                    if share % accumulation == 0:
                        assert now.accumulation == accumulation
                    assert others != processes or now == began


def test_what_somebody_has_changed_stays_as_it_is() -> None:
    given = StepRows(4, 2, 3)
    assert given.resumed((4, 4, 4)) == (given, given)
    assert given.resumed(None) == (given, given)


def test_an_error_says_which_processes_can_share_a_step() -> None:
    with pytest.raises(UsageError) as refused:
        StepRows(4, 4, 7).resumed((4, 4, 4))
    assert str(refused.value) == (
        "resume_from_checkpoint: its steps have 64 rows, which 7 processes cannot share equally. Processes "
        "that can: 1, 2, 4, 8, 16, 32. For steps of another size, change the batch size or the accumulation."
    )


def epoch_of(batches: Any) -> list[list[int]]:
    assert len(batches) == len(list(batches))
    return list(batches)


def steps_of(rows: StepRows, of_each: list[list[list[int]]]) -> list[list[int]]:
    """The rows of each step on all processes, given the batches of each."""
    assert len({len(batches) for batches in of_each}) == 1, "they take as many batches"
    batches = [sorted(chain(*one)) for one in zip(*of_each, strict=True)]
    starts = range(0, len(batches), rows.accumulation)
    return [sorted(chain(*batches[at : at + rows.accumulation])) for at in starts]


def loaded(number: int, rows: StepRows, process: int, drop_last: bool = False) -> Any:
    """A loader of one of these processes, whose batches accelerate deals out."""
    plain = DataLoader(range(number), rows.batch, drop_last=drop_last)  # type: ignore[arg-type, var-annotated]
    if rows.processes > 1:
        shard = BatchSamplerShard(plain.batch_sampler, rows.processes, process)
        private.replace_batch_sampler(plain, lambda _: shard)
    return plain


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (4, 3), (1, 4), (3, 1)])
def test_each_step_of_an_epoch_has_the_rows_that_accelerate_gave_it(
    batch: int, accumulation: int, drop_last: bool
) -> None:
    ran = refused = 0
    for before, now in product((1, 2, 3, 4), repeat=2):
        began = StepRows(batch, accumulation, before)
        if began.number % now:
            continue
        rows = began.on(now)
        for number in range(1, 2 * began.number, 3):
            plain = [loaded(number, began, p, drop_last).batch_sampler for p in range(before)]
            steps = steps_of(began, [epoch_of(batches) for batches in plain])
            loaders = [loaded(number, rows, p, drop_last) for p in range(now)]
            if before != now and steps and 0 < len(steps[-1]) < now:
                with pytest.raises(UsageError, match="the last step of an epoch has"):
                    deal(loaders[0], began, rows, 0)
                refused += 1
                continue
            last = {deal(loader, began, rows, p) for p, loader in enumerate(loaders)}
            in_last = sum(map(len, steps)) % began.number
            assert last == ({None} if before == now else {in_last})
            assert steps_of(rows, [epoch_of(loader.batch_sampler) for loader in loaders]) == steps
            ran += 1
    assert ran > 20 and (drop_last or refused)


def test_an_error_says_which_processes_can_share_the_last_step() -> None:
    began, rows = StepRows(4, 2, 1), StepRows(2, 2, 2)
    with pytest.raises(UsageError) as refused:
        deal(loaded(9, rows, 0), began, rows, 0)
    assert str(refused.value) == (
        "resume_from_checkpoint: the last step of an epoch has 1 row, which 2 processes cannot share "
        "equally. Processes that can: 1. For steps of another size, change the batch size or the "
        "accumulation."
    )


def test_batches_that_are_chosen_otherwise_stay() -> None:
    began, rows = StepRows(4, 2, 2), StepRows(8, 2, 1)
    own = DataLoader(range(20), batch_sampler=[[1, 2], [3, 4]])  # type: ignore[arg-type, var-annotated]
    assert deal(own, began, rows, 0) is None and list(own.batch_sampler) == [[1, 2], [3, 4]]
    shared = loaded(20, StepRows(8, 1, 1), 0)
    split = BatchSamplerShard(shared.batch_sampler, 4, 0, split_batches=True)
    private.replace_batch_sampler(shared, lambda _: split)
    assert deal(shared, began, StepRows(8, 1, 4), 0) is None and shared.batch_sampler is split
