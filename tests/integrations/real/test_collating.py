"""Rows are collated once, by the processes that load data, whatever the size of micro-batches."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    Padding,
    distance,
    lose_memory,
    make,
    on_ranks,
    padding_of_transformers,
    result,
    tokens,
    trained,
)
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
COLLATED = torch.zeros(2, dtype=torch.int64).share_memory_()
"""Rows that the training process has collated, and others."""


class Counting(Padding):
    def __call__(self, rows: list[Any]) -> Any:
        COLLATED[int(get_worker_info() is not None)] += len(rows)
        return super().__call__(rows)


class Reading(TrainerCallback):  # type: ignore[misc]
    """Rows that the training process had collated at the end of each step; sets a size after the first."""

    def __init__(self, size: int = 0) -> None:
        self.size, self.collated, self.trainer = size, [], None  # type: ignore[var-annotated]

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.collated.append(int(COLLATED[0]))
        steps = getattr(self.trainer, "_adaptive_step", None)
        if steps is not None and self.size:
            steps._size = (
                self.size
            )  # as a search on an accelerator finds it, where memory is not simulated


SETTINGS = {
    "ragged": True,
    "data_collator": Counting,
    "dataloader_num_workers": 2,
    "max_steps": 14,
    "gradient_accumulation_steps": 4,
}


def collated(size: int, settings: dict[str, Any], lost: Loss | None = None) -> dict[str, Any]:
    """Ours beside the plain trainer: rows that the training process has collated in each step."""
    settings = SETTINGS | settings
    plain = trained("trainer", None, **settings)
    COLLATED.zero_()
    reading = Reading(size)
    with tempfile.TemporaryDirectory() as folder:
        options = Adaptive(search=False) if size <= 4 else Adaptive()
        trainer = make("trainer", options, folder, callbacks=[reading], **settings)
        reading.trainer = trainer
        left = lose_memory(trainer, lost) if lost else lambda: 0
        trainer.train()
        assert not left()
        ours = result(trainer)
    steps = [b - a for a, b in zip([0, *reading.collated], reading.collated, strict=False)]
    apart = distance(ours, plain)
    same = ours.without_times() == plain.without_times()
    return {
        "rows": steps,
        "apart": apart,
        "same": same,
        "sizes": ours.sizes,
        "all": int(COLLATED[1]),
    }


SAMPLING: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "persistent": {"dataloader_persistent_workers": True},
    "drop last": {"dataloader_drop_last": True, "data": tokens(62, ragged=True)},
    "odd end": {"data": tokens(62, ragged=True)},
}


@pytest.mark.parametrize("size", [4, 2, 8, 16])
@pytest.mark.parametrize("name", ["shuffled", "by length", "persistent", "drop last"])
def test_the_training_process_collates_nothing(name: str, size: int) -> None:
    [seen] = on_ranks(collated, 1, size, SAMPLING[name])
    assert seen["apart"] <= CLOSE and seen["same"] == (size == 4), seen
    began = 1 if size == 4 else 8  # until what was loaded ahead has been taken
    assert seen["rows"][began:] == [0] * (14 - began), seen
    assert sum(seen["rows"]) <= 16 * 9


def test_an_odd_end_of_an_epoch_is_that_of_the_plain_trainer() -> None:
    for size in (4, 8):
        [seen] = on_ranks(collated, 1, size, SAMPLING["odd end"])
        assert seen["apart"] <= CLOSE, seen


def test_without_processes_that_load_rows_are_collated_once_as_well() -> None:
    [seen] = on_ranks(collated, 1, 8, {"dataloader_num_workers": 0})
    # accelerate loads a batch ahead, so that one may be of the next step.
    assert seen["apart"] <= CLOSE and abs(sum(seen["rows"][4:]) - 10 * 16) <= 8, seen


def test_a_lost_step_is_collated_again_and_the_next_are_not() -> None:
    [seen] = on_ranks(collated, 1, 4, {}, Loss(step=2, times=2))
    assert seen["apart"] <= CLOSE and seen["sizes"] == (4, 2), seen
    assert seen["rows"][1] == 0 < seen["rows"][2], seen
    assert seen["rows"][8:] == [0] * 6, seen


def in_front(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Padding in front: the trainer counts a label less of the longest row of a batch only."""
    made = Counting()(rows)
    return {name: value.flip(1) for name, value in made.items()}


def padded_in_front() -> Any:
    return in_front


def of_all_labels(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """A loss that does not follow the padding, other than what the trainer counts."""
    logits = outputs.logits.flatten(0, 1)
    summed = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return summed / num_items_in_batch


def test_where_items_follow_the_padding_they_are_those_of_the_loader() -> None:
    """So the training process makes micro-batches of its own."""
    settings = {"data_collator": padded_in_front, "compute_loss_func": of_all_labels}
    [seen] = on_ranks(collated, 1, 8, settings)
    assert seen["rows"][1:] == [32] + [16] * 12, seen


def resumed(size: int, workers: int) -> float:
    """The distance of a run that is resumed in the middle of an epoch from one that goes through."""
    settings = SETTINGS | {"dataloader_num_workers": workers, "data": tokens(128, ragged=True)}
    settings |= {"max_steps": 7, "save_strategy": "steps", "save_steps": 3}
    options = Adaptive(memory_limit="64MiB", ceiling=size)
    with tempfile.TemporaryDirectory() as folder:
        whole = trained("trainer", options, folder=folder, **settings)
        again = trained(
            "trainer", options, folder=folder, resume=f"{folder}/checkpoint-3", **settings
        )
    assert again.sizes == whole.sizes == (size, size)
    return max(distance(again, whole), float((again.weights - whole.weights).abs().max()))


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_is_resumed_in_the_middle_of_an_epoch(size: int) -> None:
    [apart] = on_ranks(resumed, 1, size, 2)
    assert apart <= CLOSE


def searched_on_ranks() -> tuple[float, float, Any]:
    settings = SETTINGS | {"max_steps": 6, "data_collator": padding_of_transformers}
    plain = trained("trainer", None, **settings)
    searched = trained("trainer", SEARCHING, **settings)
    lost = trained("trainer", AS_CONFIGURED, Loss(3, 1), **settings)
    return distance(searched, plain), distance(lost, plain), searched.sizes


def test_on_ranks() -> None:
    for searched, lost, (size, _) in on_ranks(searched_on_ranks, 2):
        assert max(searched, lost) <= CLOSE and size > 4
