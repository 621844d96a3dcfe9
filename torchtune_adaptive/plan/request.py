"""What a prediction is for: the config, the device, the length of rows, and what is assumed about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError, NoPrediction
from torchtune_adaptive.memory_model.gpus import DEFAULT, GIB, Gpu, gpu
from torchtune_adaptive.memory_model.peak import DeviceLimits
from torchtune_adaptive.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.plan.predict import Query
from torchtune_adaptive.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.settings.batch import configured_batch
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import is_packed, kind_of

ASSUMED_LENGTH = 2048

ERROR_BAND = 0.03
"""Of predictions for a real device, as a share of the peak."""

HERE = "here"
"""In place of a device's name: the one of this machine, as searches found it."""


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for, and what was assumed on the way."""

    cfg: DictConfig
    ranks: int
    device: DeviceLimits
    length: int
    length_source: str
    cache: bool | str
    assumptions: tuple[str, ...] = field(default=())

    def question(self, **changes: Any) -> Query:
        plain = OmegaConf.to_container(self.cfg, resolve=True)
        assert isinstance(plain, dict)
        return replace(
            Query(
                {str(key): value for key, value in plain.items()},
                self.ranks,
                self.device,
                configured_batch(self.cfg, self.ranks).micro_batch,
                self.length,
                cache=self.cache,
            ),
            **changes,
        )


def plan_request(
    cfg: DictConfig, ranks: int, gpu_name: str | None = None, memory: int | None = None
) -> PlanRequest:
    """Settle what the prediction is for.

    Raises:
        ConfigError: the config cannot work.
        NoPrediction: its memory cannot be told ahead.
    """
    settings = check(cfg, kind_of(cfg))
    if (ways := cfg.get("tensor_parallel_dim") or 1) > 1:
        raise NoPrediction(
            f"tensor_parallel_dim: {ways} splits tensors in ways that are not traced yet. "
            "Set tensor_parallel_dim=1 to get a prediction."
        )
    length, source = row_length(cfg, settings)
    device, assumed = device_for(cfg, settings, ranks, gpu_name, memory)
    return PlanRequest(
        cfg, ranks, device, length, source, settings.cache, (*assumed, *_caveats(cfg))
    )


def row_length(cfg: DictConfig, settings: AdaptiveSettings) -> tuple[int, str]:
    if settings.probe_length is not None:
        return settings.probe_length, f"{BLOCK}.probe_length"
    for block in ("dataset", "tokenizer"):
        node = cfg.get(block)
        if isinstance(node, DictConfig) and (length := node.get("max_seq_len")):
            return int(length), f"{block}.max_seq_len"
    longest = cfg.model.get("max_seq_len") or ASSUMED_LENGTH
    return min(ASSUMED_LENGTH, longest), "assumed: set tokenizer.max_seq_len"


def device_for(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    ranks: int,
    gpu_name: str | None = None,
    memory: int | None = None,
) -> tuple[DeviceLimits, tuple[str, ...]]:
    """What a run will have to do with, and what was assumed about it.

    Args:
        cfg: of the run.
        settings: of the run.
        ranks: how many there are.
        gpu_name: a known kind of device, or what was measured on this machine.
        memory: what a process can get, if that is known.
    """
    memory = memory or settings.memory_limit
    share = 1 - settings.headroom
    if cfg.device == "cpu":
        if memory is None:
            raise NoPrediction(
                "device: 'cpu' has no memory of its own to plan for. Give --memory (or "
                f"{BLOCK}.memory_limit) to plan for a simulated device, or device=cuda."
            )
        return DeviceLimits("simulated device", int(memory * share), caching=False, band=0.001), ()
    measured = _measured_here(cfg, settings, ranks) if gpu_name == HERE else None
    kind = gpu(gpu_name or DEFAULT) if measured is None else gpu(DEFAULT)
    if measured is not None:
        usable, name = min(memory or measured.capacity, measured.capacity), measured.device
    elif memory is not None:
        usable, name = memory, f"{memory / GIB:.4g} GiB"
    else:
        usable, name = kind.usable(ranks), kind.name
    variables = (os.environ.get(f"PYTORCH{x}_ALLOC_CONF", "") for x in ("", "_CUDA"))
    expandable = any("expandable_segments:true" in value.lower() for value in variables)
    device = DeviceLimits(
        name=name,
        usable=int(usable * share),
        expandable=expandable,
        workspaces=(kind.workspace, kind.workspace),
        band=ERROR_BAND,
        correction=measured.reserved if measured is not None else 1.0,
    )
    assumed = [
        f"usable: {usable / GIB:.2f} GiB, of which {settings.headroom:.0%} stay free (headroom)",
        f"allocator: {'expandable segments' if expandable else 'default segments'}",
        f"cuBLAS workspaces: 2 x {kind.workspace / 2**20:.4g} MiB",
    ]
    if measured is not None:
        assumed.insert(0, measured.text())
    elif memory is None:
        assumed.insert(0, _taken_before(kind, usable))
    return device, tuple(assumed)


def _measured_here(cfg: DictConfig, settings: AdaptiveSettings, ranks: int) -> Calibration:
    newest = Calibrations(settings.cache, cfg, ranks).newest()
    if newest is None:
        raise ConfigError(
            "--gpu",
            HERE,
            "is the device of this machine as a search found it, and none is remembered for a config "
            "like this (compile, packed rows) on as many ranks (one, or more)",
            f"Run one with {BLOCK}.search=predict, or name a device (--list-gpus)",
        )
    return newest


def _taken_before(kind: Gpu, usable: int) -> str:
    others = kind.gib - usable / GIB
    return f"{kind.name}: {kind.gib:.2f} GiB, less {others:.2f} GiB for CUDA's context and NCCL"


def _caveats(cfg: DictConfig) -> Iterator[str]:
    """What is predicted in another way than it runs, and in which direction that errs."""
    if cfg.get("compile", False):
        yield (
            "compile: predicted as it runs without; compiled steps usually take less (errs high), "
            "compiling itself may take more for a moment"
        )
    if cfg.get("fsdp_cpu_offload", False):
        yield "CPU offload: what the host needs is not predicted"
    if is_packed(cfg):
        yield "packed rows: flex attention is counted as flash attention (errs high)"
    if cfg.device != "cpu":
        yield "attention: flash; where torch picks cuDNN, its workspace comes on top (errs low)"
