"""One training step that survives running out of memory, and the search for the sizes that fit.

It needs torch and nothing else, and may import ``common`` only: no config, no torchtune. Begin with
``step/train_step.py``. Below it stand ``ranks`` (stay together), ``device`` (memory) and ``sizes`` (batches
as arithmetic, without torch); above it ``search`` (trials).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.core.device import before_fork
    from torchtune_adaptive.core.device.accelerator import device_memory
    from torchtune_adaptive.core.device.memory import DeviceMemory, Usage
    from torchtune_adaptive.core.device.simulated import SimulatedMemory
    from torchtune_adaptive.core.ranks.agreement import Ranks
    from torchtune_adaptive.core.ranks.store import open_store_of_attempt
    from torchtune_adaptive.core.ranks.watchdog import Watchdog
    from torchtune_adaptive.core.rows.loader import Loader
    from torchtune_adaptive.core.rows.micro_batches import (
        ByRows,
        ByTokens,
        MicroBatch,
        MicroBatches,
        Weightless,
    )
    from torchtune_adaptive.core.rows.order import SampleOrder
    from torchtune_adaptive.core.search import strategies
    from torchtune_adaptive.core.search.probe import Probe
    from torchtune_adaptive.core.search.trial import SizeTrial
    from torchtune_adaptive.core.sizes.noise import NoiseScale, NoiseSums
    from torchtune_adaptive.core.sizes.packing import Budget
    from torchtune_adaptive.core.sizes.recovery import Recovery
    from torchtune_adaptive.core.sizes.scaling import LrScaling, lr_factor
    from torchtune_adaptive.core.sizes.split import Epochs, Rounding, Split, candidates
    from torchtune_adaptive.core.step import knobs, recompute, sample_dropout
    from torchtune_adaptive.core.step.buffers import Buffers
    from torchtune_adaptive.core.step.exchange import StepDone
    from torchtune_adaptive.core.step.generators import Generators
    from torchtune_adaptive.core.step.knobs import Choice
    from torchtune_adaptive.core.step.objective import (
        Batch,
        Forward,
        NextTokenPrediction,
        Objective,
        Summed,
    )
    from torchtune_adaptive.core.step.phase import Phase
    from torchtune_adaptive.core.step.retry import Adjustment, StepRunner
    from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep
else:
    __getattr__, __dir__, __all__ = interface(__name__)
