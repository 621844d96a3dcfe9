"""torchtitan's trainer, resumed on another number of ranks: the steps are those of an undisturbed run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.trainer import Trainer

from tests.helpers.ranks import run_ranks
from tests.integrations.real.titan import (
    AS_CONFIGURED,
    LENGTH,
    WORDS,
    Loss,
    Words,
    config,
    train,
)
from torchtune_adaptive import UsageError

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 2e-6
NORM_CLOSE = 1e-5
"""Ranks sum the squares of their parts in float32. A norm is 2.7e-6 too small on one rank, where a part is
the whole weight, and 0.5e-6 on four."""
ROWS, STEPS = 12, 8
SAVED = {
    "checkpoint__enable": True,
    "checkpoint__interval": 1,
    "checkpoint__last_save_model_only": False,
}
DATA_ANEW = {"checkpoint__exclude_from_loading": ["dataloader"]}


class Numbers(Words):
    """A tokenizer of texts that are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Words.Config):  # type: ignore[misc]
        pass

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*map(int, text.split())]


def texts(_: str) -> Dataset:
    """So few of them that a run begins anew with them, in another order."""
    draw = random.Random(0)
    lengths = [draw.randrange(20, 80) for _ in range(50)]
    words = ([str(draw.randrange(WORDS)) for _ in range(length)] for length in lengths)
    return Dataset.from_dict({"text": [*map(" ".join, words)]})


text_datasets.DATASETS["numbers"] = DatasetConfig("", texts, lambda row: row["text"])


def part(
    folder: str,
    ends: int = STEPS,
    plain: bool = False,
    loss: Loss | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A part of a run, which ends as if it were killed after a step; and this rank's rows of each step."""
    rows: dict[int, list[str]] = {}

    class Watched(Trainer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):  # type: ignore[misc]
            pass

        def should_continue_training(self) -> bool:
            return bool(self.step < ends)

        def batch_generator(self, loader: Any) -> Iterator[Any]:
            for inputs, labels in super().batch_generator(loader):
                rows.setdefault(self.step, []).extend(map(str, labels.tolist()))
                yield inputs, labels

    data = text_datasets.HuggingFaceTextDataLoader.Config(dataset="numbers")
    given = {"training__local_batch_size": 2, "training__global_batch_size": ROWS}
    given |= {"training__steps": STEPS, "tokenizer": Numbers.Config(), "dataloader": data}
    made = config(folder, **given | SAVED | (settings or {}))
    made = Watched.Config(**{each.name: getattr(made, each.name) for each in fields(made)})
    try:
        result = train(made, None if plain else AS_CONFIGURED, loss)
    except (AssertionError, UsageError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"logs": result.logs, "rows": rows, "weights": result.weights.tolist()}


def steps_of(parts: list[dict[str, Any]]) -> list[tuple[int, list[str]]]:
    """The rows of each step on all ranks, in order."""
    return [(step, [*chain(*(each["rows"][step] for each in parts))]) for step in parts[0]["rows"]]


def of_logs(logs: list[dict[str, float]], *names: str) -> torch.Tensor:
    return torch.tensor([[entry[name] for name in names] for entry in logs])


@pytest.mark.parametrize("walk", [(4, 3, 2, 4), (2, 4, 1, 2)], ids=str)
def test_a_run_goes_on_on_other_ranks(walk: tuple[int, ...], tmp_path: Path) -> None:
    began = walk[0]
    batch = {"training__local_batch_size": ROWS // began}
    undisturbed = run_ranks(part, began, str(tmp_path / "whole"), STEPS, True, None, batch)
    folder, logs, steps = str(tmp_path / "walk"), [], []
    for n, ranks in enumerate(walk, 1):
        ends, plain = (
            2 * n,
            n == len(walk),
        )  # at last, the plain trainer reads what ours has written
        loss = None if plain else Loss(ends, rank=ranks - 1, times=1)
        seen = run_ranks(part, ranks, folder, ends, plain, loss, batch)
        steps += steps_of(seen)
        logs += seen[0]["logs"]
    assert steps == steps_of(undisturbed)
    distinct = {row for _, rows in steps for row in rows}  # some come again with the next epoch
    assert len(distinct) > ROWS * (STEPS - 1)
    for far, names in (
        (CLOSE, ("step", "loss", "n_tokens_seen", "lr/AdamW")),
        (NORM_CLOSE, ("norm",)),
    ):
        expected = of_logs(undisturbed[0]["logs"], *names)
        torch.testing.assert_close(of_logs(logs, *names), expected, rtol=far, atol=0)
    weights = (torch.tensor(each[0]["weights"]) for each in (seen, undisturbed))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_the_rows_are_kept_where_only_those_of_a_rank_are_set(tmp_path: Path) -> None:
    of_rank = {"training__local_batch_size": 3, "training__global_batch_size": -1}
    folder = str(tmp_path / "run")
    run_ranks(part, 4, folder, 2, True, None, of_rank)  # by the plain trainer
    for ranks in (2, 6):
        shutil.copytree(folder, tmp_path / f"on {ranks}")
        seen = run_ranks(part, ranks, str(tmp_path / f"on {ranks}"), 3, False, None, of_rank)
        [(step, rows)] = steps_of(seen)
        assert step == 3 and len(rows) == ROWS
        assert {len(each["rows"][3]) for each in seen} == {ROWS // ranks}
        assert seen[0]["logs"][0]["n_tokens_seen"] == 3 * ROWS * LENGTH
    for ranks, settings, said in (
        (
            5,
            of_rank,
            "a step has 12 rows, which 5 data-parallel ranks cannot share equally. Ranks ",
        ),
        (
            5,
            {},
            "a step has 12 rows, which 5 data-parallel ranks cannot share equally. Ranks that ",
        ),
        (2, {"training__global_batch_size": 10}, "a step has 10 rows, and the run began on 4 data"),
    ):
        for each in run_ranks(part, ranks, folder, 3, False, None, settings):
            assert each["said"].startswith(f"UsageError: training.global_batch_size: {said}"), each
    # As the plain trainer does what is documented of it:
    for each in run_ranks(part, 2, folder, 3, True, None, {}):
        assert "dataloader resharding is not supported" in each["said"]


def test_data_that_are_left_out_begin_anew_with_as_many_rows(tmp_path: Path) -> None:
    of_rank = {"training__local_batch_size": 3, "training__global_batch_size": -1}
    folder = str(tmp_path / "run")
    run_ranks(part, 4, folder, 2, False, None, of_rank)
    for ends in (3, 4):  # the second one with what the first has saved
        anew = DATA_ANEW if ends == 3 else {}
        settings = of_rank | {"training__local_batch_size": 3 if ends == 3 else 6} | anew
        seen = run_ranks(part, 2, folder, ends, False, None, settings)
        assert seen[0]["logs"][0]["n_tokens_seen"] == ends * ROWS * LENGTH
        given = {"training__local_batch_size": 6}
        first = run_ranks(part, 2, str(tmp_path / f"new {ends}"), ends - 2, True, None, given)
        assert [rows for _, rows in steps_of(seen)] == [rows for _, rows in steps_of(first)][-1:]
