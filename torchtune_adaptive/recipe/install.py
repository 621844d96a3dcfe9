"""What this package changes in other libraries, for the whole process: nothing changes by importing it."""

from __future__ import annotations

import logging
import os
from functools import cache

from omegaconf import OmegaConf

from torchtune_adaptive.recipe import tiny
from torchtune_adaptive.recipe.private import TORCHTUNE_LOGGER
from torchtune_adaptive.recipe.signals import leave_to_parent


@cache
def install() -> None:
    """Make the changes, once. Whatever looks up a config or starts a run calls this first."""
    # ${tiny_assets:} in the tiny configs: made on first use.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("tiny_assets", lambda: str(tiny.assets()), replace=True)
    os.register_at_fork(after_in_child=leave_to_parent)
    # torchtune's own messages are left out unless they warn: we say the same, of the places where things
    # end up.
    logging.getLogger(TORCHTUNE_LOGGER).addFilter(lambda record: record.levelno >= logging.WARNING)
