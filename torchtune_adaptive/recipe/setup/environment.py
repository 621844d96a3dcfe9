"""The environment of a rank: its device, its dtype, and the process group that it joins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training, utils

from torchtune_adaptive.common import ConfigError, launcher, network
from torchtune_adaptive.core import Ranks, Watchdog
from torchtune_adaptive.recipe.data.split_rows import RowParts
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import require_torchvision
from torchtune_adaptive.recipe.setup.idle import leave_out_idle_ranks
from torchtune_adaptive.recipe.setup.restarts import join_process_group, say_what_restarts_do


class Context(NamedTuple):
    """The part of its rows that a rank has, and the ranks that have the others."""

    parts: RowParts
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Environment:
    """The place where a rank runs."""

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    launched: bool = True
    """Whether a launcher started this rank; or else it is the only one, as in a single-device recipe."""
    context: Context | None = None
    """The part of its rows that this rank has, where several share them (context parallelism)."""
    tell_idle_ranks: Callable[[], None] = lambda: None
    """A function that tells ranks which the run has no use for that it is done."""
    shorten: Callable[[nn.Module], None] = lambda model: None
    """A function that removes layers from each model once it is built: a plan does not need all of them."""

    @property
    def parts(self) -> int:
        """The number of parts that rows are split into, each of which is on another rank."""
        return self.context.parts.ranks if self.context else 1


def start_environment(asked: Asked, patience: float, watched: bool = True) -> Environment:
    """Join the other ranks; alone, without a launcher, be the only one.

    Args:
        patience: seconds for which a rank waits until the others agree.
        watched: True if a watchdog names the rank that is waited for. Then the process group waits longer, or
            NCCL would end the run before that; without one, the group's own limit is all there is.
    """
    require_torchvision(asked.cfg)
    _log_on_rank_zero()
    network.let_gloo_use_the_interface_of_nccl()
    network.allow_many_connections()
    device = _device(asked["device"])
    dtype = training.get_dtype(asked["dtype"], device)
    on_cpu_too = asked["fsdp_cpu_offload"] or asked["enable_async_checkpointing"]
    backend = training.get_distributed_backend(
        asked["device"], offload_ops_to_cpu=on_cpu_too and device.type != "cpu"
    )
    # Later than the watchdog gives a rank up.
    longest_wait = 1.5 * max(patience, Watchdog.LONGEST_SILENCE)
    timeout = timedelta(seconds=longest_wait) if watched else None
    launched = training.is_distributed()
    tell_idle_ranks: Callable[[], None] = lambda: None  # noqa: E731
    if launched:
        tell_idle_ranks = leave_out_idle_ranks(asked)
        join_process_group(backend, timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    if asked["fsdp_cpu_offload"]:
        training.set_torch_num_threads()  # the optimizer runs on the CPU
    ranks = Ranks(patience)
    say_what_restarts_do(asked, ranks)
    return Environment(device, dtype, ranks, launched, tell_idle_ranks=tell_idle_ranks)


def _device(name: str) -> torch.device:
    """The device of this rank.

    Raises:
        ConfigError: this machine does not have it; torchtune would train on the CPU without a word.
    """
    try:
        device = utils.get_device(name)
        found = device.type == torch.device(name).type
        reason = "torch finds no such device on this machine"
    except (RuntimeError, AssertionError) as error:
        found, reason = False, " ".join(str(error).split()).rstrip(".")
    if not found:
        missing = ConfigError(
            "device",
            name,
            f"cannot be used: {reason}",
            "Set device=cpu, or run on a machine that has it, with a torch that is built for it",
        )
        missing.repeats = False  # a GPU that has failed may be back, or left out
        raise missing
    return device


def _log_on_rank_zero() -> None:
    """Our messages, once: what we say on every rank, the others only say when it is a warning.

    A level that is set already stays (``--quiet``).
    """
    ours = logging.getLogger("torchtune_adaptive")
    if launcher.rank() != 0:
        ours.setLevel(logging.WARNING)
    elif ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.propagate = False
