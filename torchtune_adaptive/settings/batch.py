"""The batch that a config asks for."""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.settings.adaptive import whole_number


def configured_batch(cfg: DictConfig, ranks: int) -> Split:
    """``batch_size`` and ``gradient_accumulation_steps`` on a number of ranks.

    Raises:
        ConfigError: either is not a number that rows can be divided by.
    """
    read = whole_number(1)
    keys = "batch_size", "gradient_accumulation_steps"
    micro_batch, accumulation = (read(key, cfg.get(key)) for key in keys)
    return Split(micro_batch, accumulation, ranks)
