"""What a prediction is for: the config, the device, the length of samples, and the assumptions about them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError, NoPrediction
from torchtune_adaptive.memory_model.gpus import DEFAULT, GIB, Gpu, gpu
from torchtune_adaptive.memory_model.peak import DeviceLimits
from torchtune_adaptive.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.plan.predict import Query
from torchtune_adaptive.settings.adaptive import BLOCK, AdaptiveSettings
from torchtune_adaptive.settings.batch import configured_batch
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import is_packed, kind_of
from torchtune_adaptive.text import human_bytes

ASSUMED_LENGTH = 2048

ERROR_BAND = 0.03
"""The error of predictions for a real device, as a share of the peak."""

HERE = "here"
"""Instead of a GPU's name: the one of this machine, as measured by an earlier search."""


@dataclass(frozen=True)
class PlanRequest:
    """What the plan command predicts, and the assumptions that it makes."""

    cfg: DictConfig
    ranks: int
    device: DeviceLimits
    length: int
    length_source: str
    cache: bool | str
    assumptions: tuple[str, ...] = field(default=())

    def query(self, **changes: Any) -> Query:
        plain: Any = OmegaConf.to_container(self.cfg, resolve=True)
        micro_batch = configured_batch(self.cfg, self.ranks).micro_batch
        query = Query(plain, self.ranks, self.device, micro_batch, self.length, cache=self.cache)
        return replace(query, **changes)


def plan_request(
    cfg: DictConfig, ranks: int, gpu_name: str | None = None, memory: int | None = None
) -> PlanRequest:
    """Settle what the prediction is for.

    Args:
        cfg: the config of the run.
        ranks: how many there are.
        gpu_name: a known GPU, or ``here``.
        memory: bytes available to one process, if known.

    Raises:
        ConfigError: the config cannot work.
        NoPrediction: its memory cannot be predicted.
    """
    settings = check(cfg, kind_of(cfg))
    if (ways := cfg.get("tensor_parallel_dim") or 1) > 1:
        raise NoPrediction(
            f"tensor_parallel_dim: {ways} splits tensors in ways that cannot be traced yet. "
            "Set tensor_parallel_dim=1 to get a prediction."
        )
    _require_installed(cfg)
    length, source = row_length(cfg, settings)
    device, assumed = device_for(cfg, settings, ranks, gpu_name, memory)
    return PlanRequest(
        cfg, ranks, device, length, source, settings.cache, (*assumed, *_caveats(cfg))
    )


def _require_installed(cfg: DictConfig) -> None:
    for part in ("model", "loss", "optimizer"):
        component = str(OmegaConf.select(cfg, f"{part}._component_") or "torch.")
        package = component.split(".")[0]
        if package in sys.modules or PathFinder.find_spec(package, [*sys.path, os.getcwd()]):
            continue
        instead = (
            ", or plan with optimizer._component_=torchao.optim.AdamW8bit (similar size) or "
            "torch.optim.AdamW (more memory)"
        )
        raise NoPrediction(
            f"{package} is not installed, so {component} cannot be planned. "
            f"Install it{instead if part == 'optimizer' else ''}."
        )


def row_length(cfg: DictConfig, settings: AdaptiveSettings) -> tuple[int, str]:
    """The length of the longest samples as far as the config gives it, and where it does."""
    if settings.probe_length is not None:
        return settings.probe_length, f"{BLOCK}.probe_length"
    for block in ("dataset", "tokenizer"):
        if length := _max_seq_len(cfg.get(block)):
            return length, f"{block}.max_seq_len"
    longest = cfg.model.get("max_seq_len") or ASSUMED_LENGTH
    return min(ASSUMED_LENGTH, longest), "assumed: set tokenizer.max_seq_len"


def _max_seq_len(block: Any) -> int | None:
    """The bound that a block of the config sets; a list of datasets sets one if each of them does."""
    nodes = block if isinstance(block, ListConfig) else [block]
    lengths = [node.get("max_seq_len") if isinstance(node, DictConfig) else None for node in nodes]
    set_lengths = [int(length) for length in lengths if length]
    return max(set_lengths) if len(set_lengths) == len(nodes) > 0 else None


def device_for(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    ranks: int,
    gpu_name: str | None = None,
    memory: int | None = None,
) -> tuple[DeviceLimits, tuple[str, ...]]:
    """The memory that a run can use, and the assumptions about it.

    Args:
        cfg: the config of the run.
        settings: its adaptive settings.
        ranks: how many there are.
        gpu_name: a known GPU, or ``here``.
        memory: bytes available to one process, if known.
    """
    memory = memory or settings.memory_limit
    if cfg.device == "cpu":
        return _simulated_device(settings, memory), ()
    kind, correction = gpu(DEFAULT if gpu_name in (None, HERE) else gpu_name), 1.0
    if gpu_name == HERE:
        measured = _measured_here(cfg, settings, ranks)
        available = min(memory or measured.capacity, measured.capacity)
        name, source, correction = measured.device, measured.text(), measured.reserved_ratio
    elif memory is not None:
        available, name, source = memory, f"GPU with {_amount(memory)}", ""
    else:
        available, name, source = kind.available(ranks), kind.name, _capacity(kind, ranks)
    device = DeviceLimits(
        name=name,
        limit=int(available * (1 - settings.headroom)),
        expandable=_has_expandable_segments(),
        workspaces=(kind.workspace, kind.workspace),
        band=ERROR_BAND,
        correction=correction,
    )
    assumed = (
        source,
        f"{human_bytes(available)} available; limit {human_bytes(device.limit)} "
        f"({settings.headroom:.0%} headroom)",
        f"allocator: {'expandable segments' if device.expandable else 'default segments'}",
        f"cuBLAS workspaces: 2 x {human_bytes(kind.workspace)}",
    )
    return device, tuple(line for line in assumed if line)


def _simulated_device(settings: AdaptiveSettings, memory: int | None) -> DeviceLimits:
    if memory is None:
        raise NoPrediction(
            "device: 'cpu' has no memory of its own to plan for. Give --memory (or "
            f"{BLOCK}.memory_limit) to plan for a simulated device, or device=cuda."
        )
    limit = int(memory * (1 - settings.headroom))
    return DeviceLimits("simulated device", limit, caching=False, band=0.001)


def _has_expandable_segments() -> bool:
    variables = (os.environ.get(f"PYTORCH{infix}_ALLOC_CONF", "") for infix in ("", "_CUDA"))
    return any("expandable_segments:true" in value.lower() for value in variables)


def _measured_here(cfg: DictConfig, settings: AdaptiveSettings, ranks: int) -> Calibration:
    newest = Calibrations(settings.cache, cfg, ranks).newest()
    if newest is None:
        raise ConfigError(
            "--gpu",
            HERE,
            "is this machine's GPU as measured by an earlier search, and there was none for a config like "
            "this one (compile, packed rows) on as many ranks (one, or several)",
            f"Run one with {BLOCK}.search=predict, or name a GPU (--list-gpus)",
        )
    return newest


def _amount(memory: int) -> str:
    """``22.35 GiB``, and for a round number of GB that as well: that is how cards are sold."""
    gib = f"{memory / GIB:.4g} GiB"
    return gib if memory % 10**9 or not memory % GIB else f"{memory // 10**9} GB ({gib})"


def _capacity(kind: Gpu, ranks: int) -> str:
    taken = human_bytes(kind.capacity - kind.available(ranks))
    by = "the CUDA context and NCCL" if ranks > 1 else "the CUDA context"
    return f"{kind.name}: {human_bytes(kind.capacity)} capacity, less {taken} for {by}"


def _caveats(cfg: DictConfig) -> Iterator[str]:
    """What is predicted differently from how it runs, and the direction of the error."""
    if cfg.get("compile", False):
        yield (
            "compile: predicted as if not compiled; compiled steps usually take less (overestimates), "
            "but compiling itself may take more for a moment"
        )
    if cfg.get("fsdp_cpu_offload", False):
        yield "CPU offload: host memory is not predicted"
    if is_packed(cfg):
        yield "packed rows: flex attention is counted as flash attention (overestimates)"
    if cfg.device != "cpu":
        yield (
            "attention: flash; if torch selects cuDNN, its workspace is not included (underestimates)"
        )
