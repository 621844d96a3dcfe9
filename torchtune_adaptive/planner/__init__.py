"""Memory and speed of a step without the device: traced on a fake one, then computed for any size.

It may import ``common`` and ``core``, and reads no config. Begin with ``traced_run.py``. ``trace`` records a
step, ``memory`` replays its allocations, ``speed`` its operations; neither of these two needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.planner import programs, step_table, steps_by_choice
    from torchtune_adaptive.planner.memory import gpus
    from torchtune_adaptive.planner.memory.peak import (
        DOES_NOT_FIT,
        DeviceLimits,
        Peak,
        StartUp,
        peak,
    )
    from torchtune_adaptive.planner.memory.planned import gpu_limits, planned_gpu
    from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
    from torchtune_adaptive.planner.speed.machine import Machine
    from torchtune_adaptive.planner.speed.speed import Pace, Speed
    from torchtune_adaptive.planner.trace import fake_device
    from torchtune_adaptive.planner.trace.any_depth import AnyDepth
    from torchtune_adaptive.planner.trace.recorder import check_sums, no_prediction
    from torchtune_adaptive.planner.trace.step_tracer import StepTracer
    from torchtune_adaptive.planner.trace.weights import fill
    from torchtune_adaptive.planner.traced_run import Answer, Question, TracedRun
    from torchtune_adaptive.planner.workers import Worker, call_alone, processes, told_of, traced
else:
    __getattr__, __dir__, __all__ = interface(__name__)
