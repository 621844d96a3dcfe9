"""The core and the planner for any training loop; ``torchtune_adaptive`` exports the same names.

It may import ``common``, ``core`` and ``planner``. Begin with ``step.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.library.fastest import find_fastest
    from torchtune_adaptive.library.forward_only import ForwardOnly
    from torchtune_adaptive.library.layers import LayerCheckpointing
    from torchtune_adaptive.library.planning import Plan, plan_batch_size
    from torchtune_adaptive.library.sampling import Steps, steps_of
    from torchtune_adaptive.library.search import BatchSize, find_batch_size
    from torchtune_adaptive.library.step import AdaptiveStep, Outcome
    from torchtune_adaptive.library.transformers_step import TransformersStep
    from torchtune_adaptive.planner import Speed
else:
    __getattr__, __dir__, __all__ = interface(__name__)
