"""Plans a program in a process of its own, in which it runs. No torch in here."""

from __future__ import annotations

from torchtune_adaptive.planner.programs.request import Devices, Program, ProgramPlan
from torchtune_adaptive.planner.workers import call_alone


def plan_program(program: Program, devices: Devices, timeout: float) -> ProgramPlan:
    """Plan a program on devices that are like its GPU, in a process that may take so many seconds.

    Raises:
        NoPrediction: it cannot be run on a device that is not there, or not in that time.
    """
    return call_alone(_planned, program, devices, timeout=timeout)


def _planned(program: Program, devices: Devices) -> ProgramPlan:
    from torchtune_adaptive.planner.programs.plan import planned

    return planned(program, devices)
