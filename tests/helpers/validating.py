"""Runs that are validated while they train."""

from __future__ import annotations

from typing import Any

from tests.helpers.runs import Records

DATA = {
    "_component_": "torchtune.datasets.instruct_dataset",
    "source": "json",
    "data_files": "${assets}/data.json",
    "split": "train[:11]",
}


VALIDATES: dict[str, Any] = {"dataset_val": DATA, "run_val_every_n_steps": 2}


def losses(records: Records) -> list[tuple[float, float]]:
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def validation_losses(records: Records) -> dict[float, float]:
    return {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
