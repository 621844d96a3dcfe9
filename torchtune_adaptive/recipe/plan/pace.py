"""The pace of a run: the device's speeds, what is known of the run, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner import Machine, Pace
from torchtune_adaptive.recipe.plan.calibration import Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.settings.asked import Asked

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_USUAL = Machine()


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
