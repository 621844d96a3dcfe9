"""Rollouts: prompts become rows to train on, which the policy generates and models and functions score.

For the training loop they are what a loader is for a dataset: the rows of an epoch, a step at a time. A
rollout is made before its first step, in phases, each with micro-batches of its own size. A run stops, saves
and resumes between two rollouts only. So rows are never saved: what they draw is a function of the seed, the
rollout and the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.common import OutOfMemoryElsewhere, counted
from torchtune_adaptive.core import (
    Batch,
    DeviceMemory,
    MicroBatch,
    MicroBatches,
    Phase,
    SampleOrder,
    TrainStep,
    Watchdog,
    Weightless,
)
from torchtune_adaptive.recipe.rollout.judging import Judge, over
from torchtune_adaptive.recipe.rollout.phases import Phases, RolloutSizes
from torchtune_adaptive.recipe.rollout.rows import Row, collate, draws, known, shuffled
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.train.events import Events, changes_in_words
from torchtune_adaptive.recipe.train.watched import PHASES


@dataclass
class Rollouts:
    """The rollouts of a run, on this rank.

    Args:
        dataset: prompts, with whatever reward functions want to know of them.
        limit: the number of rollouts after which training ends; None for that of the epochs.
        micro_batches: how rows are divided for training.
        scoring: how they are divided for scoring.
        step_timeout: seconds that scoring, or a reward function, may stand still.
        stop_requested: whether this rank has been asked to stop.
    """

    dataset: Any
    order: SampleOrder
    limit: int | None
    seed: int
    phases: Phases
    judge: Judge
    micro_batches: MicroBatches
    scoring: MicroBatches
    watchdog: Watchdog
    step_timeout: float
    stop_requested: Callable[[], bool]
    events: Events

    metrics: dict[str, float] = field(init=False, default_factory=dict)
    """What is logged of the last rollout."""
    changes: list[str] = field(init=False, default_factory=list)
    """What changed while the last rollout was made, in words."""
    found: dict[str, int] = field(init=False)
    """The sizes that phases begin with."""
    _adjusted: list[tuple[str, str, int, int]] = field(init=False, default_factory=list)
    _lengths: list[list[int]] = field(init=False, default_factory=list)
    """The lengths of each rank's rows."""
    _samples: tuple[int, Any] | None = field(init=False, default=None)
    """An epoch, and the samples of it: this rank's, or all where ranks have unequal shares of a rollout."""

    def __post_init__(self) -> None:
        self.found = {phase.name: phase.size for phase in self._both}
        for phase in self._both:
            phase.adjusted = partial(self._note, phase.name)

    @property
    def sizes(self) -> RolloutSizes:
        return self.phases.sizes

    @property
    def _step(self) -> TrainStep:
        return self.phases.generation.step

    @property
    def _both(self) -> tuple[Phase[Any, Any], Phase[Any, Any]]:
        return self.phases.generation, self.phases.scoring

    @property
    def per_epoch(self) -> int:
        """Rollouts in an epoch."""
        return self.order.per_epoch // self.sizes.all_prompts

    @property
    def trained_rows(self) -> int:
        """The rows that a rollout is trained on, each as often as it is, over all ranks."""
        return self.sizes.all_rows * self.sizes.epochs

    def epoch(self, epoch: int, used: int) -> RolloutRows:
        """The rows of an epoch, of which the ranks have trained on the first ``used``.

        If that is in the middle of a rollout, as with another ``ppo_epochs``, it begins again.
        """
        return RolloutRows(self, epoch, used - used % self.trained_rows)

    # --- one rollout ------------------------------------------------------------------------------

    def make(self, epoch: int, number: int) -> list[Row] | None:
        """The rows of a rollout on this rank; None if a rank has been asked to stop meanwhile."""
        self._number, started = number + 1, time.perf_counter()
        rows = self._prompts(epoch, number)
        # In phases every rank has as many rows: what a rank does more than it needs, others do meanwhile.
        fillers = [replace(row) for row in rows[: self.sizes.rows - len(rows)]]
        with_fillers, memory = rows + fillers, self._step.memory
        try:
            # Ranks generate on their own, some for longer than others.
            self.watchdog.enter(f"rollout {number + 1}, generating", patience=None)
            memory.release()
            self._generate(with_fillers)
            generated = time.perf_counter()
            self.watchdog.enter(f"rollout {number + 1}, scoring", self.step_timeout)
            memory.release()
            self._score(with_fillers)
            scored = time.perf_counter()
            memory.release()
        except Exception as error:
            if not DeviceMemory.is_out_of_memory(error):
                raise
            raise self._out_of_memory(error) from error
        rewarded = self._reward(rows)
        stop = self._share(rows, rewarded)
        self.metrics |= {
            "generation_seconds": generated - started,
            "scoring_seconds": scored - generated,
            "reward_seconds": time.perf_counter() - scored,
        }
        return None if stop else rows

    def _prompts(self, epoch: int, number: int) -> list[Row]:
        """This rank's rows of a rollout, as far as they are known before it."""
        sizes, ranks = self.sizes, self._step.ranks
        begin = (number - epoch * self.per_epoch) * sizes.all_prompts
        end = begin + sizes.all_prompts
        equal = sizes.all_prompts % ranks.size == 0
        if self._samples is None or self._samples[0] != epoch:
            mine = (ranks.rank, ranks.size) if equal else (0, 1)
            self._samples = epoch, self.order.share(epoch, *mine)
        if equal:
            samples = self._samples[1][begin // ranks.size : end // ranks.size].tolist()
        else:
            samples = self._samples[1][begin:end].tolist()[ranks.rank :: ranks.size]
        rows = []
        for place, prompt in zip(self._places(ranks.rank), samples, strict=True):
            sample = self.dataset[prompt]
            for index in range(place * sizes.samples, (place + 1) * sizes.samples):
                numbers = draws(self.seed, number, index, sizes.max_new)
                rows.append(Row(index, sample["tokens"], numbers, data=sample.get("answer")))
        return rows

    def _places(self, rank: int) -> range:
        """The places in a rollout of the prompts that a rank has."""
        return range(rank, self.sizes.all_prompts, self._step.ranks.size)

    def _generate(self, rows: list[Row]) -> None:
        # The longest of all ranks, so that a row's numbers do not depend on the rank that it is on.
        self.phases.generator.width = max(
            self._step.ranks.gather(max(len(row.prompt) for row in rows))
        )
        for row, response in zip(rows, self.phases.generation.of_rows(rows), strict=True):
            row.response, row.stopped = response.tokens, response.stopped

    def _score(self, rows: list[Row]) -> None:
        ranks = self._step.ranks
        lengths = ranks.gather([row.length for row in rows])

        def divide(done: int, size: int) -> list[Sequence[int]]:
            return self.scoring.divide(lengths, size, ranks.rank, done)

        for row, found in zip(rows, self.phases.scoring.of_rows(rows, divide), strict=True):
            for name, numbers in found.items():
                setattr(row, name, numbers)
        samples = self.sizes.samples
        self._lengths = [
            of_rank[: len(self._places(rank)) * samples] for rank, of_rank in enumerate(lengths)
        ]

    def _reward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Set rewards and advantages; gives what is logged of each row."""
        return {
            **self.judge(rows),
            "response_lengths": torch.tensor([float(len(known(row.response))) for row in rows]),
            "num_stop_tokens": torch.tensor([float(row.stopped) for row in rows]),
        }

    def _share(self, rows: list[Row], found: dict[str, torch.Tensor]) -> bool:
        """Tell the other ranks what this rollout came to; whether a rank has been asked to stop."""
        self.watchdog.enter(f"rollout {self._number}, after the rewards", self.step_timeout)
        sums = {name: float(values.double().sum()) for name, values in found.items()}
        seen = self._step.ranks.gather((sums, self._adjusted, self.stop_requested()))
        total = {name: sum(each[0][name] for each in seen) for name in sums}
        self.metrics = {
            name: value if name == "num_stop_tokens" else value / self.sizes.all_rows
            for name, value in total.items()
        }
        self.changes = []
        for rank, (_, adjusted, _) in enumerate(seen):
            for phase, reason, before, after in adjusted:
                self._record(rank, phase, reason, before, after)
        self._adjusted = []
        return any(stop for *_, stop in seen)

    def mini_batch(self, rows: list[Row], number: int, used: int) -> MiniBatch:
        """This rank's rows of the next step, of a rollout on which all have trained on ``used`` rows."""
        ranks, lengths = self._step.ranks, self._lengths
        if self.sizes.mini_batch is not None:
            orders = self._in_mini_batch(number, used)
            rows = [rows[at] for at in orders[ranks.rank]]
            lengths = [[of[at] for at in order] for of, order in zip(lengths, orders, strict=True)]
        self._step.objective.begin(rows, over(ranks))  # type: ignore[attr-defined]
        return MiniBatch(rows, lengths)

    def _in_mini_batch(self, number: int, used: int) -> list[list[int]]:
        """The rows of the next step that each rank has, by their positions there. They are those of the ranks
        that the run began with, each of which takes its own in an order of its own."""
        sizes, ranks = self.sizes, self._step.ranks.size
        of_rank = sizes.prompts * sizes.samples
        epoch, first = divmod(used // sizes.began, of_rank)
        positions: list[list[int]] = [[] for _ in range(ranks)]
        for rank in range(sizes.began):
            order = shuffled(self.seed, number, epoch, rank, of_rank)
            for at in order[first:][: sizes.mini_batch]:
                prompt, sample = divmod(at, sizes.samples)
                position, owner = divmod(prompt * sizes.began + rank, ranks)
                positions[owner].append(position * sizes.samples + sample)
        return positions

    def parts(self, mini_batch: MiniBatch, size: int) -> Iterator[list[Row]]:
        """The rows of each micro-batch of a step; none, where only other ranks have any."""
        rank = self._step.ranks.rank
        for part in self.micro_batches.divide(mini_batch.lengths, size, rank):
            yield [mini_batch.rows[at] for at in part]

    def _note(self, phase: str, reason: str, before: int, after: int) -> None:
        self._adjusted.append((phase, reason, before, after))

    def _record(self, rank: int, phase: str, reason: str, before: int, after: int) -> None:
        is_scoring = phase == self.phases.scoring.name
        if rank > 0 and is_scoring:
            return  # all ranks do the same
        if before == after:
            self.events.noticed(self._number, f"{phase}: {reason}")
            return
        what = f"{phase}_token_budget" if is_scoring and self.scoring.unit else f"{phase}_batch"
        changed = {what: (before, after)}
        self.events.changed(self._number, f"rank {rank}: {reason}", **changed)
        where = f"rollout {self._number:,}" + ("" if is_scoring else f", rank {rank}")
        self.changes.append(f"{where}: {changes_in_words(changed)}")

    def _out_of_memory(self, error: Exception) -> OutOfMemoryElsewhere:
        generation, scoring = self.phases.generation.size, self.phases.scoring.size
        key = "scoring_token_budget" if self.scoring.unit else "scoring_batch_size"
        return OutOfMemoryElsewhere(
            f"Out of memory on rank {self._step.ranks.rank} in rollout {self._number}, with generation in "
            f"micro-batches of {counted(generation, 'row')}, scoring in micro-batches of "
            f"{counted(scoring, self.scoring.unit or 'row')}. Set a smaller {BLOCK}.generation_batch_size or "
            f"{BLOCK}.{key}. ({' '.join(str(error).split())})"
        )

    # --- checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sizes of phases, as they were found and as they are now on each rank."""
        now = {phase.name: phase.state_dict() for phase in self._both}
        return {
            "found": self.found,
            "scoring_budget": self.scoring.state(),
            "phases": self._step.ranks.gather(now),
            "rows": self.sizes.all_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called; on other ranks with the sizes that were found."""
        of_ranks = state["phases"]
        if len(of_ranks) == self._step.ranks.size:
            for phase in self._both:
                phase.load_state_dict(of_ranks[self._step.ranks.rank][phase.name])


class MiniBatch(NamedTuple):
    """The rows of a step."""

    rows: list[Row]
    """This rank's."""
    lengths: list[list[int]]
    """Those of each rank's rows."""


class RolloutRows:
    """One rank's rows of an epoch, a step at a time; a step is some or all rows of a rollout."""

    def __init__(self, rollouts: Rollouts, epoch: int, used: int) -> None:
        self._rollouts = rollouts
        self._epoch = epoch
        self._rows: list[Row] = []
        self._of_step = MiniBatch([], [])
        self.used = used
        """Rows trained on so far, over all ranks."""
        self.loaded: list[MicroBatch] = []
        """The micro-batches of the last step that have been made so far."""
        self.spent: dict[str, float] = {}
        """Seconds by phase that making the rollout took, before its first step; nothing before others."""
        self.changes: list[str] = []
        """What changed while it was made, in words; likewise."""

    @property
    def can_be_left(self) -> bool:
        """Whether this is between two rollouts."""
        return self.used % self._rollouts.trained_rows == 0

    @property
    def are_over(self) -> bool:
        """Whether the last rollout has been trained on, whatever is left of the epochs."""
        limit = self._rollouts.limit
        return self.can_be_left and limit is not None and self._number >= limit

    @property
    def _number(self) -> int:
        """The number of the rollout in the run, counted from 0."""
        return self._epoch * self._rollouts.per_epoch + self.used // self._rollouts.trained_rows

    def begin_step(self) -> bool:
        """Make the next rollout, if it is time for it; False if a rank has been asked to stop meanwhile."""
        rollouts, number = self._rollouts, self._number
        self.spent, self.changes = {}, []
        if self.can_be_left:
            rows = rollouts.make(self._epoch, number)
            if rows is None:
                return False
            self._rows, self.changes = rows, rollouts.changes
            self.spent = {phase: rollouts.metrics[key] for phase, key in PHASES.items()}
        used = self.used % rollouts.trained_rows
        self._of_step = rollouts.mini_batch(self._rows, number, used)
        return True

    def step(self, samples: int, size: int) -> Iterator[Batch]:
        """This rank's rows of the next step, in micro-batches of a size."""
        in_all = sum(map(len, self._of_step.lengths))
        assert samples == in_all, "a step has all rows of a mini-batch"
        self.loaded = []
        for some in self._rollouts.parts(self._of_step, size):
            padding = self._rollouts.phases.generator.padding_id
            batch = collate(some or self._rows[:1], padding)
            ids = tuple(row.index for row in some)
            self.loaded.append(MicroBatch(ids, batch["tokens"].numel()))
            yield batch if some else Weightless(batch)

    def advance(self, samples: int) -> None:
        """Go on to the next step."""
        self.used += samples

    def metrics(self) -> dict[str, float]:
        """What is logged of the rollout and the last step."""
        tokens = sum(row.length for row in self._of_step.rows)
        return {
            **self._rollouts.metrics,
            "batch_size": self._rollouts.sizes.prompts,
            "padding_share": 1 - tokens / sum(each.tokens for each in self.loaded),
        }
