"""The pace of a run: the device's speeds, what is known of the run, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from torchtune_adaptive.planner import Pace, Speeds
from torchtune_adaptive.recipe.plan.calibration import Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.kind_table import is_packed, is_quantized

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def pace_for(
    cfg: DictConfig, settings: AdaptiveSettings, ranks: int, device: str
) -> tuple[Pace | None, tuple[str, ...]]:
    """The pace of a run on a device, which has our name or torch's, and the assumptions; without a pace, the
    reason."""
    if cfg.get("fsdp_cpu_offload", False):
        return None, ("no speed: with CPU offload the host's speed decides, and that is not known",)
    speeds = Speeds.simulated() if cfg.device == "cpu" else Speeds.of(device)
    if speeds is None:
        return None, (
            f"no speed: nothing is known about the speed of a {device}; name one with --gpu",
        )
    dtype = _DTYPES.get(str(cfg.dtype), "bfloat16")
    if speeds.peak(dtype) is None:
        return None, (f"no speed: {speeds.name} has no {cfg.dtype}",)
    measured = Calibrations(SpeedCalibration, settings.cache, cfg, ranks).of(device)
    correction = measured.seconds_ratio if measured else None
    compiled = bool(cfg.get("compile", False))
    pace = Pace(speeds, ranks, compiled, is_quantized(cfg), dtype, correction)
    return pace, tuple(_assumptions(cfg, pace))


def _assumptions(cfg: DictConfig, pace: Pace) -> Iterator[str]:
    if pace.speeds.assumed:
        yield f"speed: of {pace.speeds.name}, {pace.speeds.assumed}"
    if pace.correction is not None:
        yield f"speed: corrected by a factor of {1 / pace.correction:.2f}, measured on this machine"
    if is_packed(cfg):
        yield "speed: flex attention is counted as flash attention over whole rows (either direction)"
    if pace.ranks > pace.speeds.GPUS_IN_A_NODE:
        yield (
            f"speed: nodes of {pace.speeds.GPUS_IN_A_NODE} GPUs, joined by "
            f"{pace.speeds.network / 1e9:.3g} GB/s for each GPU"
        )
