"""Each argument of loaders that has an effect: the same as the plain trainer, or refused by its name."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers.tiny_trainer import Net, Rows, arguments, losses, searched
from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    LOGGED,
    SEARCHING,
    Padding,
    distance,
    make,
    on_ranks,
    tokens,
    trained,
)
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.transformers import adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]

ODD = {"data": tokens(62, ragged=True), "max_steps": 9}
WORKERS = {"dataloader_num_workers": 2}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}


def with_lengths() -> Any:
    data = tokens(64, ragged=True)
    return data.add_column("size", [len(row) for row in data["input_ids"]])


CASES: dict[str, list[tuple[int, dict[str, Any], str]]] = {
    "split_batches": [(1, {"split_batches": True}, ""), (2, {"split_batches": True}, "")],
    "dispatch_batches": [
        (1, {"dispatch_batches": True}, ""),
        (1, {"dispatch_batches": False}, ""),
        (2, {"dispatch_batches": True}, "accelerator_config: with dispatch_batches"),
    ],
    "even_batches": [
        (1, {"even_batches": False} | ODD, ""),
        (2, {"even_batches": False}, "accelerator_config: even_batches must be on"),
    ],
    "use_seedable_sampler": [(n, {"use_seedable_sampler": False}, "") for n in (1, 2)],
    "non_blocking": [(1, {"non_blocking": True}, "")],
    "gradient_accumulation_kwargs": [
        (
            1,
            {"gradient_accumulation_kwargs": {"num_steps": 2}, "gradient_accumulation_steps": 1},
            "",
        ),
        (2, {"gradient_accumulation_kwargs": {"sync_each_batch": True}}, ""),
    ],
    "use_configured_state": [(1, {"use_configured_state": True}, "")],
    "dataloader_drop_last": [(n, {"dataloader_drop_last": True} | ODD, "") for n in (1, 2)],
    "dataloader_num_workers": [(1, WORKERS, "")],
    "dataloader_pin_memory": [(1, {"dataloader_pin_memory": True}, "")],
    "dataloader_persistent_workers": [(1, {"dataloader_persistent_workers": True} | WORKERS, "")],
    "dataloader_prefetch_factor": [(1, {"dataloader_prefetch_factor": 1} | WORKERS, "")],
    "dataloader_multiprocessing_context": [
        (1, {"dataloader_multiprocessing_context": "fork"} | WORKERS, "")
    ],
    "dataloader_in_order": [(1, {"dataloader_in_order": False, "dataloader_num_workers": 1}, "")],
    "train_sampling_strategy": [
        (1, BY_LENGTH, ""),
        (2, BY_LENGTH, ""),
        (1, {"train_sampling_strategy": "sequential"}, ""),
        (1, {"train_sampling_strategy": "batch_rebalance"}, ""),
        (2, {"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy: with batch_"),
    ],
    "length_column_name": [
        (1, BY_LENGTH | {"length_column_name": "size", "data": with_lengths()}, "")
    ],
    "data_seed": [(1, {"data_seed": 7}, "")],
}
"""On so many processes, with these settings, the beginning of the line that refuses them; or none, where
losses are those of the plain trainer."""
ROUNDED = {"train_sampling_strategy 3", "gradient_accumulation_kwargs 1"}
"""Where batches have any number of rows, so that they are not the micro-batches, or the plain trainer reduces
gradients more often."""


def test_each_argument_of_the_installed_version_is_tested() -> None:
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    of_loaders = {name for name in names if name.startswith("dataloader_") or "sampl" in name}
    of_loaders |= {name for name in names if "length" in name or name.startswith("data_")}
    of_accelerate = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    of_loaders -= {"include_num_input_tokens_seen"}
    assert of_loaders | of_accelerate == {*CASES}, "decide what becomes of these"
    assert all(CASES.values())


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of the trainer, of which those of accelerate are in a mapping."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    fields = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    of_accelerate = {name: value for name, value in given.items() if name in fields}
    others = {name: value for name, value in given.items() if name not in fields}
    # accelerate writes into what it is given
    of_accelerate = {
        name: dict(each) if isinstance(each, dict) else each for name, each in of_accelerate.items()
    }
    return others | ({"accelerator_config": of_accelerate} if of_accelerate else {})


def outcome(given: dict[str, Any]) -> str | tuple[float, float]:
    """Why settings are refused when the trainer is made; or how far what is logged is from the plain trainer,
    0 only if all is equal to the bit, and where a size is searched for."""
    from accelerate import Accelerator

    def run(options: Adaptive | None) -> Any:
        if "use_configured_state" in given:
            Accelerator(cpu=True)
        return trained("trainer", options, **{"ragged": True} | settings_of(given))

    try:
        with tempfile.TemporaryDirectory() as folder:
            if "use_configured_state" in given:
                Accelerator(cpu=True)
            make("trainer", AS_CONFIGURED, folder, **settings_of(given))
    except UsageError as refused:
        return str(refused)
    plain, ours, found = run(None), run(AS_CONFIGURED), run(SEARCHING)
    assert found.sizes[0] > ours.sizes[0], "or the search finds nothing else"
    same = ours.without_times() == plain.without_times()
    return 0.0 if same else max(distance(ours, plain), 1e-9), distance(found, plain)


def outcomes(count: int) -> dict[str, Any]:
    return {
        f"{name} {number}": outcome(given)
        for name, cases in CASES.items()
        for number, (processes, given, _) in enumerate(cases)
        if processes == count
    }


@pytest.mark.parametrize("count", [1, 2])
def test_each_is_as_in_the_plain_trainer_or_refused(count: int) -> None:
    expected = {
        f"{name} {number}": said
        for name, cases in CASES.items()
        for number, (processes, _, said) in enumerate(cases)
        if processes == count
    }
    for seen in on_ranks(outcomes, count, count, timeout=600):
        assert seen.keys() == expected.keys()
        for name, said in expected.items():
            if said:
                assert isinstance(seen[name], str) and seen[name].startswith(said), (name, seen)
                continue
            assert not isinstance(seen[name], str), (name, seen[name])
            near, far = seen[name]
            assert near <= (1e-6 if name in ROUNDED else 0.0) and far <= 1e-5, (name, seen[name])


class Slow(Dataset[Any]):
    """Rows of which every seventh takes longer to load."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, number: int) -> dict[str, Any]:
        torch.rand(200_000 if number % 7 == 0 else 1).sort()
        return {"input_ids": [3 + number % 50] * 4, "labels": [number] * 4, "number": number}


class Numbered(Padding):
    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        labels = [[3 + number % 50 for number in row["labels"]] for row in rows]
        ids = [row["input_ids"] for row in rows]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def in_any_order() -> list[list[int]]:
    """The rows of each step with batches in the order in which processes have loaded them."""
    steps: list[list[int]] = []
    settings: dict[str, Any] = {"data": Slow(), "data_collator": Numbered}
    settings |= {"max_steps": 8, "gradient_accumulation_steps": 4, "remove_unused_columns": False}
    settings |= {"dataloader_in_order": False} | WORKERS
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("trainer", SEARCHING, folder, **settings)
        take = trainer.get_batch_samples

        def seen(*given: Any) -> Any:
            made = take(*given)
            steps.append([row["number"] for one in trainer._adaptive_rows for row in one.rows])
            return made

        trainer.get_batch_samples = seen
        trainer.train()
    return steps


def test_batches_in_any_order_are_whole_ones() -> None:
    [steps] = on_ranks(in_any_order, 1)
    assert [len(step) for step in steps] == [16] * 8
    assert sorted(number for step in steps for number in step) == [*range(128)]


def split(folder: str, resume: str | None) -> Any:
    settings = {"accelerator_config": {"split_batches": True}, "ragged": True}
    settings |= {"save_strategy": "steps", "save_steps": 2, "folder": folder}
    found = trained("trainer", AS_CONFIGURED, resume=resume, **settings)
    return found.sizes, found.column(*LOGGED), found.weights.tolist()


def test_split_batches_are_as_large_on_fewer_processes(tmp_path: Path) -> None:
    """The rows of a step do not follow the number of processes."""
    (sizes, *whole), _ = on_ranks(split, 2, str(tmp_path / "whole"), None)
    assert sizes == (2, 2), "two processes share a batch of four"
    resume = str(tmp_path / "whole/checkpoint-2")
    [(_, *fewer)] = on_ranks(split, 1, str(tmp_path / "fewer"), resume)
    for one, other in zip(fewer, whole, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)


def trials_on_ranks() -> tuple[Any, Any]:
    """The losses of trials of the plain trainer, and ours, of a model that has a buffer."""
    trials = ({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 2})
    from transformers import Trainer

    found = []
    for kind in (Trainer, adaptive(Trainer, AS_CONFIGURED)):
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(Path(folder), max_steps=2)
            trainer = kind(args=args, train_dataset=Rows(), model_init=Net)
            found.append(searched(trainer, *trials))
            assert losses(trainer)
    return found[0], found[1]


def test_trials_with_several_processes() -> None:
    for plain, ours in on_ranks(trials_on_ranks, 2):
        assert len(plain) == 2
        for one, other in zip(plain, ours, strict=True):
            assert other == pytest.approx(one, rel=1e-6)
