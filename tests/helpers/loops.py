"""The training loop of the recipes on a tiny model, run again and again from the same start."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtune.data import padded_collate_sft
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.decoder import VOCABULARY, adamw, local_values
from tests.helpers.faults import FailingMemory, survivable
from tests.helpers.models import switches_of, tiny_llama, train_step
from tests.helpers.ranks import Alone
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import Watchdog
from torchtune_adaptive.core.rows.loader import EpochRows, Loader
from torchtune_adaptive.core.rows.micro_batches import ByRows
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.sizes.split import Epochs, Split
from torchtune_adaptive.core.step.knobs import Switches
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.retry import StepRunner
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.recipe.checkpoints.folder import last_saved
from torchtune_adaptive.recipe.checkpoints.progress import Progress
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.optimizer import Optimizers
from torchtune_adaptive.recipe.train.adaptation import Adaptation
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.growth import Growth
from torchtune_adaptive.recipe.train.history import History
from torchtune_adaptive.recipe.train.learning_rate import LearningRate
from torchtune_adaptive.recipe.train.loop import TrainingLoop, how_to_go_on
from torchtune_adaptive.recipe.train.metrics import Logging, Metrics
from torchtune_adaptive.recipe.train.stop import StopSignals


class Sizes(Recovery):
    """Not a recovery: the sizes of a run that is known, step by step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes[0], (), None)
        self._later = iter(sizes[1:])

    def grow_back(self) -> bool:
        self.size = next(self._later, self.size)
        return False


@dataclass
class Trained:
    """What a run has done."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """The size of the micro-batch at the end of each step."""
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    redone: int = 0
    taken: list[int] = field(default_factory=list)
    """This rank's samples, in the order in which steps used them up."""
    history: History = field(default_factory=History)


class Training:
    """A model that can be trained, with faults or without, as often as one likes."""

    def __init__(
        self,
        *,
        rows: int,
        micro_batch: int,
        steps: int,
        clip_grad_norm: float | None = 1.0,
        switches: bool = False,
        **kind_of_model: Any,
    ) -> None:
        self.ranks = Ranks(timeout=200)
        self.model = tiny_llama(**kind_of_model)
        self.optimizer = adamw(self.model)
        self.memory = FailingMemory()
        self.split = Split(micro_batch, rows // micro_batch, self.ranks.size)
        self.steps = steps
        objective = NextTokenPrediction(CEWithChunkedOutputLoss(num_output_chunks=2))
        self.step = train_step(
            self.model,
            [self.optimizer],
            objective=objective,
            memory=self.memory,
            ranks=self.ranks,
            clip_grad_norm=clip_grad_norm,
            switches=switches_of(self.model, objective) if switches else Switches(),
        )
        self.switched = self.step.options.switches.choice
        self.dataset = _rows_of_many_lengths(rows * steps * self.ranks.size)
        self.snapshot = Snapshot(self.model, [self.optimizer], torch.device("cpu"))
        gc.freeze()  # or each collection after a failure would walk through all that is built

    def run(
        self,
        recovery: Recovery | None,
        before_step: Callable[[int], None] = lambda step: None,
        folder: Path | None = None,
        save: Callable[[str, bool], None] = lambda name, last: None,
        watchdog: Watchdog | None = None,
        wait_for_memory: float = 0.0,
    ) -> Trained:
        """Train from the start. ``before_step`` may arm a fault."""
        self.snapshot.close()
        self.step.switch(self.switched)
        trained = Trained()
        optimizers = Optimizers((self.optimizer,), self.optimizer)
        order = SampleOrder(len(self.dataset), self.ranks.size, shuffle=True)
        epochs = Epochs.of(order.per_epoch, self.split, None)

        def falling(position: int) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 - step / self.steps
            )

        events = Events(folder)
        micro_batches = ByRows("none")
        growth = Growth(
            self.split, self.split.micro_batch, None, False, order.per_epoch, self.ranks
        )
        rate = LearningRate(optimizers, falling, 0, "none", False, self.split.global_batch)
        environment = Environment(torch.device("cpu"), torch.float32, Alone(self.ranks.size))
        loop = TrainingLoop(
            runner=StepRunner(
                self.step,
                advice=lambda: how_to_go_on(last_saved(folder or Path("nowhere"))),
                wait_for_memory=wait_for_memory,
            ),
            recovery=lambda split: recovery,
            watchdog=watchdog or Watchdog(self.ranks, 20.0, on_duty=False),
            step_timeout=20.0,
            adaptation=Adaptation(growth, rate, None, epochs, events),
            loader=_Watched(
                trained,
                self.dataset,  # type: ignore[arg-type]
                padded_collate_sft,
                order,
                self.ranks.rank,
                self.ranks.size,
                micro_batches,
            ),
            progress=Progress(0, 1, None),
            metrics=Metrics(
                Logging(_Logger(trained), every_n_steps=1, memory=False),
                environment,
                self.memory,
                watch_memory=False,
            ),
            profiling=_BeforeStep(before_step),  # type: ignore[arg-type]
            save=save,
            last_checkpoint=lambda: last_saved(folder or Path("nowhere")),
            save_every_n_steps=None,
            stop=StopSignals(60.0),
        )
        loop.run()
        trained.parameters = local_values(self.model)
        trained.history = loop.metrics.history
        return trained

    def survivable(self) -> int:
        """How many operations of a step at the largest size can run out of memory and be survived."""
        largest = Sizes([self.split.micro_batch])
        return survivable(self.memory, self.step, lambda: self.run(largest))[0]


class _Watched(Loader):
    def __init__(self, trained: Trained, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trained = trained

    def epoch(self, epoch: int, used: int = 0) -> EpochRows:
        return _WatchedRows(self._trained, self, epoch, used)


class _WatchedRows(EpochRows):
    def __init__(self, trained: Trained, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trained = trained

    def advance(self, samples: int) -> None:
        super().advance(samples)
        for micro_batch in self.loaded:
            self._trained.taken += micro_batch.sample_ids


class _Logger:
    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self._trained.losses.append(payload["loss"])
        self._trained.rates.append(payload["lr"])
        self._trained.sizes.append(payload["micro_batch_size"])
        self._trained.redone = payload.get("retried_steps", 0)


class _BeforeStep:
    def __init__(self, before_step: Callable[[int], None]) -> None:
        self._before_step = before_step

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def before_step(self, epoch: int, number: int) -> None:
        self._before_step(number)

    def after_step(self, epoch: int, number: int) -> None: ...


def _rows_of_many_lengths(rows: int) -> list[dict[str, list[int]]]:
    numbers = random.Random(0)

    def row() -> dict[str, list[int]]:
        tokens = [numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(4, 24))]
        return {"tokens": tokens, "labels": [-100, -100, *tokens[2:]]}

    return [row() for _ in range(rows)]
