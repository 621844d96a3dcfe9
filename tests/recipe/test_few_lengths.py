"""Lengths that are rounded with tensor parallelism: few of them, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig

from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import Records, losses, run_with
from torchtune_adaptive.recipe.data.few_lengths import FewLengths
from torchtune_adaptive.recipe.data.rows import TokenRows, collate_few
from torchtune_adaptive.recipe.data.split_rows import RowParts
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.settings.asked import Asked

SPLIT = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.foreach": False,
    "shuffle": False,
    "use_maximum_batch_size": True,
}


def test_lengths_are_few_and_little_is_added() -> None:
    lengths = range(2048, 131_073)
    padded = [FewLengths().padded(length) for length in lengths]
    assert len({*padded}) <= 6 * 32 + 1
    assert all(
        0 <= more - length <= length / 32 for more, length in zip(padded, lengths, strict=True)
    )
    assert padded == sorted(padded)
    assert all(FewLengths().padded(length) == length for length in {*padded})
    assert [FewLengths().padded(length) for length in (0, 1, 8, 9, 100)] == [0, 8, 8, 16, 104]


def test_no_length_is_more_than_what_is_allowed() -> None:
    allowed = FewLengths(longest=2050)
    assert [allowed.padded(length) for length in (2047, 2049, 2050, 3000)] == [
        2048,
        2050,
        2050,
        3000,
    ]


def a_config(**changes: Any) -> Asked:
    return Asked.of(tiny_config("full", "unused", **changes))


def test_only_tensor_parallelism_in_a_run_that_adapts_rounds_lengths() -> None:
    assert FewLengths.of(a_config(**SPLIT)) is not None
    for changes in (
        {"tensor_parallel_dim": 1},
        {"use_maximum_batch_size": False},
        {"dataset.packed": True, "tokenizer.max_seq_len": 64},
    ):
        assert FewLengths.of(a_config(**{**SPLIT, **changes})) is None
    limited = FewLengths.of(a_config(**SPLIT, **{"tokenizer.max_seq_len": 77}))
    assert limited is not None and limited.longest == 77


def test_with_parts_of_rows_both_multiples_are_kept() -> None:
    rows = TokenRows(parts=RowParts(2, (0, 3), 12), lengths=FewLengths())
    assert rows.padded(1000) == 1008
    assert rows.padded(1001) == 1008 and TokenRows().padded(1001) == 1001


def batch_of(*keys: str) -> dict[str, torch.Tensor]:
    return {key: torch.ones(2, 9, dtype=torch.int64) for key in keys}


def test_padding_is_not_trained_on() -> None:
    batch = collate_few(lambda _: batch_of("tokens", "labels"), FewLengths(), 7, -100, [])
    assert batch["tokens"][0].tolist() == [1] * 9 + [7] * 7
    assert batch["labels"][1].tolist() == [1] * 9 + [-100] * 7


def test_a_batch_with_more_than_that_is_left_as_it_is() -> None:
    batch = collate_few(lambda _: batch_of("tokens", "labels", "mask"), FewLengths(), 7, -100, [])
    assert {value.shape for value in batch.values()} == {(2, 9)}


def rounding(kind: str, cfg: DictConfig) -> Records:
    """A run whose lengths are rounded, whatever it adapts. Its last record is how many there are."""
    seen = set()
    padded = FewLengths.padded

    def noted(lengths: FewLengths, length: int) -> int:
        seen.add((length, padded(lengths, length)))
        return padded(lengths, length)

    rounded = mock.patch.object(FewLengths, "of", return_value=FewLengths())
    with rounded, mock.patch.object(FewLengths, "padded", noted):
        records = run_ours(kind, cfg)
    return [*records, {"given": len({n for n, _ in seen}), "made": len({n for _, n in seen})}]


@pytest.mark.runs
def test_losses_are_those_of_rows_that_are_not_rounded(tmp_path: Path) -> None:
    changes = {**SPLIT, "use_maximum_batch_size": False, "max_steps_per_epoch": 6, "batch_size": 2}
    configs = [tiny_config("full", tmp_path / name, **changes) for name in ("few", "many")]
    *few, lengths = run_with(rounding, "full", configs[0], 2)
    many = run_with(run_ours, "full", configs[1], 2)
    assert len(few) == len(many) == 6
    assert losses(few) == pytest.approx(losses(many), rel=1e-6)
    assert lengths["made"] < lengths["given"]


def test_a_plan_is_for_rows_of_the_length_that_is_trained() -> None:
    cfg = tiny_config("full", "unused", **{**SPLIT, "device": "cuda"})
    asked = plan_request(cfg, 4, gpu_name="h100", length=101)
    assert asked.length == 104 and "rounded up" in asked.length_source
    cfg.tensor_parallel_dim = 1
    assert plan_request(cfg, 4, gpu_name="h100", length=101).length == 101
