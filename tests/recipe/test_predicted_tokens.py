"""A token counts if it is predicted: no split of the rows matters, and a run without any stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torchtune.data import padded_collate_sft

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, tiny_config
from tests.helpers.runs import run_with, train
from torchtune_adaptive.common.errors import NothingToLearn

pytestmark = pytest.mark.runs

TEXT = {
    # Every token is trained on, the first included, and rows are short.
    "dataset._component_": "torchtune.datasets.text_completion_dataset",
    "dataset.column": "output",
    "clip_grad_norm": 1e9,
}
WHOLE = {"batch_size": 8, "gradient_accumulation_steps": 1}
SPLIT = {"batch_size": 1, "gradient_accumulation_steps": 8}


@pytest.mark.exhaustive
def test_text_completion_trains_the_same_in_any_split(tmp_path: Path) -> None:
    whole, *others = (
        train("full", tmp_path, ranks, **TEXT, **how)
        for ranks, how in (
            (2, WHOLE),
            (2, SPLIT),
            (1, {"batch_size": 16}),
            (2, {**WHOLE, "adaptive_batching.token_budget": 60}),
        )
    )
    assert len(whole) == 3
    for other in others:
        for key in ("loss", "grad_norm"):
            assert [step[key] for step in other] == pytest.approx(
                [step[key] for step in whole], rel=1e-5
            )


@pytest.mark.exhaustive
def test_in_torchtune_it_depends_on_the_split(tmp_path: Path) -> None:
    [whole, *_], [split, *_] = (
        run_with(run_torchtunes, "full", tiny_config("full", tmp_path, **TEXT, **how), 2)
        for how in (WHOLE, SPLIT)
    )
    assert abs(split["grad_norm"] / whole["grad_norm"] - 1) > 1e-4


def collate_masked(rows: list[Any], padding_idx: int, ignore_idx: int) -> dict[str, torch.Tensor]:
    """As if every message of every sample were a prompt."""
    batch = padded_collate_sft(rows, padding_idx=padding_idx, ignore_idx=ignore_idx)
    batch["labels"].fill_(ignore_idx)
    return batch


def why_it_stops(cfg: DictConfig) -> str:
    with pytest.raises(NothingToLearn) as raised:
        run_ours("full", cfg)
    torch.distributed.destroy_process_group()
    return str(raised.value)


@pytest.mark.rotating
@pytest.mark.parametrize("searches", [False, True], ids=["training", "searching"])
def test_all_ranks_stop_with_the_same_reason(searches: bool, tmp_path: Path) -> None:
    changes = {
        "collate_fn": f"{__name__}.collate_masked",
        "use_maximum_batch_size": searches,
    }
    cfg = tiny_config("full", tmp_path, **changes)
    first, second = run_ranks(why_it_stops, 2, cfg, join=False)
    assert first == second
    assert first.startswith("dataset: looked at 640 of 640 samples")
    assert not list(tmp_path.glob("epoch_*"))
