"""The device that a config is planned for: its memory, the pace of a run on it, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from torchtune_adaptive.common import ConfigError, NoPrediction
from torchtune_adaptive.planner import DeviceLimits, Machine, Pace, gpu_limits, gpus, planned_gpu
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_USUAL = Machine()


def device_for(
    asked: Asked, ranks: int, gpu_name: str | None = None, memory: int | None = None
) -> tuple[DeviceLimits, tuple[str, ...]]:
    """The device that a run is planned for, and the assumptions about it; ``gpu_name`` is a known GPU or
    ``here``, ``memory`` the capacity of one process, if known."""
    headroom = asked.settings.headroom
    memory = memory or asked.settings.memory_limit
    if asked["device"] == "cpu":
        if gpu_name is not None:
            reason = f"is a simulated device, and the plan is asked for {gpu_name!r}"
            raise ConfigError("device", "cpu", reason, "Set device=cuda, or name no GPU")
        if memory is None:
            raise NoPrediction(
                "device: 'cpu' has no memory of its own to plan for. Give --memory (or "
                f"{BLOCK}.memory_limit) to plan for a simulated device, or device=cuda."
            )
        return DeviceLimits.simulated(memory, headroom), ()
    if gpu_name != gpus.HERE:
        return planned_gpu(gpus.gpu(gpu_name or gpus.DEFAULT), ranks, headroom, memory)
    measured = Calibrations(Calibration, asked, ranks).newest()
    if measured is None:
        reason = (
            "is this machine's GPU as measured by an earlier search, and there was none for a config like "
            "this one (compile, packed rows) on as many ranks (one, or several)"
        )
        remedy = f"Run one with {BLOCK}.search=predict, or name a GPU (--list-gpus)"
        raise ConfigError("--gpu", gpus.HERE, reason, remedy)
    capacity = min(memory or measured.capacity, measured.capacity)
    about, ratio = measured.text(), measured.reserved_ratio
    kind = gpus.gpu(gpus.known(measured.device) or gpus.DEFAULT)
    return gpu_limits(measured.device, kind, ranks, capacity, headroom, about, ratio)


def pace_for(
    asked: Asked, ranks: int, device: str, machine: Machine = _USUAL
) -> tuple[Pace | None, tuple[str, ...]]:
    """The pace of a run on a device, which has our name or torch's, and the assumptions; without a pace, the
    reason.

    Raises:
        ConfigError: what is told of the machine cannot be with this device.
    """
    if asked["device"] == "cpu" and machine.is_told:
        remedy = "Set device=cuda, or leave out power, links, network and nodes"
        raise ConfigError("device", "cpu", "is simulated, and a machine of GPUs is told", remedy)
    if asked["fsdp_cpu_offload"]:
        return None, ("no speed: with CPU offload the host's speed decides, and that is not known",)
    speeds = machine.simulated() if asked["device"] == "cpu" else machine.speeds(device)
    if speeds is None:
        return None, (
            f"no speed: nothing is known about the speed of a {device}; name one with --gpu",
        )
    dtype = _DTYPES.get(str(asked["dtype"]), "bfloat16")
    if speeds.peak(dtype) is None:
        return None, (f"no speed: {speeds.name} has no {asked['dtype']}",)
    # What was measured is right for the machine as it is.
    measured = Calibrations(SpeedCalibration, asked, ranks).of(device)
    correction = measured.seconds_ratio if measured and not machine.is_told else None
    compiled = bool(asked["compile"])
    pace = Pace(speeds, ranks, compiled, asked.quantized, dtype, correction, asked.holders)
    around = () if speeds.is_host else machine.lines(device, ranks)
    return pace, (*_assumptions(asked, pace), *around)


def _assumptions(asked: Asked, pace: Pace) -> Iterator[str]:
    if pace.speeds.assumed:
        yield f"speed: of {pace.speeds.name}, {pace.speeds.assumed}"
    if pace.correction is not None:
        yield f"speed: corrected by a factor of {1 / pace.correction:.2f}, measured on this machine"
    if asked.packed():
        yield "speed: flex attention is counted as flash attention over whole rows (either direction)"
