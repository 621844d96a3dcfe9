"""Instruments of a run: torchtune's profiler, and the history that is plotted at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config, training

from torchtune_adaptive.device.memory import DeviceMemory
from torchtune_adaptive.plots import new_figure
from torchtune_adaptive.setup.environment import Environment

log = logging.getLogger(__name__)
PLOT_NAME = "training.png"
_POINTS = 1000  # of a plot; more would not be seen


class Profiling:
    """torchtune's profiler, and the memory history that it asks for in the first epoch, on rank 0."""

    def __init__(
        self, profiler: Any, settings: DictConfig, environment: Environment, memory: DeviceMemory
    ) -> None:
        self._profiler = profiler
        self._memory = memory
        self._first = self._last = -1
        if settings.enabled and settings.get("profile_memory", False) and environment.is_rank_zero:
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


class History:
    """Batch, learning rate and loss over samples, thinned out as it grows."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, int, float, float]] = []
        self._every = 1
        self._seen = 0

    def add(
        self, samples: int, global_batch: int, micro_batch: int, lr: float, loss: float
    ) -> None:
        if self._seen % self._every == 0:
            self._points.append((samples, global_batch, micro_batch, lr, loss))
        self._seen += 1
        if len(self._points) > 2 * _POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def plot(self, folder: Path) -> Path | None:
        """Draw it, where matplotlib is installed and there is something to see."""
        figure = new_figure(7, 7)
        if figure is None or len(self._points) < 2:
            return None
        samples, global_batch, micro_batch, lr, loss = zip(*self._points, strict=True)
        batches, rates, losses = figure.subplots(3, 1, sharex=True)
        batches.step(samples, global_batch, where="pre", label="global batch")
        batches.step(samples, micro_batch, where="pre", label="micro-batch")
        batches.set(ylabel="rows", ylim=(0, None))
        batches.legend()
        rates.plot(samples, lr)
        rates.set(ylabel="learning rate")
        losses.plot(samples, loss)
        losses.set(ylabel="loss", xlabel="samples")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PLOT_NAME
        figure.savefig(path, dpi=120)
        return path


def build_profiler(cfg: DictConfig) -> tuple[Any, DictConfig]:
    """torchtune's profiler and its settings; without settings, one that does nothing."""
    component = "torchtune.training.setup_torch_profiler"
    node = cfg.get(training.PROFILER_KEY, None) or OmegaConf.create({"enabled": False})
    if node.setdefault("_component_", component) != component:
        raise ValueError(
            f"profiler._component_ is {node._component_}; only {component} is supported"
        )
    built, settings = config.instantiate(node)
    log.info(f" Profiler config after instantiation: {settings}")
    return built, settings
