"""Evaluations in which memory runs out: what they log and predict is that of the plain trainer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from tests.helpers.faults import OutOfMemoryAt
from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    NAMES,
    fsdp2_on_cpu,
    make,
    on_ranks,
    rank,
    texts,
    tokens,
)
from tests.integrations.real.ways import FSDP2

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
WAYS: dict[str, dict[str, Any]] = {"alone": {}, "ddp": {}, "fsdp2": FSDP2}


def lose_memory(trainer: Any, at: Mapping[int, int]) -> Callable[[], int]:
    """Lose memory at operations of attempts to compute the loss of a batch in evaluation, both counted from
    1; gives how many attempts there were."""
    compute_loss, loop, attempts, evaluates = (
        trainer.compute_loss,
        trainer.evaluation_loop,
        0,
        False,
    )

    def losing(*given: Any, **named: Any) -> Any:
        nonlocal attempts
        if not evaluates:
            return compute_loss(*given, **named)
        attempts += 1
        operation = at.get(attempts)
        with OutOfMemoryAt(operation) if operation else nullcontext():
            return compute_loss(*given, **named)

    def evaluating(*given: Any, **named: Any) -> Any:
        nonlocal evaluates
        evaluates = True
        try:
            return loop(*given, **named)
        finally:
            evaluates = False

    trainer.compute_loss, trainer.evaluation_loop = losing, evaluating
    return lambda: attempts


def data_of(kind: str, count: int) -> Any:
    if kind == "trainer":
        return tokens(count, ragged=True)
    if kind in ("grpo", "rloo"):
        return texts("prompt", count=count)
    rows = texts(*NAMES[kind], count=count)
    if kind == "kto":
        rows = rows.add_column("label", [number % 3 > 0 for number in range(count)])
    return rows


def evaluated(
    kind: str, ours: bool, lost: tuple[int, Mapping[int, int]] = (0, {}), **settings: Any
) -> Any:
    """The logs of evaluations while a trainer trains, and how it divided their batches."""
    on, at = lost
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
        "eval_on_start": True,
        "per_device_eval_batch_size": 8,
        "eval_dataset": data_of(kind, 20),
    } | settings
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtune_adaptive")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(kind, AS_CONFIGURED if ours else None, folder, **settings)
        attempts = lose_memory(trainer, at if rank() == on else {})
        trainer.train()
    logger.removeHandler(handler)
    times = ("runtime", "per_second", "model_preparation_time", "step_time")
    logs = [
        {name: value for name, value in each.items() if not name.endswith(times)}
        for each in trainer.state.log_history
        if "eval_loss" in each
    ]
    return logs, [line for line in lines if line.startswith("batch of")], attempts()


def far(ours: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, float]:
    """How far each metric is from the plain trainer's."""
    assert len(ours) == len(plain) > 0
    found: dict[str, float] = {}
    for one, other in zip(ours, plain, strict=True):
        assert {*one} == {*other}
        for name, value in other.items():
            distance = abs(one[name] - value) / max(1e-3, abs(value))
            found[name] = max(found.get(name, 0.0), distance)
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    counted = labels != -100
    return {
        "accuracy": float((prediction.predictions == labels)[counted].mean()),
        "labels": float(counted.sum()),
    }


def best(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


METRICS = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best}
CASES: dict[str, dict[str, Any]] = {
    "trainer": {},
    "trainer, metrics": METRICS | {"eval_accumulation_steps": 1},
    "sft": {},
    "dpo": {},
    "reward": {},
    "kto": {},
    "grpo": {},
    "grpo, by rows": {"loss_type": "grpo"},
    "rloo": {},
}


def compare(name: str, way: str) -> dict[str, Any]:
    kind = name.partition(",")[0]
    settings = CASES[name] | WAYS[way]
    if way == "fsdp2":
        fsdp2_on_cpu()
    plain, _, batches = evaluated(kind, False, **settings)
    equal, silent, _ = evaluated(kind, True, **settings)
    found: dict[str, Any] = {"batches": batches, "equal": equal == plain and not silent, "lost": {}}
    for on in range(1 if way == "alone" else 2):
        for at in ({1: 5}, {2: 60, 3: 20}):
            ours, lines, attempts = evaluated(kind, True, (on, at), **settings)
            found["lost"][(on, *at)] = far(ours, plain), lines, attempts
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_evaluation(name: str, way: str) -> None:
    for seen in on_ranks(compare, 1 if way == "alone" else 2, name, way):
        assert seen["equal"], seen
        for distances, _, attempts in seen["lost"].values():
            assert max(distances.values()) <= CLOSE, seen
            assert attempts > seen["batches"]
