"""A run in which no label is trained on stops on all ranks, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torchtune.data import padded_collate_sft

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from torchtune_adaptive.errors import NothingToLearn


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


@pytest.mark.parametrize("searches", [False, True], ids=["training", "searching"])
def test_all_ranks_stop_with_the_same_reason(searches: bool, tmp_path: Path) -> None:
    changes = {
        "collate_fn": f"{__name__}.collate_masked",
        "use_maximum_batch_size": searches,
    }
    cfg = tiny_config("full", tmp_path, **changes)
    first, second = run_ranks(why_it_stops, 2, cfg, join=False)
    assert first == second
    assert first.startswith("dataset: 640 of its 640 samples were looked at")
    assert not list(tmp_path.glob("epoch_*"))
