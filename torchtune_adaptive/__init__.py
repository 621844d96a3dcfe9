"""Training steps that find their own batch size and survive running out of memory.

What is exported here is the library interface; see ``docs/library.md``. Each name is loaded when it is first
used, and none of them needs torchtune.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.common import interface

__version__ = "0.2.0"

# Copied recipes and configs name modules by paths of their own: ``torchtune_adaptive.launch``.
__path__.append(str(Path(__file__).parent / "recipe" / "stable"))

if TYPE_CHECKING:
    from torchtune_adaptive.common import (
        AdaptiveBatchingError,
        NoPrediction,
        NothingFits,
        RankLost,
        TrainingOutOfMemory,
        UsageError,
    )
    from torchtune_adaptive.core import NoiseScale, lr_factor
    from torchtune_adaptive.library import (
        AdaptiveStep,
        BatchSize,
        ForwardOnly,
        LayerCheckpointing,
        Outcome,
        Plan,
        Speed,
        Steps,
        TransformersStep,
        find_batch_size,
        find_fastest,
        plan_batch_size,
        steps_of,
    )
    from torchtune_adaptive.planner import Machine
    from torchtune_adaptive.schedule import Moment, Schedule
else:
    __getattr__, __dir__, __all__ = interface(__name__)
