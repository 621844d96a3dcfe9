"""What the mixins for trainers of transformers and TRL have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.common import UsageError, check_versions
from torchtune_adaptive.core import sample_dropout
from torchtune_adaptive.integrations import private, refusals, whole_checkpoints
from torchtune_adaptive.integrations.ending import lost_outside_of_a_step
from torchtune_adaptive.integrations.evaluation import Evaluation
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.step_rows import StepRows
from torchtune_adaptive.integrations.trainer_step import learned_in, state_in

_Trainer: Any = object
"""What stands for the trainer, which is the next base of a class with a mixin."""


class AdaptiveMixin(private.SaveHook, _Trainer):
    """What all trainers have in common whose micro-batches have the size that fits."""

    adaptive = Adaptive()
    """The options."""
    restored: tuple[str, ...] = ("state.tokens",)  # of Axolotl's trainers
    """What a forward pass changes besides the trainer's own numbers, and containers of these, which are set
    back in any case before a step is done again."""
    of_rollouts = False
    """Whether the rows of a step are completions that the model generates."""
    args: Any
    accelerator: Any
    hp_search_backend: Any
    state: Any
    control: Any
    is_in_train: bool
    rows_begun_with: StepRows
    """The rows of a step that the run began with, by the arguments that it had then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        of_trl = any(base.__module__.startswith("trl.") for base in type(self).__mro__)
        at_least = {"trl": "1.9"} if self.of_rollouts else {}  # as for ``private.RolloutHooks``
        check_versions("transformers", "accelerate", *["trl"] * of_trl, **at_least)
        refusals.require_known_trainer(type(self), self.of_rollouts)
        self._adaptive_step: Any = None  # a TrainerStep; other names of its kind are TRL's
        self._adaptive_evaluation = Evaluation(self, lambda: self._adaptive_step)
        self._adaptive_checkpoint: Any = None
        self._adaptive_given: StepRows | None = None
        super().__init__(*args, **kwargs)
        refusals.require_supported(self)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._forget_training()
        checkpoint = whole_checkpoints.chosen(self, resume_from_checkpoint)
        self._adaptive_checkpoint = checkpoint
        try:
            return super().train(checkpoint, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise lost_outside_of_a_step(self, error) from error
        finally:
            if self._adaptive_step is not None:
                self._adaptive_step.put_layers_back()
            if given := self._adaptive_given:
                private.set_batches(self, given.batch, given.accumulation)
            sample_dropout.drop_by_torch(self.model)

    def _forget_training(self) -> None:
        """Forget an earlier training, whose model another may replace: nothing may hold it, nor be known of
        the new one by it."""
        self._adaptive_step = self._adaptive_given = None
        self._adaptive_evaluation.forget()
        state = state_in(self)
        state.steps = state.learned = None
        whole_checkpoints.callback_of(self)  # behind those that the trainer has by now

    def own_save(self, save: Any, folder: Any, *args: Any) -> None:
        with whole_checkpoints.saving(self, Path(folder)):
            save(*args)

    def _begin_training(self) -> None:
        """Set up what follows arguments, which a hyperparameter search changes after ``train`` is called."""
        if self._adaptive_given is not None:  # of several loaders, this is not the first
            return
        if self.hp_search_backend is not None:
            refusals.require_supported(self)
        # DistributedDataParallel would broadcast them in each forward pass, where a rank may be missing.
        self.accelerator.ddp_handler.broadcast_buffers = False
        args = self.args
        self._adaptive_given = given = StepRows(
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            # Where they split batches, the rows of a step do not follow their number.
            1 if args.accelerator_config.split_batches else self.accelerator.num_processes,
        )
        learned = learned_in(self._adaptive_checkpoint) or {}
        self.rows_begun_with, rows = given.resumed(learned.get("began with"))
        if rows == given:
            return
        if self.of_rollouts:
            raise UsageError(
                f"resume_from_checkpoint: its steps have {rows.number} rows, and {given.number} on "
                f"{given.processes} processes. Set per_device_train_batch_size={rows.batch} and "
                f"gradient_accumulation_steps={rows.accumulation}: which prompts are generated together "
                "follows the arguments."
            )
        private.set_batches(self, rows.batch, rows.accumulation)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        # Resumed where it ended, the plain trainer takes one step more.
        if self.is_in_train and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop, num_batches = True, 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._adaptive_step is not None and self._adaptive_step.keeps_log(logs):
            return
        if "loss" in logs and self._adaptive_step is not None:  # of training, not of an evaluation
            logs = logs | self._adaptive_step.metrics
        super().log(logs, *args, **kwargs)
