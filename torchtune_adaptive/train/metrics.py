"""What a run reports about itself: metrics of its steps, a summary and a plot at the end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import training

from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.device.memory import DeviceMemory
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.step.train_step import StepOutcome
from torchtune_adaptive.text import not_essential
from torchtune_adaptive.train.instruments import History

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logging:
    """What is logged, and how often."""

    logger: Any
    """torchtune's metric logger; on rank 0 only."""
    every_n_steps: int
    memory: bool
    """Log the accelerator's peak memory as well."""

    @classmethod
    def from_config(cls, cfg: DictConfig, logger: Any, environment: Environment) -> Logging:
        memory = cfg.get("log_peak_memory_stats", False)
        if memory and environment.device.type == "cpu":
            log.info(
                "log_peak_memory_stats is True, but a CPU has no such statistics; not logging them."
            )
            memory = False
        return cls(logger, cfg.get("log_every_n_steps", 1), memory)


class Metrics:
    """Records the steps of a run.

    Args:
        logging: what to log, and how often.
        environment: where the rank runs.
        memory: that device's memory.
        watch_memory: log how much of it was not used.
    """

    def __init__(
        self,
        logging: Logging,
        environment: Environment,
        memory: DeviceMemory,
        watch_memory: bool,
    ) -> None:
        self._logging = logging
        self._environment = environment
        self._memory = memory
        self._watch_memory = watch_memory and memory.measured
        self.history = History()
        self.losses: list[float] = []
        self.start_step()

    def start_step(self) -> None:
        """Start the clock of the next step."""
        self._step_started = time.perf_counter()

    def record(
        self,
        number: int,
        samples: int,
        split: Split,
        outcome: StepOutcome,
        lr: float,
        micro_batch_sizes: list[int],
        more: dict[str, float],
    ) -> None:
        """Record a step.

        Args:
            number: of the step, counted from 1.
            samples: that the run has used.
            split: how the step was meant to be put together.
            outcome: of the step.
            lr: the learning rate of the next step.
            micro_batch_sizes: rows in each micro-batch of the step.
            more: to log as well.
        """
        now = time.perf_counter()
        self.losses.append(outcome.loss)
        micro_batch = max(micro_batch_sizes)
        self.history.add(samples, split.global_batch, micro_batch, lr, outcome.loss)
        if self._environment.is_rank_zero and number % self._logging.every_n_steps == 0:
            seconds = now - self._step_started
            record: dict[str, Any] = {
                "loss": outcome.loss,
                "lr": lr,
                "tokens_per_second_per_gpu": outcome.tokens / (seconds * self._environment.ranks),
                "batch_size": split.micro_batch,
                "micro_batch_size": micro_batch,
                "gradient_accumulation_steps": len(micro_batch_sizes),
                "global_batch_size": split.global_batch,
                "samples_seen": samples,
                **more,
                **self._memory_used(),
            }
            if outcome.gradient_norm is not None:
                record["grad_norm"] = outcome.gradient_norm
            self._logging.logger.log_dict(record, step=number)
        self.start_step()

    def _memory_used(self) -> dict[str, float]:
        """This rank's memory since the last record."""
        found: dict[str, float] = {}
        if self._watch_memory:
            found["memory_unused_share"] = (
                1 - self._memory.usage().peak_bytes / self._memory.capacity()
            )
        if self._logging.memory:  # resets the peaks, so it comes after they are read
            found.update(training.get_memory_stats(device=self._environment.device))
        if self._watch_memory:
            self._memory.watch()
        return found

    def summary(self, split: Split) -> str | None:
        """One line about all steps; None if there were none."""
        if not self.losses:
            return None
        first, last = (sum(some) / len(some) for some in (self.losses[:5], self.losses[-5:]))
        return (
            f"Trained {len(self.losses)} steps; last global batch {split.global_batch} rows; "
            f"loss {first:.2f} -> {last:.2f} (mean of the first and last 5 steps)."
        )

    def plot(self, folder: Path) -> None:
        """Draw batch, learning rate and loss, where matplotlib is installed."""
        if not self._environment.is_rank_zero:
            return
        with not_essential("The plot of the run"):
            if path := self.history.plot(folder):
                log.info(f"Batch, learning rate and loss over samples: {path}.")
