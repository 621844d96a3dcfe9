"""How far a run is, and what a checkpoint keeps of that."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torchtune import training

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.recipe.checkpoints.training_state import TrainingState
from torchtune_adaptive.recipe.private import training_progress

log = logging.getLogger(__name__)


TRAINING_KEY = "adaptive_training"


@dataclass
class Progress:
    """How far a run is, and what a checkpoint keeps of that."""

    seed: int
    total_epochs: int
    max_steps_per_epoch: int | None
    epochs_run: int = 0
    training: TrainingState | None = None
    """The state that the training loop needs to continue exactly; None in torchtune's own checkpoints."""

    @property
    def is_unfinished(self) -> bool:
        return self.epochs_run < self.total_epochs

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
        if self.seed != seed:
            log.warning(
                f"seed {self.seed} -> {seed} (the checkpoint's; a resumed run keeps its seed)"
            )
            self.seed = seed
        if self.max_steps_per_epoch != max_steps:
            log.warning(
                f"max_steps_per_epoch {self.max_steps_per_epoch} -> {max_steps} (the checkpoint's)"
            )
            self.max_steps_per_epoch = max_steps
        if self.total_epochs != total_epochs:
            log.warning(f"epochs {total_epochs} -> {self.total_epochs} (the config's)")

    def as_torchtune(self) -> Any:
        return training_progress(
            seed=self.seed,
            epochs_run=self.epochs_run,
            total_epochs=self.total_epochs,
            max_steps_per_epoch=self.max_steps_per_epoch,
        )

    def training_state(self) -> dict[str, Any]:
        """What torchtune's recipe state does not have."""
        return {TRAINING_KEY: self.training and self.training.write()}

    def state_dict(self) -> dict[str, Any]:
        """torchtune's recipe state, with ours in it."""
        return {**self.as_torchtune().state_dict(), **self.training_state()}
