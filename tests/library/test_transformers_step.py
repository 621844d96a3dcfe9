"""A trainer to be planned by settings: the program that it is, and what it needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchtune_adaptive.common import NoPrediction, UsageError
from torchtune_adaptive.library import TransformersStep, transformers_step
from torchtune_adaptive.planner import gpus

H100 = gpus.gpu("h100")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: name)


def told(**settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        TransformersStep(folder="model", **settings).program(H100).words[2]
    )
    return found


def test_steps_with_other_rows_are_one_program() -> None:
    few, many = ({"per_device_train_batch_size": rows} for rows in (1, 64))
    assert told(**few) == told(**many)
    generating = {"trainer": "GRPOTrainer"}
    assert told(**generating, **few) != told(**generating, **many)


def test_a_folder_is_found_from_anywhere() -> None:
    assert told()["folder"].startswith("/")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_step, "find_spec", lambda name: None)
    with pytest.raises(NoPrediction, match="pip install transformers"):
        TransformersStep(folder="model").plan()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"gpu": "none"}, "gpu: 'none'"),
        ({"memory": "much"}, "memory: 'much'"),
        ({"ceiling": 0}, "ceiling: 0 must be a whole number"),
        ({"headroom": 1.5}, "headroom: 1.5 must be a share"),
        ({"timeout": -1}, "timeout: -1"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        TransformersStep(folder="model").plan(**arguments)
    with pytest.raises(UsageError, match="ranks: 0"):
        TransformersStep(folder="model", ranks=0)
