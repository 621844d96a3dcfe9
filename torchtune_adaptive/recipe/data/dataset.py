"""The dataset of a run, and how its rows become a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, ListConfig
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import Generators
from torchtune_adaptive.recipe.components import is_of_a_library, make, refusal
from torchtune_adaptive.recipe.data.rows import TOKEN_ROWS, Collate, Row, Rows
from torchtune_adaptive.recipe.private import columns
from torchtune_adaptive.recipe.settings.asked import Asked


@dataclass(frozen=True)
class Data:
    """What is trained on, and how rows become a batch."""

    dataset: Any
    tokenizer: Any
    collate: Collate
    rows: Rows = TOKEN_ROWS


class LoadedRows(NamedTuple):
    """The tokenizer of a run, and rows by their number."""

    tokenizer: Any
    training: Any
    validation: Any = None
    """The rows to validate on while training, if that is asked for."""


def load_rows(asked: Asked) -> LoadedRows:
    """The tokenizer and the rows of a config; each dataset can give its first row.

    Raises:
        ConfigError: a file, a column or all rows are missing, or a dataset cannot say how many it has.
    """
    cfg = asked.cfg
    tokenizer = make(cfg.tokenizer, "tokenizer")
    training = _rows_at(cfg, "dataset", tokenizer)
    if asked["run_val_every_n_steps"] is None:
        return LoadedRows(tokenizer, training)
    return LoadedRows(tokenizer, training, _rows_at(cfg, "dataset_val", tokenizer))


def data_of(asked: Asked, tokenizer: Any, dataset: Any, rows: Rows, objective: Any) -> Data:
    """A dataset of samples like ``rows``, in batches for an objective."""
    return Data(dataset, tokenizer, rows.collate(asked, tokenizer, objective), rows)


def as_validated(asked: Asked) -> Asked:
    """What was asked for, as if it were to train on what is validated on."""
    validating = asked.cfg.copy()
    validating.dataset = asked.cfg.dataset_val
    return replace(asked, cfg=validating)


def _rows_at(cfg: DictConfig, key: str, tokenizer: Any) -> Any:
    """The rows of a block, or of all in a list of them."""
    if not isinstance(cfg[key], ListConfig):
        return _rows_of(cfg[key], key, tokenizer)
    each = [_rows_of(one, f"{key}[{n}]", tokenizer) for n, one in enumerate(cfg[key])]
    return ConcatDataset(each)


def _rows_of(cfg: DictConfig, name: str, tokenizer: Any) -> Any:
    try:
        dataset = make(cfg, name, tokenizer)
    except ConfigError as error:
        # As the library of datasets says it of a file without rows.
        if isinstance(error.__cause__, StopIteration) or "corresponds to no data" in str(error):
            raise _no_rows(cfg, name) from error
        raise
    try:
        rows = len(dataset)
    except TypeError:
        raise ConfigError(
            name,
            cfg._component_,
            "streams its rows: it has no length, but epochs and batches are made of rows by their number",
            f"Set {name}.streaming=False, or use a dataset with __len__ and __getitem__",
        ) from None
    if rows == 0:
        raise _no_rows(cfg, name)
    _read_first_row(cfg, name, dataset)
    return dataset


def _no_rows(cfg: DictConfig, name: str) -> ConfigError:
    keys = [f"{name}.{key}" for key in ("source", "data_files", "split", "filter_fn") if key in cfg]
    remedy = f"Look at {', '.join(keys)}" if keys else "Give it rows"
    return ConfigError(name, cfg._component_, "has no rows", remedy)


def _read_first_row(cfg: DictConfig, name: str, dataset: Any) -> None:
    """Read a row, without a trace in the random numbers: that is when a missing column is noticed."""
    generators = Generators(torch.device("cpu"))
    try:
        dataset[0]
    except Exception as error:
        if not is_of_a_library(cfg):
            raise
        there, missing = columns(dataset), error.args[0] if error.args else None
        if there is None or not isinstance(error, KeyError) or missing in there:
            raise refusal(cfg, name, error) from error
        raise ConfigError(
            name,
            cfg._component_,
            f"needs a column {missing!r}, but the data has {', '.join(there)}",
            f"Say which is which in {name}.column_map",
        ) from error
    finally:
        generators.restore()


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
