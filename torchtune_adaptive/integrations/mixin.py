"""What the mixins for trainers of transformers and TRL have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import sample_dropout
from torchtune_adaptive.integrations import private, refusals
from torchtune_adaptive.integrations.ending import lost_outside_of_a_step
from torchtune_adaptive.integrations.evaluation import Evaluation
from torchtune_adaptive.integrations.facts import check_versions
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.step_rows import StepRows
from torchtune_adaptive.integrations.trainer_step import learned_in, state_in

_Trainer: Any = object
"""What stands for the trainer, which is the next base of a class with a mixin."""


class AdaptiveMixin(_Trainer):
    """What all trainers have in common whose micro-batches have the size that fits."""

    adaptive = Adaptive()
    """The options."""
    restored: tuple[str, ...] = (
        "_metrics",
        "_total_train_tokens",
        "_stored_metrics",
        "state.tokens",  # of Axolotl's trainers
    )
    """Attributes that a forward pass changes; set back before a step is done again."""
    of_rollouts = False
    """Whether the rows of a step are completions that the model generates."""
    args: Any
    accelerator: Any
    rows_begun_with: StepRows
    """The rows of a step that the run began with, by the arguments that it had then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        of_trl = any(base.__module__.startswith("trl.") for base in type(self).__mro__)
        check_versions("transformers", "accelerate", *["trl"] * of_trl)
        refusals.require_known_trainer(type(self), self.of_rollouts)
        self._adaptive_step: Any = None  # a TrainerStep; other names of its kind are TRL's
        self._adaptive_evaluation = Evaluation(self, lambda: self._adaptive_step)
        super().__init__(*args, **kwargs)
        refusals.require_supported(self)
        state_in(self)
        # DistributedDataParallel would broadcast them in each forward pass, where a rank may be missing.
        self.accelerator.ddp_handler.broadcast_buffers = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._rows_of_steps_kept(resume_from_checkpoint):
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            except torch.OutOfMemoryError as error:
                raise lost_outside_of_a_step(self, error) from error
            finally:
                sample_dropout.drop_by_torch(self.model)

    @contextmanager
    def _rows_of_steps_kept(self, checkpoint: Any) -> Iterator[None]:
        """A context in which steps have the rows that they had on the processes that the run began with."""
        args = self.args
        given = StepRows(
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            self.accelerator.num_processes,
        )
        learned = learned_in(checkpoint, args.output_dir) or {}
        self.rows_begun_with, rows = given.resumed(learned.get("began with"))
        if rows == given:
            yield
            return
        if self.of_rollouts:
            raise UsageError(
                f"resume_from_checkpoint: its steps have {rows.number} rows, and {given.number} on "
                f"{given.processes} processes. Set per_device_train_batch_size={rows.batch} and "
                f"gradient_accumulation_steps={rows.accumulation}: which prompts are generated together "
                "follows the arguments."
            )
        private.set_batches(self, rows.batch, rows.accumulation)
        try:
            yield
        finally:
            private.set_batches(self, given.batch, given.accumulation)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._adaptive_step is not None:  # of training, not of an evaluation
            logs = logs | self._adaptive_step.metrics
        super().log(logs, *args, **kwargs)

    def _begun(self) -> Any:
        """The steps of the training that runs."""
        if self._adaptive_step is None:
            raise UsageError("training_step: call train(), which makes the batches that it takes.")
        return self._adaptive_step
