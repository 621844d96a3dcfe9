"""How far a run is, and what a checkpoint keeps of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtune import training

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.core import SampleOrder
from torchtune_adaptive.recipe.checkpoints.config_changes import (
    BEGIN_ANEW,
    SAMPLE_ORDER,
    FlatConfig,
    change,
    resumed,
)
from torchtune_adaptive.recipe.checkpoints.training_state import TrainingState
from torchtune_adaptive.recipe.private import training_progress

TRAINING_KEY = "adaptive_training"
CONFIG_KEY = "adaptive_config"
"""The key in the recipe state for the config and the data that it was saved with."""
HISTORY_KEY = "adaptive_history"
"""The key in the recipe state for the steps of the run, as a summary and a plot show them."""


@dataclass
class Progress:
    """How far a run is, and what a checkpoint keeps of that."""

    seed: int
    total_epochs: int
    max_steps_per_epoch: int | None
    epochs_run: int = 0
    training: TrainingState | None = None
    """The state that the training loop needs to continue exactly; None in torchtune's own checkpoints."""
    config: FlatConfig = field(default_factory=dict)
    """What decides about the result of the training; of a resumed run, as it follows it."""
    samples: int | None = None
    """The number of samples in the data; None where it is not known."""
    decides: tuple[str, ...] = ()
    """The keys of its batch that a run decides on itself, and keeps to when it is resumed."""
    takes_rate: bool = False
    """Whether the learning rate of a resumed run is the config's."""
    changes: list[str] = field(default_factory=list)
    """A line for each value that differs between the config and the checkpoint that is resumed."""
    kept: FlatConfig = field(default_factory=dict)
    """The values of these that are the checkpoint's, and not the config's."""
    source: str | None = None
    """The checkpoint that is resumed from."""
    sized_for: str | None = None
    """The digest of the ranks, device and config that the size of the resumed checkpoint was found for."""
    sizes_for: str | None = None
    """The same of this run."""
    history: dict[str, Any] | None = None
    """The steps so far, as a summary and a plot show them; None where a checkpoint does not have them."""

    @property
    def is_unfinished(self) -> bool:
        return self.epochs_run < self.total_epochs

    @property
    def shuffle(self) -> bool:
        """Whether the samples are in another order in each epoch."""
        return bool(self.config.get("shuffle"))

    def order_of(self, samples: int, ranks: int) -> SampleOrder:
        """The order of samples, dealt out to a number of ranks."""
        if self.config.get(SAMPLE_ORDER) == "streaming":
            return SampleOrder(samples, ranks, self.shuffle, self.seed, streaming=True)
        return SampleOrder(samples, ranks, self.shuffle)  # torchtune's has a seed of its own

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Continue where a checkpoint was saved; what would change the run's course stays as it was."""
        keys = (
            training.EPOCHS_KEY,
            training.SEED_KEY,
            training.MAX_STEPS_KEY,
            training.TOTAL_EPOCHS_KEY,
        )
        missing = [key for key in keys if key not in checkpoint]
        if missing:
            raise CheckpointError(
                f"The checkpoint to resume from has no {missing[0]!r}: it is the end of a run, or of another "
                "recipe. Give checkpointer.recipe_checkpoint the recipe state of an earlier epoch."
            )
        epochs_run, seed, max_steps, total_epochs = (checkpoint[key] for key in keys)
        self.epochs_run = epochs_run
        saved = checkpoint.get(TRAINING_KEY)
        self.training = TrainingState.read(saved) if saved is not None else None
        self.history = checkpoint.get(HISTORY_KEY)
        if self.seed != seed:
            why = "checkpoint's; a resumed run keeps its seed"
            self.changes.append(change("seed", self.seed, seed, why))
            self.seed = self.kept["seed"] = seed
        if self.max_steps_per_epoch != max_steps:
            self.changes.append(
                change("max_steps_per_epoch", self.max_steps_per_epoch, max_steps, "checkpoint's")
            )
            self.max_steps_per_epoch = self.kept["max_steps_per_epoch"] = max_steps
        if self.total_epochs != total_epochs:
            self.changes.append(change("epochs", total_epochs, self.total_epochs, "config's"))
        self._follow(checkpoint.get(CONFIG_KEY))

    def _follow(self, saved: dict[str, Any] | None) -> None:
        """Settle which config the run follows."""
        if saved is None:
            self.changes.append(
                "The checkpoint does not say which config it was saved with (torchtune saved it, or an older "
                "version), so what has changed since is not shown."
            )
            return
        decided = self.training is not None and self.training.growth.largest is not None
        found = resumed(
            saved["config"],
            self.config,
            keeps=self.decides if decided else (),
            takes_rate=self.takes_rate,
        )
        self.config, self.samples = found.config, saved["samples"]
        self.sized_for = saved.get("sized_for")
        self.changes += found.changes
        self.kept |= found.kept

    def require_data(self, samples: int) -> str | None:
        """Note the number of samples in the data; a line, if a resumed run has others.

        Raises:
            CheckpointError: it is resumed in the middle of an epoch of other data.
        """
        saved, self.samples = self.samples, samples
        if saved is None or saved == samples:
            return None
        if self.training is not None and self.training.samples_of_epoch:
            raise CheckpointError(
                f"dataset: has {samples} samples, and the checkpoint was saved in the middle of an epoch of "
                f"{saved}, so the next samples would be different ones. Resume with the same data, "
                f"{BEGIN_ANEW}."
            )
        return change("samples in the dataset", saved, samples, "config's")

    def of_torchtune(self) -> dict[str, Any]:
        return training_progress(
            seed=self.seed,
            epochs_run=self.epochs_run,
            total_epochs=self.total_epochs,
            max_steps_per_epoch=self.max_steps_per_epoch,
        )

    def training_state(self) -> dict[str, Any]:
        """What torchtune's recipe state does not have."""
        saved_with = {
            "config": self.config,
            "samples": self.samples,
            "sized_for": self.sizes_for,
        }
        return {
            TRAINING_KEY: self.training and self.training.write(),
            CONFIG_KEY: saved_with,
            HISTORY_KEY: self.history,
        }

    def state_dict(self) -> dict[str, Any]:
        """torchtune's recipe state, with ours in it."""
        return {**self.of_torchtune(), **self.training_state()}
