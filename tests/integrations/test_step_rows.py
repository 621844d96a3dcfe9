"""The rows of a trainer's step on other numbers of processes, as arithmetic."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations.step_rows import StepRows


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
