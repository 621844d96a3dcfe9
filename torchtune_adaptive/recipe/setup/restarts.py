"""Runs that torchrun starts again when a rank dies or hangs (``--max-restarts``)."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torchtune_adaptive.common import ConfigError, launcher
from torchtune_adaptive.core import Ranks, open_store_of_restart
from torchtune_adaptive.recipe.settings.asked import Asked

log = logging.getLogger(__name__)

_STORE_PER_ATTEMPT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, torchrun makes another key-value store for each attempt (c10d rendezvous only)."""
_REMEDY = (
    f"Set {_STORE_PER_ATTEMPT}=1 in the environment of every launcher, and use --rdzv_backend c10d"
)


def join_process_group(backend: str, timeout: timedelta | None) -> None:
    """Join the process group that a launcher describes, whichever attempt of the run this is.

    Raises:
        ConfigError: this is a restart on several machines, and their ranks would not find each other.
    """
    if not (launcher.restarts() and launcher.shares_store()):
        dist.init_process_group(backend, timeout=timeout)
        return
    if _on_several_machines():
        # Launchers count differently, so the number of the attempt is not a name for its store.
        raise ConfigError(
            _STORE_PER_ATTEMPT,
            os.environ.get(_STORE_PER_ATTEMPT),
            "leaves a restart on several machines with the addresses of the attempt before, so ranks "
            "would wait for processes that are gone",
            _REMEDY,
        )
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=open_store_of_restart(timeout or default_pg_timeout),
        rank=launcher.rank(),
        world_size=launcher.size(),
    )


def say_what_restarts_do(asked: Asked, ranks: Ranks) -> None:
    """Say that this is a restart; in the first attempt, what keeps a restart from continuing the run."""
    most = launcher.max_restarts()
    # The largest: where a rank ended, its launcher counts, and others may not.
    _, number = ranks.spread(launcher.restarts())
    if not ranks.is_zero:
        return
    if number:
        log.warning(f"Restart {number} of {most}.")
        return
    if not most:
        return
    if _on_several_machines() and launcher.shares_store():
        log.warning(
            f"--max-restarts {most}: on several machines a restart ends with an error, because ranks would "
            f"find the addresses of the attempt before. {_REMEDY}."
        )
    if not asked["resume_from_checkpoint"]:
        log.warning(
            f"--max-restarts {most}: a restart trains from the beginning, because resume_from_checkpoint is "
            "False. Set it to True, and save_every_n_steps to how many steps a restart may lose."
        )


def _on_several_machines() -> bool:
    return launcher.local_size() != launcher.size()
