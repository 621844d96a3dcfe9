"""Training steps that find their own batch size and survive running out of memory.

What is exported here is the library interface; see ``docs/library.md``. Each name is loaded when it is first
used, and none of them needs torchtune.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_adaptive.batching.noise import NoiseScale
    from torchtune_adaptive.batching.scaling import lr_factor
    from torchtune_adaptive.errors import (
        AdaptiveBatchingError,
        NoPrediction,
        NothingFits,
        TrainingOutOfMemory,
        UsageError,
    )
    from torchtune_adaptive.library.planning import Plan, plan_batch_size
    from torchtune_adaptive.library.rows import steps_of
    from torchtune_adaptive.library.search import BatchSize, find_batch_size
    from torchtune_adaptive.library.step import AdaptiveStep, Outcome
    from torchtune_adaptive.schedule import Moment, Schedule

__version__ = "0.1.0"

_WHERE = {
    "AdaptiveStep": "library.step",
    "Outcome": "library.step",
    "find_batch_size": "library.search",
    "BatchSize": "library.search",
    "steps_of": "library.rows",
    "plan_batch_size": "library.planning",
    "Plan": "library.planning",
    "NoiseScale": "batching.noise",
    "Schedule": "schedule",
    "Moment": "schedule",
    "lr_factor": "batching.scaling",
    "AdaptiveBatchingError": "errors",
    "UsageError": "errors",
    "NothingFits": "errors",
    "NoPrediction": "errors",
    "TrainingOutOfMemory": "errors",
}
"""The public names, and the modules that they are in."""

__all__ = [
    "AdaptiveBatchingError",
    "AdaptiveStep",
    "BatchSize",
    "Moment",
    "NoPrediction",
    "NoiseScale",
    "NothingFits",
    "Outcome",
    "Plan",
    "Schedule",
    "TrainingOutOfMemory",
    "UsageError",
    "find_batch_size",
    "lr_factor",
    "plan_batch_size",
    "steps_of",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
