"""One training step that survives running out of memory, and the search for the sizes that fit.

It needs torch and nothing else, and may import ``common`` only: no config, no torchtune. Begin with
``step/train_step.py``. Below it stand ``ranks`` (stay together), ``device`` (memory) and ``sizes`` (batches
as arithmetic, without torch); above it ``search`` (trials).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.core.device.memory import (
        DeviceMemory,
        Usage,
        is_out_of_memory,
        plain_tensors,
    )
    from torchtune_adaptive.core.device.select import device_memory
    from torchtune_adaptive.core.device.simulated import SimulatedMemory, allocates
    from torchtune_adaptive.core.ranks import fsdp
    from torchtune_adaptive.core.ranks.agreement import Ranks, leave_all_groups
    from torchtune_adaptive.core.ranks.ddp import wrapped_in
    from torchtune_adaptive.core.ranks.signs import LONGEST_SILENCE
    from torchtune_adaptive.core.ranks.watchdog import Watchdog
    from torchtune_adaptive.core.search.probe import Probe
    from torchtune_adaptive.core.search.size_search import PROOFS, SizeSearch, found_sizes
    from torchtune_adaptive.core.search.strategies import (
        SearchResult,
        Status,
        Strategy,
        find_largest,
    )
    from torchtune_adaptive.core.search.timings import Timing, fastest, fitting
    from torchtune_adaptive.core.search.trial import (
        TRIAL_COLUMNS,
        LengthTrial,
        SizeTrial,
        trial_cells,
        trial_line,
    )
    from torchtune_adaptive.core.sizes.candidates import Rounding, candidates
    from torchtune_adaptive.core.sizes.loader import (
        EpochRows,
        Loader,
        SampleOrder,
        leave_signals_to_the_run,
    )
    from torchtune_adaptive.core.sizes.micro_batches import (
        ByRows,
        ByTokens,
        Computed,
        MicroBatch,
        MicroBatches,
        length_buckets,
    )
    from torchtune_adaptive.core.sizes.noise import GrowthController, NoiseScale, NoiseSums
    from torchtune_adaptive.core.sizes.packing import Budget, padding
    from torchtune_adaptive.core.sizes.recovery import Recovery
    from torchtune_adaptive.core.sizes.scaling import LrScaling, beta2_at, lr_factor
    from torchtune_adaptive.core.sizes.split import (
        Epochs,
        Split,
        epochs_of,
        resumed_start,
        share_equally,
        split_rows,
    )
    from torchtune_adaptive.core.step.knobs import (
        CHECKPOINT,
        CHUNKED,
        COMPILE,
        LOSS,
        OFFLOADING,
        RECOMPUTE_LOSS,
        RESHARD,
        Choice,
    )
    from torchtune_adaptive.core.step.loss_scale import LossScale
    from torchtune_adaptive.core.step.objective import (
        Batch,
        Forward,
        NextTokenPrediction,
        Objective,
        Summed,
    )
    from torchtune_adaptive.core.step.recompute import (
        RecomputedChunks,
        SwitchedLayer,
        recomputed_layers,
    )
    from torchtune_adaptive.core.step.retry import StepRunner
    from torchtune_adaptive.core.step.snapshot import Generators
    from torchtune_adaptive.core.step.switches import Switches
    from torchtune_adaptive.core.step.train_step import StepOptions, StepOutcome, TrainStep

__getattr__, __dir__, __all__ = interface(__name__)
