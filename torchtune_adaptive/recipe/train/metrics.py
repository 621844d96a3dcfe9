"""What a run reports about its steps: metrics, and a summary at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtune_adaptive.common import bytes_of, counted
from torchtune_adaptive.core import DeviceMemory, MicroBatch, Split, StepDone, Usage
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.train.attempts import Attempts
from torchtune_adaptive.recipe.train.history import Course, History, MarkKind, Point
from torchtune_adaptive.recipe.train.watched import PHASES, TRAINING, as_text, shares, watched

log = logging.getLogger(__name__)

_GIB = 1 << 30
_SAVED = 1
"""The number of the form in which a checkpoint keeps the steps of a run. Another one is not read."""


@dataclass(frozen=True)
class Logging:
    """What is logged, and how often."""

    logger: Any
    """torchtune's metric logger; on rank 0 only."""
    every_n_steps: int
    memory: bool
    """Log the accelerator's peak memory as well."""
    attempts: Attempts | None = None
    """The attempts of the run; on rank 0 only."""

    @classmethod
    def of(
        cls, asked: Asked, logger: Any, environment: Environment, attempts: Attempts | None
    ) -> Logging:
        memory = asked["log_peak_memory_stats"]
        if memory and environment.device.type == "cpu":
            log.info(
                "log_peak_memory_stats is True, but a CPU has no such statistics; not logging them."
            )
            memory = False
        return cls(logger, asked["log_every_n_steps"], memory, attempts)


@dataclass(frozen=True)
class Summary:
    """What the steps of a run came to."""

    part: Course
    """The steps since the run was begun or resumed."""
    tokens_per_second: float
    """Tokens trained on, over all ranks, in the time of the steps alone."""
    peak_bytes: int
    """Peak on the rank where it was highest."""
    capacity: int | None
    """Bytes of the device; None where memory is not measured."""
    next_time: str = ""
    """The overrides to begin with the memory that the last steps took, where memory has run out."""
    begun_at: int = 0
    """The steps that were done when the run was resumed."""
    run: Course | None = None
    """All steps of a run that was resumed; None where the checkpoint does not say."""


@dataclass(frozen=True)
class Trained:
    """What training has come to, as far as the record of a run shows it."""

    split: Split
    """The batch, as it is trained with now."""
    steps: int
    """Steps since the run began, those before it was resumed included."""
    retried_steps: int
    """Those before the run was resumed included, too."""
    may_change: bool
    """Whether the batch can change in training."""
    history: History | None
    """The steps as they are plotted; None if there were none since the run was begun or resumed."""
    summary: Summary | None
    """Summary of a training that is done."""
    sample: str = "row"

    def lines(self) -> list[str]:
        """The summary, for the log; nothing where there is none."""
        split, summary = self.split, self.summary
        if summary is None:
            return []
        part, run = summary.part, summary.run
        speed = f"{summary.tokens_per_second:,.0f} tokens/s"
        if split.ranks > 1:
            speed += f" ({summary.tokens_per_second / split.ranks:,.0f} per rank)"
        facts = [speed]
        if summary.capacity is not None:
            facts.append(f"peak memory {bytes_of(summary.peak_bytes, summary.capacity)}")
        facts.append(f"{counted(self.retried_steps, 'step')} retried")
        lines = [
            f"Trained {part.text()}.",
            *([f"The whole run: {run.text()}."] if run and summary.begun_at else []),
            *([f"Time by phase: {shares(part.spent)}."] if part.spent else []),
            f"{', '.join(facts)}.",
            f"Last global batch: {counted(split.global_batch, self.sample)} ({split.text()}).",
        ]
        if next_time := summary.next_time:
            lines.append(f"Memory ran out, and steps take less since. Next time: {next_time}")
        return lines


class Metrics:
    """Records the steps of a run.

    Args:
        watch_memory: True to log how much of it was not used.
        counts_tokens: True if a step's weight is its tokens.
    """

    def __init__(
        self,
        logging: Logging,
        environment: Environment,
        memory: DeviceMemory,
        watch_memory: bool,
        counts_tokens: bool = True,
    ) -> None:
        self._logging = logging
        self._environment = environment
        self._memory = memory
        self._counts_tokens = counts_tokens
        self._watch_memory = watch_memory and memory.measured
        self.history = History("token" if counts_tokens else "sample")
        self.last_values: dict[str, float] = {}
        """What is watched of the last step."""
        self._course = Course()
        self._before: Course | None = Course()
        self._begun_at = 0
        self.tokens = 0
        self.seconds = 0.0
        """Seconds of the steps, without what is between them."""
        self.tokens_per_second = 0.0
        """Speed of the last step, over all ranks."""
        self._used = Usage(0, 0, 0)  # since the last record
        self._capacity = 0
        self._started = self._step_started = time.perf_counter()

    def begin(self) -> None:
        """Start the clock of the run, and measure its memory from now on."""
        self._memory.watch()
        self._memory.peaks_of_steps = True
        self.measure_limit()
        self._started = time.perf_counter()
        self.start_step()

    def measure_limit(self) -> None:
        """Ask how much memory there is: not in each step, as a driver takes longer to answer than an
        allocator."""
        if self._memory.measured:
            self._capacity = self._memory.capacity()

    def resume(self, step: int, samples: int, saved: dict[str, Any] | None) -> None:
        """Continue after a step. What came before it is unknown where the checkpoint does not say."""
        self._begun_at, self._before = step, None
        if saved is not None and saved.get("form") == _SAVED:
            self._before = Course(**saved["course"])
            self.history.load_state_dict(saved["history"])
        attempts = self._logging.attempts
        again = f"; {attempts.done_again} again" if attempts and attempts.done_again else ""
        self.history.mark(MarkKind.RESUMED, samples, f"resumed at step {step:,}{again}")

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the whole run; None where that is not known."""
        if (run := self.run) is None:
            return None
        return {"form": _SAVED, "course": vars(run), "history": self.history.state_dict()}

    @property
    def part(self) -> Course:
        """The steps since the run was begun or resumed."""
        return replace(self._course, seconds=time.perf_counter() - self._started)

    @property
    def run(self) -> Course | None:
        """All steps of the run; None where those before it was resumed are not known."""
        return self._before and self._before + self.part

    @property
    def has_steps(self) -> bool:
        return self._course.steps > 0

    def start_step(self) -> None:
        """Start the clock of the next step."""
        self._step_started = time.perf_counter()

    def record(
        self,
        number: int,
        samples: int,
        split: Split,
        outcome: StepDone,
        lr: float,
        micro_batches: Sequence[MicroBatch],
        more: dict[str, float],
        spent: Mapping[str, float] | None = None,
    ) -> None:
        """Record a step, as it was meant to be (``split``) and as it was on this rank (``micro_batches``).

        ``lr`` is the learning rate of the next step, and ``samples`` are those that the run has used. Where
        rows are made in phases, ``spent`` has the seconds that this took before the step, by phase.
        """
        seconds = time.perf_counter() - self._step_started
        self.seconds += seconds
        tokens = self._tokens(outcome, micro_batches, split.ranks)
        self.tokens_per_second = tokens / seconds
        self.tokens += int(tokens)
        micro_batch = max(each.rows for each in micro_batches)
        # As it was read when the ranks told each other about the step.
        used = self._memory.last_step
        self._used |= used
        # It may have been asked for before another process gave some back.
        self._capacity = max(self._capacity, used.peak_bytes)
        phases: dict[str, float] = {}
        if spent is not None:
            more = {**more, "training_seconds": seconds - sum(spent.values())}
            spent = {**spent, TRAINING: more["training_seconds"]}
            logged_as = {**PHASES, TRAINING: "training_seconds"}
            phases = {phase: more[key] for phase, key in logged_as.items() if key in more}
        self.last_values = watched(outcome.loss, {**outcome.metrics, **more})
        self._course.add(self.last_values, spent or {})
        measured = self._memory.measured
        self.history.add(
            Point(
                number,
                samples,
                split.global_batch,
                micro_batch,
                lr,
                values=self.last_values,
                seconds=phases,
                peak_bytes=used.peak_bytes if measured else None,
                limit_bytes=self._capacity if measured else None,
            )
        )
        attempts = self._logging.attempts
        if attempts is not None:
            attempts.reached(number)
        if self._environment.ranks.is_zero and number % self._logging.every_n_steps == 0:
            record: dict[str, Any] = {
                "loss": outcome.loss,
                "lr": lr,
                "tokens_per_second_per_gpu": self.tokens_per_second / self._environment.ranks.size,
                "batch_size": split.micro_batch,
                "micro_batch_size": micro_batch,
                "gradient_accumulation_steps": len(micro_batches),
                "global_batch_size": split.global_batch,
                "samples_seen": samples,
                **outcome.metrics,
                **more,
                **self._memory_used(),
            }
            if outcome.gradient_norm is not None:
                record["grad_norm"] = outcome.gradient_norm
            if attempts is not None and attempts.is_done_again(number):
                record["done_again"] = 1
            self._logging.logger.log_dict(record, step=number)
        self.start_step()

    def said(self) -> str:
        """The last step, for a line or a bar that shows how far training is."""
        return f"{as_text(self.last_values)}, {self.tokens_per_second:,.0f} tokens/s"

    def _tokens(self, outcome: StepDone, micro_batches: Sequence[MicroBatch], ranks: int) -> float:
        """Tokens of a step, on so many ranks with rows of their own, as torchtune's recipes count them: those
        predicted or, where the loss is no mean over tokens, all of them with padding."""
        if self._counts_tokens:
            return outcome.weight
        return sum(each.tokens for each in micro_batches) * ranks

    def record_validation(self, number: int, found: dict[str, float]) -> None:
        """Record what validation after a step found; its time is not the next step's."""
        if self._environment.ranks.is_zero:
            self._logging.logger.log_dict(found, step=number)
        self.start_step()

    def _memory_used(self) -> dict[str, float]:
        """This rank's memory since the last record."""
        used, self._used = self._used, Usage(0, 0, 0)
        found: dict[str, float] = {}
        if self._watch_memory:
            found["memory_unused_share"] = 1 - used.peak_bytes / self._capacity
        if self._logging.memory:  # as torchtune names it
            found["peak_memory_active"] = used.peak_active_bytes / _GIB
            found["peak_memory_alloc"] = used.peak_allocated_bytes / _GIB
            found["peak_memory_reserved"] = used.peak_bytes / _GIB
        return found

    def summary(self, next_time: str = "") -> Summary | None:
        """What the steps came to, the same on all ranks; None if there were none."""
        if not self.has_steps:
            return None
        peak, capacity = 0, None
        if self._memory.measured:
            peak = max(self._environment.ranks.gather(self._memory.usage().peak_bytes))
            capacity = self._memory.capacity()
        return Summary(
            part=self.part,
            tokens_per_second=self.tokens / self.seconds,
            peak_bytes=peak,
            capacity=capacity,
            next_time=next_time,
            begun_at=self._begun_at,
            run=self.run,
        )
