"""The dataset of a run, and how its rows become a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig
from torchtune import config
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.data.rows import TOKEN_ROWS, Collate, Row, Rows
from torchtune_adaptive.recipe.settings.kind_table import is_packed


@dataclass(frozen=True)
class Data:
    """What is trained on, and how rows become a batch."""

    dataset: Any
    tokenizer: Any
    collate: Collate
    packed: bool
    rows: Rows = TOKEN_ROWS


def load_data(cfg: DictConfig, tokenizer: Any, rows: Rows, objective: Any) -> Data:
    """The dataset, or several in one, of samples like ``rows`` in batches for an objective.

    Raises:
        ConfigError: a dataset cannot say how many rows it has.
    """
    if isinstance(cfg.dataset, ListConfig):
        dataset = ConcatDataset([_rows_of(one, tokenizer) for one in cfg.dataset])
    else:
        dataset = _rows_of(cfg.dataset, tokenizer)
    collate = rows.collate(cfg, tokenizer, objective)
    return Data(dataset, tokenizer, collate, is_packed(cfg), rows)


def validation_config(cfg: DictConfig) -> DictConfig:
    """The config as if it were for training on what is validated on."""
    validating = cfg.copy()
    validating.dataset = cfg.dataset_val
    return validating


def _rows_of(cfg: DictConfig, tokenizer: Any) -> Any:
    dataset = config.instantiate(cfg, tokenizer)
    try:
        len(dataset)
    except TypeError:
        raise ConfigError(
            "dataset",
            cfg._component_,
            "streams its rows: it has no length, but epochs and batches are made of rows by their number",
            "Set dataset.streaming=False, or use a dataset with __len__ and __getitem__",
        ) from None
    return dataset


def checked_row(data: Data, index: int) -> Row:
    """A row of the kind that the recipe takes.

    Raises:
        ConfigError: it is a row for another kind of recipe.
    """
    row: Row = data.dataset[index]
    if all(key in row for key in data.rows.keys):
        return row
    if "chosen_input_ids" in row:
        reason = (
            "has pairs of a chosen and a rejected answer, which only preference recipes (DPO) take"
        )
        remedy = "Use such a recipe, or a dataset of single answers"
    else:
        has, needed = sorted(map(str, row)), data.rows.keys
        reason = f"has rows of {', '.join(has)}; this recipe needs {', '.join(needed)}"
        remedy = "Use another dataset, or the recipe that it is for"
    raise ConfigError("dataset", type(data.dataset).__name__, reason, remedy)
