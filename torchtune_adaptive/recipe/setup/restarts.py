"""Runs that torchrun starts again when a rank dies or hangs (``--max-restarts``)."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from torchtune_adaptive.common import launcher
from torchtune_adaptive.core import Ranks, open_store_of_attempt
from torchtune_adaptive.recipe.settings.asked import Asked

log = logging.getLogger(__name__)

_STORE_PER_ATTEMPT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, torchrun makes another key-value store for each attempt (c10d rendezvous only)."""
_LONGEST_MEETING = timedelta(minutes=10)
"""The time that ranks may need to start, as torchrun's own rendezvous allows it."""


def join_process_group(backend: str, timeout: timedelta | None) -> None:
    """Join the process group that a launcher describes, whichever attempt of the run this is.

    Raises:
        RankLost: ranks have not met.
    """
    if not (launcher.max_restarts() and launcher.shares_store()):
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=open_store_of_attempt(_LONGEST_MEETING),
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
            f"--max-restarts {most}: ranks are restarted, but a machine that is lost or comes back may stop "
            f"the run, because torchrun keeps one store for all attempts. Set {_STORE_PER_ATTEMPT}=1 in the "
            "environment of every launcher, and use --rdzv_backend c10d. With static rendezvous, a rank that "
            "is stopped ends the run as well."
        )
    if not asked["resume_from_checkpoint"]:
        log.warning(
            f"--max-restarts {most}: a restart trains from the beginning, because resume_from_checkpoint is "
            "False. Set it to True, and save_every_n_steps to how many steps a restart may lose."
        )


def _on_several_machines() -> bool:
    return launcher.local_size() != launcher.size()
