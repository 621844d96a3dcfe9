"""Evaluation by a trainer, which goes on where memory runs out.

A batch is evaluated as it is. Where memory runs out on any process, its rows go through in smaller parts on
all of them, and so do those of the batches that follow. The trainer gets what the whole batch would have
given.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.data import IterableDataset

from torchtune_adaptive.common import TrainingOutOfMemory, UsageError, announce, arguments
from torchtune_adaptive.core import Buffers, Generators, Phase
from torchtune_adaptive.integrations import averages, private, refusals
from torchtune_adaptive.integrations.first_look import terms_of_loss
from torchtune_adaptive.integrations.host_state import HostState, state_of
from torchtune_adaptive.integrations.parts import joined, weighted_mean
from torchtune_adaptive.integrations.rows import Keeping, KeptRows, sliced
from torchtune_adaptive.integrations.terms import Found, Terms
from torchtune_adaptive.integrations.trainer_step import TrainerStep, collectives_of
from torchtune_adaptive.integrations.undivided import why_not_divided
from torchtune_adaptive.library import AdaptiveStep

log = logging.getLogger(__name__)

Prediction = tuple[torch.Tensor | None, Any, Any]
"""What ``prediction_step`` gives: the loss, the logits and the labels of a batch."""


@dataclass(frozen=True)
class Divisible:
    """A batch, and what is needed to make batches of some of its rows."""

    rows: Sequence[Any]
    inputs: Any
    part: Callable[[Sequence[int]], Any]
    """Function that makes a batch of those rows that have these numbers."""
    terms: Terms | None = None
    """What its loss is a mean of, if that is known."""


@dataclass(frozen=True)
class _Predicted:
    """What a part of a batch has given."""

    rows: int
    prediction: Prediction
    inputs: Any
    items: float | None
    """What its loss was divided by."""
    added: averages.Added
    """What it has added to each metric."""


class Evaluation:
    """The batches of a trainer's evaluations.

    Args:
        training: function that gives the steps of the training, if one has begun.
    """

    def __init__(self, trainer: Any, training: Callable[[], TrainerStep | None]) -> None:
        self._trainer, self._training = trainer, training
        self._step: AdaptiveStep | None = None
        self._phases: dict[str, Phase[Any, Any]] = {}
        self._terms: Found | None = None
        """What the loss is a mean of, where no training has found it."""
        self._batch: Divisible | None = None
        self._repeatable: Keeping | None = None

    def forget(self) -> None:
        """Forget the model that was evaluated last."""
        self._step, self._phases, self._terms = None, {}, None

    # --- the rows of a batch --------------------------------------------------------------------

    @contextmanager
    def batches_of(self, loader: Any) -> Iterator[Any]:
        """A context in which a loader keeps the rows of its batches; gives what to take these from."""
        base = getattr(loader, "base_dataloader", loader)  # accelerate's has torch's inside
        if not self._keeps_rows(base):
            yield loader
            return
        keeping = Keeping(base.collate_fn)
        try:
            with mock.patch.object(base, "collate_fn", keeping):
                yield _Batches(loader, partial(self._begin, keeping))
        finally:
            self._batch = None

    def _keeps_rows(self, loader: Any) -> bool:
        """Whether each process makes its batches of rows of its own, as many as the others."""
        dataset, loading = getattr(loader, "dataset", None), self._trainer.args.accelerator_config
        if not hasattr(loader, "collate_fn") or loading.dispatch_batches:
            return False
        return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)

    def _begin(self, keeping: Keeping, batch: KeptRows) -> Any:
        from accelerate.utils import send_to_device

        inputs = send_to_device(batch.inputs, self._trainer.accelerator.device)
        self._batch = Divisible(batch.rows, inputs, partial(self._part, keeping, batch))
        return inputs

    def _part(self, keeping: Keeping, batch: KeptRows, numbers: Sequence[int]) -> Any:
        """A batch of some of the rows of another: a part of it, or made anew where that is not known."""
        try:
            return sliced(batch.inputs, numbers, len(batch))
        except ValueError as unknown:
            device, known = self._trainer.accelerator.device, self._repeatable is keeping
            if known or keeping.repeats(batch, device):
                self._repeatable = keeping
                return keeping.again([batch.rows[number] for number in numbers])
            raise UsageError(
                f"evaluation: memory has run out, and data_collator makes {unknown}, and another batch when "
                "it is called again. Lower per_device_eval_batch_size."
            ) from None

    def divisible(self, inputs: Any) -> Divisible | None:
        """The batch that these inputs are, if its rows are known."""
        batch = self._batch
        return batch if batch is not None and batch.inputs is inputs else None

    # --- a batch --------------------------------------------------------------------------------

    def take(
        self,
        model: torch.nn.Module,
        batch: Divisible,
        predict: Callable[[Any], Prediction],
        name: str,
    ) -> Prediction:
        """The prediction for a batch; ``predict`` makes that for some inputs, by this model.

        Raises:
            TrainingOutOfMemory: not even one row fits.
        """
        if not any(each.requires_grad for each in model.parameters()):
            return predict(batch.inputs)
        step, rows = self._step_for(model), len(batch.rows)
        phase, most = self._phase(step, name), self._trainer.args.eval_batch_size
        before = kept = self._kept()
        parts: list[_Predicted] = []
        attempts: list[int] = []

        def portions(done: int, size: int) -> Iterator[tuple[int, tuple[Any, int]]]:
            if attempts:
                kept.restore()
            attempts.append(size)
            if size == most:
                yield rows, (batch.inputs, rows)
                return
            self._require_same(step, rows)
            for start in range(done, rows, size):
                numbers = range(start, min(start + size, rows))
                yield len(numbers), (batch.part(numbers), len(numbers))

        phase.work = partial(self._predicted, step, predict, rows)
        for outcome in phase.run(rows, portions):
            parts.append(outcome.result)
            kept = self._kept()
        if len(parts) == 1:
            return parts[0].prediction
        self._average(parts, before)
        return self._together(step, model, batch, parts)

    def _require_same(self, step: AdaptiveStep, rows: int) -> None:
        least, most = step.ranks.spread(rows)
        if least != most:
            raise UsageError(
                f"evaluation: memory has run out, and processes have batches of {least} to {most} rows, "
                "which cannot be divided alike. Lower per_device_eval_batch_size."
            )

    def _predicted(
        self,
        step: AdaptiveStep,
        predict: Callable[[Any], Prediction],
        of: int,
        portion: tuple[Any, int],
    ) -> _Predicted:
        """The prediction for some of the rows of a batch that has so many."""
        inputs, rows = portion
        compute_loss, items = self._trainer.compute_loss, []

        def noted(*given: Any, **named: Any) -> Any:
            items.append(named.get("num_items_in_batch"))
            return compute_loss(*given, **named)

        with (
            self._gathering(step),
            mock.patch.object(self._trainer, "compute_loss", noted),
            averages.noted(lambda: private.metrics_in(vars(self._trainer), "eval")) as added,
        ):
            loss, logits, labels = predict(copy.copy(inputs))  # some trainers change what they get
        if rows == of:
            return _Predicted(rows, (loss, logits, labels), inputs, None, added)
        divisor = None if not items or items[0] is None else float(items[0])
        return _Predicted(
            rows, (loss, *_on(torch.device("cpu"), logits, labels)), inputs, divisor, added
        )

    @contextmanager
    def _gathering(self, step: AdaptiveStep) -> Iterator[None]:
        """A context in which gathers of metrics are those of all ranks, or of none."""
        accelerator = self._trainer.accelerator
        with mock.patch.multiple(accelerator, **collectives_of(step, accelerator)):
            yield

    # --- what its parts have given --------------------------------------------------------------

    def _together(
        self,
        step: AdaptiveStep,
        model: torch.nn.Module,
        batch: Divisible,
        parts: Sequence[_Predicted],
    ) -> Prediction:
        rows = [part.rows for part in parts]
        losses, logits, labels = zip(*(part.prediction for part in parts), strict=True)
        loss = losses[0]
        if loss is not None:
            weights = self._weights(step, model, batch, parts)
            loss = loss.new_tensor(weighted_mean([float(each) for each in losses], weights))
        flat = _is_flat(batch)
        whole = (joined(logits, rows, flat), joined(labels, rows, flat))
        return (loss, *_on(self._trainer.accelerator.device, *whole))

    def _weights(
        self,
        step: AdaptiveStep,
        model: torch.nn.Module,
        batch: Divisible,
        parts: Sequence[_Predicted],
    ) -> list[float]:
        """How much each part counts in the loss of its batch."""
        terms, why = self._terms_of_loss(step, model, batch, parts[0].items)
        if not terms.divides:
            raise TrainingOutOfMemory(
                "Out of memory in evaluation, where the loss of a batch cannot be computed in parts: "
                f"{why}. Lower per_device_eval_batch_size."
            )
        if terms is Terms.ITEMS:
            return [part.items or 0.0 for part in parts]
        return [float(terms.number(part.inputs, part.rows)) for part in parts]

    def _terms_of_loss(
        self, step: AdaptiveStep, model: torch.nn.Module, batch: Divisible, items: float | None
    ) -> Found:
        trainer, training = self._trainer, self._training()
        if why := why_not_divided(trainer, model):
            return Found(Terms.BATCH, why)
        trained = None if training is None else training.terms
        known = batch.terms or refusals.mean_in_evaluation(type(trainer)) or trained
        if known is not None and known.divides and (known is not Terms.ITEMS or items is not None):
            return Found(known)
        if self._terms is None:
            drawn, kept = Generators(trainer.accelerator.device), self._kept()
            buffers, rows = Buffers(model), range(len(batch.rows))
            with self._gathering(step):
                self._terms = terms_of_loss(
                    trainer, model, step, len(rows), rows, batch.part, items
                )
            drawn.restore()
            buffers.restore()
            kept.restore()
        if self._terms.terms is Terms.ITEMS and items is None:
            return Found(Terms.BATCH, "it is a sum, and not divided by num_items_in_batch")
        return self._terms

    def _average(self, parts: Sequence[_Predicted], before: HostState) -> None:
        """Make one value of those that the parts have added to each metric."""
        of_parts, done = [], 0
        for part in parts:
            numbers, done = range(done, done + part.rows), done + part.rows
            of_parts.append(averages.Part(numbers, part.added, part.inputs))
        earlier = private.metrics_in(before.values, "eval")
        averages.settle(self._trainer, "eval", earlier, [done], of_parts, everyones=True)

    # --- what evaluates -------------------------------------------------------------------------

    def _step_for(self, model: torch.nn.Module) -> AdaptiveStep:
        """What trains, or where nothing does, what evaluates alone."""
        training, step = self._training(), self._step
        if training is not None:
            step = training.prepare()
        elif step is None or step.train_step.model is not model:
            options, reference = self._trainer.adaptive, getattr(self._trainer, "ref_model", None)
            trained = [each for each in model.parameters() if each.requires_grad]
            step = AdaptiveStep(
                model,
                torch.optim.SGD(trained),  # which never steps
                _no_training,
                optimizer_steps=False,
                memory_limit=options.memory_limit,
                frozen=() if reference is None else (reference,),
            )
        if step is not self._step:
            self._step, self._phases, self._terms = step, {}, None
        return step

    def _phase(self, step: AdaptiveStep, name: str) -> Phase[Any, Any]:
        if name not in self._phases:
            adjusted = partial(self._adjusted, step, name)
            options = self._trainer.adaptive
            self._phases[name] = Phase(
                name,
                step.train_step,
                _no_training,
                adjusted=adjusted,
                wait_for_memory=options.wait_for_memory,
            )
            self._phases[name].begin(
                self._trainer.args.eval_batch_size,
                arguments.whole_or_never("grow_back_after", options.grow_back_after),
            )
        return self._phases[name]

    def _adjusted(
        self, step: AdaptiveStep, name: str, reason: str, before: int, after: int
    ) -> None:
        what = f"batch of {name} {before} -> {after}" if before != after else name
        line = f"{what} ({reason})"
        announce(log, line, logging.WARNING, rank_zero=step.ranks.is_zero)

    # --- what a forward pass changes on the host --------------------------------------------------

    def _kept(self) -> HostState:
        return state_of(self._trainer)


class _Batches:
    """A loader of which each batch is told before it is given."""

    def __init__(self, loader: Any, tell: Callable[[KeptRows], Any]) -> None:
        self._loader, self._tell = loader, tell

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield self._tell(batch) if isinstance(batch, KeptRows) else batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _no_training(batch: Any) -> torch.Tensor:
    raise UsageError("evaluation: nothing is trained.")


def _on(device: torch.device, *values: Any) -> tuple[Any, ...]:
    from accelerate.utils import send_to_device

    return tuple(send_to_device(each, device) for each in values)


def _is_flat(batch: Divisible) -> bool:
    """Whether the rows of a batch follow each other in one, without padding."""
    tensors = (each for each in batch.inputs.values() if isinstance(each, torch.Tensor))
    first = next((each for each in tensors if each.dim()), None)
    return first is not None and first.size(0) % len(batch.rows) > 0
