"""Validation between steps: right on any number of rows, leaves no trace, survives out of memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.data import padded_collate_sft

from tests.helpers.faults import FailingMemory
from tests.helpers.models import adamw, batch, local_values, same_bits, tiny_llama, train_step
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import Watchdog
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.validation import Validation

LENGTHS = (3, 9, 5, 2, 7)


class Run:
    """A model that is trained and validated on one rank."""

    def __init__(self, folder: Path | None = None, rows: int = 5, **kind_of_model: Any) -> None:
        self.ranks = Ranks(timeout=20)
        self.memory = FailingMemory()
        self.model = tiny_llama(**kind_of_model)
        self.optimizer = adamw(self.model)
        self.step = train_step(
            self.model, [self.optimizer], memory=self.memory, ranks=self.ranks, clip_grad_norm=1.0
        )
        self.losses: list[float] = []
        dataset = [
            {"tokens": list(range(length)), "labels": list(range(length))}
            for length in (LENGTHS * rows)[:rows]
        ]
        self.validation = Validation(
            step=self.step,
            data=Data(dataset, None, padded_collate_sft, False),
            every_n_steps=1,
            size=2,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            workers=0,
            watchdog=Watchdog(self.ranks, 20.0, on_duty=False),
            step_timeout=20.0,
            events=Events(folder if self.ranks.rank == 0 else None),
            record=lambda _, found: self.losses.append(found["val_loss"]),
        )

    def train(self, number: int, operation: int | None = None) -> bool:
        """A step; whether it was lost."""
        torch.manual_seed(number)
        with self.memory.fail_at(operation):
            for n in range(2):
                self.step.forward_backward(batch(rows=2, seed=10 * number + n + self.ranks.rank))
            return self.step.apply().lost

    def validate(self, number: int, operation: int | None = None) -> int:
        """How many operations it took, if they are counted."""
        with self.memory.fail_at(operation) as fault:
            assert not self.validation.run(number)
        return fault.seen


def train_and_validate(validates: bool, settings: dict[str, Any]) -> list[bytes]:
    run = Run(**settings)
    for number in range(1, 5):
        assert not run.train(number)
        if validates and number > 1:
            run.validate(number)
        if (
            number == 3
        ):  # by now the sequence is known, and must not have been changed by validation
            assert run.train(number, operation=100 if run.ranks.rank == 0 else None)
    assert all(module.training for module in run.model.modules())
    return [value.numpy().tobytes() for value in (*local_values(run.model), torch.get_rng_state())]


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {"layers": 2, "dropout": 0.3}),
    "lora": (2, {"layers": 2, "dropout": 0.3, "lora": True}),
    "not resharded": (2, {"layers": 2, "reshard": False}),
    "checkpointed": (2, {"layers": 2, "checkpointing": True, "dropout": 0.3}),
    "output sharded apart": (2, {"output_apart": True}),
    "one rank": (1, {"layers": 2, "dropout": 0.3}),
    "one rank, not sharded": (1, {"sharded": False, "dropout": 0.3}),
}


@pytest.mark.parametrize(("ranks", "settings"), KINDS.values(), ids=KINDS)
def test_training_is_the_same_with_validation_and_without(
    ranks: int, settings: dict[str, Any]
) -> None:
    """Also after a step in which memory ran out: the ranks agree on what follows."""
    without = run_ranks(train_and_validate, ranks, False, settings)
    assert run_ranks(train_and_validate, ranks, True, settings) == without


def losses_of_sizes(rows: int) -> list[float]:
    run = Run(rows=rows, layers=2, dropout=0.3)
    for number, size in enumerate((2, 1, 3, 8), start=1):
        run.validation.size = size
        run.validate(number)
    return run.losses


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_row_counts_once_on_any_number_of_ranks(rows: int) -> None:
    (expected, *_), *_ = run_ranks(losses_of_sizes, 1, rows)
    for ranks in (1, 2, 3):
        for losses in run_ranks(losses_of_sizes, ranks, rows):
            assert losses == pytest.approx([expected] * 4, rel=1e-6)


def fail_in_validation(stride: int, shard: int, recording: bool, settings: dict[str, Any]) -> int:
    """Run out of memory in validation on one rank after the other, and train after each; how often."""
    run = Run(layers=2, **settings)
    reference = Run(layers=2, **settings)
    gc.freeze()
    operations = max(run.ranks.gather(run.validate(1, 0)))  # ranks that have no row left take fewer
    reference.validate(1)
    (expected,) = run.losses
    failed = 0
    for number, operation in enumerate(range(1 + shard % stride, operations + 1, stride), start=2):
        if recording:
            run = Run(layers=2, **settings)
            reference = Run(layers=2, **settings)
        elif number == 2:
            run.validate(number)
        victim = number % run.ranks.size
        run.validation.size = 2
        run.validate(number, operation if run.ranks.rank == victim else None)
        failed += run.validation.size == 1
        assert run.losses[-1] == pytest.approx(expected, rel=1e-6) or number > 2
        before = run.losses[-1]
        run.validate(number)
        assert run.losses[-1] == pytest.approx(before, rel=1e-6)
        assert not run.train(number) and not reference.train(number)
        assert same_bits(local_values(run.model), local_values(reference.model))
    return failed


OF_MODELS = {"full": {}, "lora": {"lora": True}, "not resharded": {"reshard": False}}
IN_BRIEF = {("full", False), ("lora", True)}
FAILURES = [
    pytest.param(
        OF_MODELS[name],
        recording,
        id=f"{name}-{'recording' if recording else 'known'}",
        marks=() if (name, recording) in IN_BRIEF else pytest.mark.exhaustive,
    )
    for name in OF_MODELS
    for recording in (False, True)
]


@pytest.mark.parametrize(("settings", "recording"), FAILURES)
def test_one_rank_at_every_operation_of_validation(
    settings: dict[str, Any], recording: bool, exhaustive: bool, shard: int
) -> None:
    stride = 3 if exhaustive else 41
    for failed in run_ranks(fail_in_validation, 2, stride, shard, recording, settings, timeout=300):
        assert failed >= 150 // stride


def give_up(folder: Path) -> tuple[int, list[float], bool]:
    """Validation that does not fit, not even with one row; then one that does."""
    run = Run(folder, layers=2)
    run.validation.size = 1
    run.validate(1)
    run.validate(2)
    run.validate(3, operation=5)
    lost = run.train(1)
    run.validate(4)
    return run.validation.done, run.losses, lost


def test_validation_that_cannot_fit_is_left_out(tmp_path: Path) -> None:
    for done, losses, lost in run_ranks(give_up, 2, tmp_path):
        assert done == 4 and len(losses) == 3 and not lost
    (events,) = tmp_path.glob("*.jsonl")
    assert "validation is left out: out of memory on rank 0, evaluation" in events.read_text()
