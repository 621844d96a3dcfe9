"""Validation between steps: right on any number of rows, leaves no trace, survives out of memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.data import padded_collate_sft

from tests.helpers.decoder import adamw, batch, local_values, same_bits
from tests.helpers.faults import FailingMemory, fail_at_each
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive.common.errors import OutOfMemoryElsewhere, TrainingOutOfMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import Watchdog
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.validation import Validation

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LENGTHS = (3, 9, 5, 2, 7)


class Run:
    """A model that is trained and validated on one rank."""

    def __init__(
        self,
        folder: Path | None = None,
        rows: int = 5,
        memory: FailingMemory | None = None,
        survive: bool = True,
        **kind_of_model: Any,
    ) -> None:
        self.ranks = Ranks(timeout=200)
        self.memory = memory or FailingMemory()
        self.model = tiny_llama(**kind_of_model)
        self.optimizer = adamw(self.model)
        self.step = train_step(
            self.model,
            [self.optimizer],
            memory=self.memory,
            ranks=self.ranks,
            clip_grad_norm=1.0,
            survive=survive,
        )
        self.losses: list[float] = []
        dataset = [
            {"tokens": list(range(length)), "labels": list(range(length))}
            for length in (LENGTHS * rows)[:rows]
        ]
        self.validation = Validation(
            step=self.step,
            data=Data(dataset, None, padded_collate_sft),
            every_n_steps=1,
            size=2,
            grow_back_after=None,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            num_workers=0,
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

    def validate(self, number: int) -> None:
        assert not self.validation.run(number)


def train_and_validate(validates: bool, settings: dict[str, Any]) -> list[bytes]:
    run = Run(**settings)
    for number in range(1, 5):
        assert not run.train(number)
        if validates and number > 1:
            run.validate(number)
        if (
            number == 3
        ):  # by now the sequence is known, and must not have been changed by validation
            assert run.train(number, operation=60 if run.ranks.rank == 0 else None)
    assert all(module.training for module in run.model.modules())
    return [value.numpy().tobytes() for value in (*local_values(run.model), torch.get_rng_state())]


def validation_changes_nothing(settings: dict[str, Any]) -> bool:
    return train_and_validate(True, settings) == train_and_validate(False, settings)


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {"layers": 2, "dropout": 0.3}),
    "lora": (2, {"layers": 2, "dropout": 0.3, "lora": True}),
    "not resharded": (2, {"layers": 2, "reshard": False}),
    "checkpointed": (2, {"layers": 2, "checkpointing": True, "dropout": 0.3}),
    "output sharded apart": (2, {"output_apart": True}),
    "one rank": (1, {"layers": 2, "dropout": 0.3}),
    "one rank, not sharded": (1, {"sharded": False, "dropout": 0.3}),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("ranks", "settings"), KINDS.values(), ids=KINDS)
def test_training_is_the_same_with_validation_and_without(
    ranks: int, settings: dict[str, Any]
) -> None:
    """Also after a step in which memory ran out: the ranks agree on what follows."""
    assert run_ranks(validation_changes_nothing, ranks, settings) == [True] * ranks


NUMBERS_OF_ROWS = (1, 2, 5)


def losses_of_sizes() -> list[list[float]]:
    """For each number of rows, the losses in micro-batches of several sizes."""
    losses = []
    for rows in NUMBERS_OF_ROWS:
        run = Run(rows=rows, layers=2, dropout=0.3)
        for number, size in enumerate((2, 1, 3, 8), start=1):
            run.validation.phase.begin(size)
            run.validate(number)
        losses.append(run.losses)
    return losses


def test_every_row_counts_once_on_any_number_of_ranks() -> None:
    [alone] = run_ranks(losses_of_sizes, 1)
    for ranks in (1, 2, 3):
        for found in run_ranks(losses_of_sizes, ranks) if ranks > 1 else [alone]:
            for losses, (expected, *_) in zip(found, alone, strict=True):
                assert losses == pytest.approx([expected] * 4, rel=1e-6)


def fail_in_validation(sample: Sample, recording: bool, settings: dict[str, Any]) -> int:
    """Run out of memory in validation on one rank after the other, and train after each; how often."""
    run = Run(layers=2, **settings)
    reference = Run(layers=2, **settings)
    gc.freeze()
    with run.memory.fail_at(0) as fault:
        run.validate(1)
    operations = max(run.ranks.gather(fault.seen))  # ranks that have no row left take fewer
    reference.validate(1)
    (expected,) = run.losses
    failures = fail_at_each(sample.of(operations), run.memory, run.ranks)
    failed = 0
    for number, (_, _, failure) in enumerate(failures, start=2):
        if recording:
            run = Run(layers=2, memory=run.memory, **settings)
            reference = Run(layers=2, **settings)
        elif number == 2:
            run.validate(number)
        run.validation.phase.begin(2)
        with failure:
            run.validate(number)
        failed += run.validation.phase.size == 1
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
    settings: dict[str, Any], recording: bool, sample: Sample
) -> None:
    sample = sample.every(exhaustive=3, quick=41)
    for failed in run_ranks(fail_in_validation, 2, sample, recording, settings):
        assert failed >= 70 // sample.stride


def give_up(folder: Path) -> tuple[int, list[float], bool]:
    """Validation that does not fit, not even with one row; then one that does."""
    run = Run(folder, layers=2)
    run.validation.phase.begin(1)
    run.validate(1)
    run.validate(2)
    with run.memory.fail_at(5):
        run.validate(3)
    lost = run.train(1)
    run.validate(4)
    return run.validation.done, run.losses, lost


def test_validation_that_cannot_fit_is_left_out(tmp_path: Path) -> None:
    for done, losses, lost in run_ranks(give_up, 2, tmp_path):
        assert done == 4 and len(losses) == 3 and not lost
    (events,) = tmp_path.glob("*.jsonl")
    assert (
        "validation is left out: out of memory in validation on ranks 0 and 1" in events.read_text()
    )


def test_where_running_out_of_memory_is_raised_one_line_says_what_to_set() -> None:
    run = Run(survive=False, sharded=False)
    with run.memory.fail_at(5), pytest.raises(OutOfMemoryElsewhere) as raised:
        run.validate(3)
    said = "on rank 0 in the validation after step 3, in micro-batches of 2 rows. Set a smaller batch_s"
    assert said in str(raised.value)

    def fail_alone(*_: Any) -> Any:
        raise TrainingOutOfMemory("in the buffers that others wait for", everywhere=False)

    run.validation.phase.run = fail_alone  # type: ignore[method-assign]
    with pytest.raises(TrainingOutOfMemory):
        run.validate(4)
