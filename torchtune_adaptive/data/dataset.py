"""The dataset of a run, and how its rows become a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from omegaconf import DictConfig, ListConfig
from torchtune import config
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.registry import component
from torchtune_adaptive.settings.kinds import is_packed


@dataclass(frozen=True)
class Data:
    """What is trained on, and how rows become a batch."""

    dataset: Any
    tokenizer: Any
    collate: Callable[[list[Any]], dict[str, Any]]
    packed: bool


def load_data(cfg: DictConfig, tokenizer: Any, loss_fn: Any) -> Data:
    """The dataset, or several in one."""
    if isinstance(cfg.dataset, ListConfig):
        dataset = ConcatDataset([config.instantiate(one, tokenizer) for one in cfg.dataset])
    else:
        dataset = config.instantiate(cfg.dataset, tokenizer)
    packed = is_packed(cfg)
    if packed:
        collate = padded_collate_packed
    else:
        collate = partial(
            component(cfg.get("collate_fn", "torchtune.data.padded_collate_sft")),
            padding_idx=tokenizer.pad_id,
            ignore_idx=loss_fn.ignore_index,
        )
        chunks = getattr(loss_fn, "num_output_chunks", 1)
        if chunks > 1 and "output" in (cfg.get("custom_sharded_layers", None) or []):
            collate = partial(
                _collate_in_chunks, collate, chunks, tokenizer.pad_id, loss_fn.ignore_index
            )
    return Data(dataset, tokenizer, collate, packed)


def _collate_in_chunks(
    collate: Callable[[list[Any]], dict[str, Any]],
    chunks: int,
    padding: int,
    ignored: int,
    rows: list[Any],
) -> dict[str, Any]:
    """A batch long enough to be cut into as many chunks as the loss wants.

    The output layer runs once for each chunk and, sharded by itself, gathers its weights each time. Short
    batches give fewer chunks, so ranks with batches of other lengths would wait for each other for ever.
    """
    batch = collate(rows)
    missing = chunks * (chunks - 1) + 1 - batch["tokens"].shape[-1]
    if missing > 0:
        batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=padding)
        batch["labels"] = F.pad(batch["labels"], (0, missing), value=ignored)
    return batch
