"""Ready configs with changes, as tests of settings want them."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.recipe.registry import find_config


def config(name: str = "tiny/full", *overrides: str, **changes: Any) -> DictConfig:
    """A config, with overrides as on the command line, and with values by the paths of their keys."""
    cfg = OmegaConf.merge(
        OmegaConf.load(find_config(name)), OmegaConf.from_dotlist(list(overrides))
    )
    assert isinstance(cfg, DictConfig)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg
