"""What the mixins for trainers of transformers and TRL have in common."""

from __future__ import annotations

from typing import Any

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import refusals
from torchtune_adaptive.integrations.ending import lost_outside_of_a_step
from torchtune_adaptive.integrations.evaluation import Evaluation
from torchtune_adaptive.integrations.facts import check_versions
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.trainer_step import state_in

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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise lost_outside_of_a_step(self, error) from error

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._adaptive_step is not None:  # of training, not of an evaluation
            logs = logs | self._adaptive_step.metrics
        super().log(logs, *args, **kwargs)

    def _begun(self) -> Any:
        """The steps of the training that runs."""
        if self._adaptive_step is None:
            raise UsageError("training_step: call train(), which makes the batches that it takes.")
        return self._adaptive_step
