"""Where a rank runs: its device, its dtype, and the process group that it joins."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training, utils


@dataclass(frozen=True)
class Environment:
    """Where a rank runs."""

    device: torch.device
    dtype: torch.dtype
    rank: int
    ranks: int

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def start_environment(cfg: DictConfig) -> Environment:
    """Join the other ranks; alone, without a launcher, be the only one."""
    _log_on_rank_zero()
    device = utils.get_device(cfg.device)
    dtype = training.get_dtype(cfg.dtype, device)
    on_cpu_too = cfg.get("fsdp_cpu_offload", False) or cfg.get("enable_async_checkpointing", False)
    backend = training.get_distributed_backend(
        cfg.device, offload_ops_to_cpu=on_cpu_too and device.type != "cpu"
    )
    if training.is_distributed():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()  # the optimizer runs on the CPU
    return Environment(device, dtype, dist.get_rank(), dist.get_world_size())


def _log_on_rank_zero() -> None:
    """Our messages, once: what we say on every rank, the others only say when it is a warning."""
    ours = logging.getLogger("torchtune_adaptive")
    ours.setLevel(logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.WARNING)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.propagate = False
