"""What earlier versions have saved."""

from __future__ import annotations

from typing import Any

import torch

GENERATORS: dict[str, Any] = {
    "python": [3, [7] * 624 + [624], None],
    "numpy": {
        "bit_generator": "MT19937",
        "state": {"key": [5] * 624, "pos": 3},
        "has_gauss": 1,
        "gauss": -0.25,
    },
    "torch": torch.get_rng_state(),
    "accelerator": None,
}
"""The random number generators of a rank, as version 1 of the training state had them."""

UNNUMBERED: dict[str, Any] = {
    "global_step": 6,
    "samples": 192,
    "samples_of_epoch": 64,
    "token_budget": None,
    "generators": [GENERATORS, {**GENERATORS, "python": [3, [9] * 624 + [1], 0.5]}],
    "validated": 5,
    "growth": {
        "start": [16, 1, 2],
        "global_batch": 32,
        "largest": 16,
        "decisions": [],
        "schedule": {"asked_at": 160, "in_favour": 0, "since": 6},
    },
    "learning_rate": {
        "start": 32,
        "position": 6,
        "base": [0.002851453301853629],
        "highest": 0.003,
        "batch": 32,
        "factor": 1.0,
        "beta2": [],
        "scheduler": {"base_lrs": [0.003], "last_epoch": 6, "_step_count": 7, "lr_lambdas": [None]},
    },
    "noise": {"steps": 6, "sums": {"small": 1816184.6331945239, "big": 3250777.9087099805}},
    "knobs": {"adaptive_batching.checkpoint": "none", "fsdp_reshard_after_forward": True},
    "recovery": {
        "size": 16,
        "relief": 0,
        "given_up": [],
        "wait": 100,
        "calm": 6,
        "on_trial": False,
        "retried": False,
    },
    "retried_steps": 0,
    "allocation_retries": 0,
}
"""As a run on two ranks saved it before states had versions; of some long values only a part."""
