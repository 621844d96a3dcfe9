"""transformers' ``Trainer``, and what inherits from it, with micro-batches of the size that fits.

    from torchtune_adaptive.integrations.transformers import adaptive

    trainer = adaptive(SFTTrainer)(model, args, train_dataset=dataset)

The rows of an optimizer step are what they were: ``per_device_train_batch_size *
gradient_accumulation_steps``. They are taken in micro-batches of the size that a search finds before the
first step. What a micro-batch adds to the loss is what the trainer's own ``training_step`` would call
``backward`` on. Clipping, the optimizer, the schedule, logs, callbacks and checkpoints stay the trainer's,
which finds the gradient of the step in ``.grad``.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import refusals
from torchtune_adaptive.integrations.mixin import AdaptiveMixin
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.rows import Keeping, KeptRows
from torchtune_adaptive.integrations.step_batches import counted_in, divide
from torchtune_adaptive.integrations.step_rows import StepRows, deal, sampled_by
from torchtune_adaptive.integrations.streams import read_by_each_process
from torchtune_adaptive.integrations.trainer_step import TrainerStep
from torchtune_adaptive.integrations.trl import AdaptiveRolloutMixin

if TYPE_CHECKING:
    import torch

Kind = TypeVar("Kind", bound=type)


def adaptive(trainer: Kind, options: Adaptive | None = None) -> Kind:
    """A subclass of a trainer that finds its micro-batch size, and retries steps that run out of memory.

    Of one that does so already, the same, or one with other options.
    """
    own = {} if options is None else {"adaptive": options}
    if issubclass(trainer, AdaptiveMixin):
        return type(trainer.__name__, (trainer,), own) if own else trainer  # type: ignore[return-value]
    mixin = AdaptiveRolloutMixin if refusals.generates(trainer) else AdaptiveTrainerMixin
    return type(f"Adaptive{trainer.__name__}", (mixin, trainer), own)  # type: ignore[return-value]


class AdaptiveTrainerMixin(AdaptiveMixin):
    """Makes a trainer take its steps in micro-batches of the size that fits.

        class AdaptiveSFTTrainer(AdaptiveTrainerMixin, SFTTrainer): ...

    Raises:
        UsageError: a setting of the trainer cannot be kept.
    """

    data_collator: Any
    label_names: list[str]

    def get_train_dataloader(self) -> Any:
        if not self.is_in_train:  # somebody only looks at it
            return super().get_train_dataloader()
        self._begin_training()
        keeping = Keeping(self.data_collator)
        with (
            mock.patch.object(self, "data_collator", keeping),
            read_by_each_process(self),
        ):
            loader = super().get_train_dataloader()
        args, options = self.args, self.adaptive
        rows, of_step = args.per_device_train_batch_size, args.gradient_accumulation_steps
        on = StepRows(rows, of_step, self.accelerator.num_processes)
        chosen = not type(sampled_by(loader)[2]).__module__.startswith(("torch.", "transformers."))
        dealt = deal(loader, self.rows_begun_with, on, self.accelerator.process_index)
        # Of several loaders that a subclass puts together, steps need not begin with the second.
        divides = self._adaptive_step is None and not options.token_budget
        divides = divides and divide(loader, rows, of_step, larger=bool(options.search))
        self._adaptive_step = TrainerStep(self, loader, divides, keeping, dealt, chosen)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = self._adaptive_rows = list(islice(epoch_iterator, num_batches))
        if not all(isinstance(batch, KeptRows) for batch in batches):
            raise UsageError(
                "get_train_dataloader: its batches are not made by self.data_collator, so the rows "
                "of a step are not known. Pass collate_fn=self.data_collator."
            )
        made = [inputs for batch in batches for _, inputs in batch.made]
        samples, items = super().get_batch_samples(iter(made), len(made), device)
        if samples and [len(batch.made) for batch in batches] != [1] * len(samples):
            samples = [counted_in(batch, made[0]) for batch in batches]
        return samples, items

    def items_in(self, inputs: list[Any]) -> Any:
        """The items that the trainer counts in batches of this process."""
        with mock.patch.object(self.accelerator, "gather", lambda counted: counted):
            return super().get_batch_samples(iter(inputs), len(inputs), self.args.device)[1]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        own = super().training_step
        if not self.is_in_train:  # called by hand
            return own(model, inputs, num_items_in_batch)
        return self._adaptive_step.take(model, self._adaptive_rows, own, num_items_in_batch)

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        with self._adaptive_evaluation.batches_of(dataloader) as batches:
            return super().evaluation_loop(batches, *args, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        own = super().prediction_step
        predict = lambda some: own(model, some, prediction_loss_only, ignore_keys)  # noqa: E731
        batch = self._adaptive_evaluation.divisible(inputs)
        if batch is None:
            return predict(inputs)
        # Each launches other collectives.
        name = "evaluation" if prediction_loss_only else "prediction"
        if self.label_names and not any(key in inputs for key in self.label_names):
            name += "" if refusals.name_in_trl(type(self)) else " without labels"
        return self._adaptive_evaluation.take(model, batch, predict, name)
