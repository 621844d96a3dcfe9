"""Instruments of a run: torchtune's profiler, and its history of memory."""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config, training

from torchtune_adaptive.core import DeviceMemory
from torchtune_adaptive.recipe.setup.environment import Environment

log = logging.getLogger(__name__)


class Profiling:
    """torchtune's profiler, and the memory history that it asks for in the first epoch, on rank 0.

    Where the config has no profiler, or one that is not enabled, it does nothing.
    """

    def __init__(self, cfg: DictConfig, environment: Environment, memory: DeviceMemory) -> None:
        self._memory = memory
        self._first = self._last = -1
        component = "torchtune.training.setup_torch_profiler"
        node = cfg.get(training.PROFILER_KEY, None) or OmegaConf.create({"enabled": False})
        if node.setdefault("_component_", component) != component:
            raise ValueError(
                f"profiler._component_ is {node._component_}; only {component} is supported"
            )
        if not node.get("enabled", False):
            self._profiler: Any = training.DummyProfiler()  # torchtune would log that it makes it
            return
        self._profiler, settings = config.instantiate(node)
        log.info(f"Profiler: {settings}")
        if settings.get("profile_memory", False) and environment.ranks.is_zero:
            self._first = settings.wait_steps + settings.warmup_steps
            self._last = self._first + settings.active_steps

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def before_step(self, epoch: int, number: int) -> None:
        if epoch == 0 and number == self._first:
            self._memory.record_history(True)

    def after_step(self, epoch: int, number: int) -> None:
        if epoch == 0 and number == self._last:
            self._memory.record_history(False)
        self._profiler.step()
