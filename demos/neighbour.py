"""The full recipe on a simulated device that another process uses for a while: `make demo-oom`.

At step 20 the other process takes half the memory of rank 0's device; at step 45 it frees it. Nothing else
changes, and the recipe does not know.
"""

from __future__ import annotations

import sys
from typing import Any

from adaptive_full_finetune_distributed import AdaptiveFullFinetuneRecipeDistributed
from omegaconf import DictConfig

from torchtune_adaptive.core import SimulatedMemory
from torchtune_adaptive.recipe import launch

MOVES_IN, LEAVES = 20, 45


class Neighbour:
    """A metric logger that takes memory away at one step and gives it back at another."""

    def __init__(self, metrics: Any, memory: SimulatedMemory) -> None:
        self._metrics = metrics
        self._memory = memory

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self._metrics.log_dict(payload, step)
        assert self._memory.limit is not None, "give the device a memory_limit"
        if step == MOVES_IN:
            self._memory.limit //= 2
        elif step == LEAVES:
            self._memory.limit *= 2

    def close(self) -> None:
        self._metrics.close()


class FullFinetuneWithANeighbour(AdaptiveFullFinetuneRecipeDistributed):
    def setup(self, cfg: DictConfig) -> None:
        assert isinstance(self.run.memory, SimulatedMemory)
        if self.run.ranks.is_zero:
            self.run.metrics = Neighbour(self.run.metrics, self.run.memory)
        super().setup(cfg)


@launch.recipe
def recipe_main(cfg: DictConfig) -> None:
    recipe = FullFinetuneWithANeighbour(cfg)
    with recipe.run:
        recipe.setup(cfg)
        recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
