"""Evaluations in which memory runs out: what they log and predict is that of the plain trainer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.helpers.faults import OutOfMemoryAt
from tests.integrations.real.models import Collating, model_of, rows_for
from tests.integrations.real.trainers import (
    AS_ACCELERATE,
    AS_CONFIGURED,
    NAMES,
    SEARCHING,
    Loss,
    fsdp2_on_cpu,
    make,
    on_ranks,
    rank,
    texts,
    tokens,
    trained,
)
from tests.integrations.real.ways import FSDP2
from torchtune_adaptive import TrainingOutOfMemory

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
        trainer = make(kind, AS_ACCELERATE if ours else None, folder, **settings)
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
    undisturbed, lines, _ = evaluated(kind, True, **settings)
    assert not lines
    found: dict[str, Any] = {"batches": batches, "undisturbed": far(undisturbed, plain), "lost": {}}
    for on in range(1 if way == "alone" else 2):
        for at in ({1: 5}, {2: 60, 3: 20}):
            ours, lines, attempts = evaluated(kind, True, (on, at), **settings)
            found["lost"][(on, *at)] = far(ours, plain), lines, attempts
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_evaluation(name: str, way: str) -> None:
    # Losses of completions cancel almost to 0, and their metrics are averaged by rows.
    close = 1e-5 if name.startswith(("grpo", "rloo")) else CLOSE
    for seen in on_ranks(compare, 1 if way == "alone" else 2, name, way):
        assert max(seen["undisturbed"].values()) == 0, seen
        for distances, _, attempts in seen["lost"].values():
            assert max(distances.values()) <= close, seen
            assert attempts > seen["batches"]


def predicted(name: str, ours: bool, at: Mapping[int, int]) -> dict[str, Any]:
    """What a trainer evaluates and predicts that has not trained."""
    settings = {
        "model": model_of(name),
        "data": rows_for(name, 12),
        "data_collator": Collating,
        "per_device_eval_batch_size": 6,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("trainer", AS_CONFIGURED if ours else None, folder, **settings)
        lose_memory(trainer, at)
        made = trainer.predict(rows_for(name, 12))
        loss = trainer.evaluate(rows_for(name, 12))["eval_loss"]
    return {
        "predictions": torch.as_tensor(made.predictions),
        "labels": torch.as_tensor(made.label_ids),
        "losses": [made.metrics["test_loss"], loss],
    }


def without_training(name: str) -> dict[str, Any]:
    plain, ours = predicted(name, False, {}), predicted(name, True, {1: 10, 2: 10})
    counted = torch.ones_like(plain["labels"], dtype=torch.bool)
    if counted.dim() > 1:  # what is predicted behind a row follows how far it is padded
        counted = Collating()(rows_for(name, 12))["attention_mask"].bool()
    apart = (ours["predictions"] - plain["predictions"])[counted]
    return {
        "losses": (ours["losses"], plain["losses"]),
        "same labels": torch.equal(ours["labels"], plain["labels"]),
        "apart": float(apart.abs().max()),
    }


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "BertForMaskedLM", "LlamaForSequenceClassification"]
)
def test_predictions_without_training(name: str) -> None:
    [seen] = on_ranks(without_training, 1, name)
    ours, plain = seen["losses"]
    assert ours == pytest.approx(plain, rel=CLOSE), seen
    assert seen["same labels"] and seen["apart"] <= 1e-5, seen


AVERAGED = {
    "sft": ("loss", "entropy", "mean_token_accuracy", "num_tokens"),
    "dpo": ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen"),
    "reward": ("min_reward", "mean_reward", "max_reward", "accuracy"),
    "kto": ("entropy", "logits/chosen", "logps/chosen", "logps/rejected"),
}


def averaged(kind: str) -> dict[str, Any]:
    plain, lost = (trained(kind, *each) for each in ((None,), (AS_CONFIGURED, Loss(2))))
    searched = trained(kind, SEARCHING)
    columns = [each.column(*AVERAGED[kind]) for each in (plain, lost, searched)]
    return {"columns": columns, "sizes": (lost.sizes, searched.sizes)}


@pytest.mark.parametrize("kind", AVERAGED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_averages_do_not_show_that_memory_was_lost(kind: str, ranks: int) -> None:
    for seen in on_ranks(averaged, ranks, kind):
        plain, lost, searched = map(torch.tensor, seen["columns"])
        assert seen["sizes"][0][1] < 4 < seen["sizes"][1][0], seen
        # On several ranks, a part counts by the tokens that it has on one of them.
        close = 1e-5 if ranks == 1 or kind == "reward" else 0.3
        assert torch.allclose(lost, plain, rtol=close, atol=close), (lost - plain).abs().max()
        # One value for rows of several batches is that of all, where the plain trainer averages over batches.
        assert torch.allclose(searched, plain, rtol=0.3, atol=0.3), (searched - plain).abs().max()


def in_the_optimizer() -> str:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("trainer", AS_CONFIGURED, folder, save_strategy="steps", save_steps=1)
        step = torch.optim.AdamW.step

        def lose(self: Any, *given: Any, **named: Any) -> Any:
            if trainer.state.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return step(self, *given, **named)

        torch.optim.AdamW.step = lose  # type: ignore[method-assign]
        try:
            with pytest.raises(TrainingOutOfMemory) as error:
                trainer.train()
        finally:
            torch.optim.AdamW.step = step  # type: ignore[method-assign]
    return str(error.value)


def test_memory_lost_in_the_optimizer_ends_with_what_to_do() -> None:
    [message] = on_ranks(in_the_optimizer, 1)
    assert "Out of memory in the optimizer's step, after step 2" in message
    assert "checkpoint-2" in message and "headroom" in message and "\n" not in message
