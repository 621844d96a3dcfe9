"""The batch that a config asks for."""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.core import Split


def configured_batch(cfg: DictConfig, ranks: int) -> Split:
    """``batch_size`` and ``gradient_accumulation_steps`` of a checked config, on a number of ranks."""
    return Split(cfg.batch_size, cfg.gradient_accumulation_steps, ranks)
