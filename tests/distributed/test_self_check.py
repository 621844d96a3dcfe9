"""A torch on which tracing does not hold is noticed, and there is no prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from torchtune_adaptive import recorder
from torchtune_adaptive.errors import NoPrediction
from torchtune_adaptive.self_check import check_method


def check(fault: str, cache: bool | str) -> str:
    """What is said with something of torch not as it was."""
    if fault == "gradients are always added out of place":
        recorder._is_accumulation = lambda *_: False
    elif fault == "storages are resized elsewhere":
        recorder.Recorder.knows = lambda self, storage: False
    try:
        check_method(cache)
    except NoPrediction as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("gradients are always added out of place", "should take 4 allocations and took 6"),
        ("storages are resized elsewhere", "should take"),
    ],
)
def test_a_torch_that_works_otherwise_is_refused(fault: str, reason: str) -> None:
    [said] = run_ranks(check, 1, fault, False, timeout=60, join=False)
    assert said.startswith("With torch ")
    assert reason in said


def test_what_has_passed_is_remembered(tmp_path: Path) -> None:
    assert run_ranks(check, 1, "", str(tmp_path), timeout=60, join=False) == [""]
    fault = "storages are resized elsewhere"  # would be noticed, if it were looked at again
    assert run_ranks(check, 1, fault, str(tmp_path), timeout=60, join=False) == [""]
