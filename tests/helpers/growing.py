"""Runs whose batch grows."""

from __future__ import annotations

from typing import Any

from torchtune.data import padded_collate_sft

ROWS: list[list[int]] = []
"""Of each micro-batch that this process has collated: a number for each row, the same in every run."""


def collate(rows: list[Any], **settings: Any) -> dict[str, Any]:
    ROWS.append([hash(tuple(row["tokens"])) for row in rows])
    return padded_collate_sft(rows, **settings)  # type: ignore[return-value]


GROWING = {
    "batch_size": 2,
    "epochs": 3,
    "max_steps_per_epoch": 16,
    "clip_grad_norm": 1.0,
    "adaptive_batching.memory_limit": "40MiB",
    "adaptive_batching.ceiling": 8,
    "collate_fn": f"{__name__}.{collate.__name__}",
}


WITHIN_EPOCHS = {
    **GROWING,
    "batch_increase_function": {
        "_component_": "torchtune_adaptive.schedule.Geometric",
        "every": 0.5,
    },
    "adaptive_batching.lr_scaling": "sqrt",
    "adaptive_batching.beta2": "half_life",
    "adaptive_batching.grow_past_memory": True,
}
