"""The steps of one call of a trainer's ``train``."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache, partial
from itertools import accumulate, chain, cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.common import UsageError, counted
from torchtune_adaptive.core import Buffers, Generators
from torchtune_adaptive.integrations import averages, ending, layers, private, refusals
from torchtune_adaptive.integrations.first_look import terms_of_loss
from torchtune_adaptive.integrations.host_state import state_of
from torchtune_adaptive.integrations.row_step import OnHost, RowStep, normalizes
from torchtune_adaptive.integrations.rows import Keeping, KeptRows, RowsOfStep
from torchtune_adaptive.integrations.step_rows import cannot_share
from torchtune_adaptive.integrations.terms import Found, Terms, with_a_label
from torchtune_adaptive.integrations.undivided import why_not_divided
from torchtune_adaptive.library import AdaptiveStep

_NOISE = (
    "neftune_noise_alpha: the noise follows the rows of a micro-batch and their padded length, so where "
    "these are not the trainer's own, losses are not those of the plain trainer."
)


class TrainerStep(RowStep):
    """The steps of a trainer, whose loader gives ``KeptRows``.

    ``divides`` is whether it may make micro-batches of a size that it is told; see ``step_batches``. What
    ``deal`` gave of it is ``dealt``. Whether a batch sampler of somebody else's has chosen the rows of its
    batches, such as those of one dataset among several, is ``chosen``: they stay together then.
    """

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        divides: bool = False,
        keeping: Keeping | None = None,
        dealt: int | None = None,
        chosen: bool = False,
    ) -> None:
        args = trainer.args
        super().__init__(trainer, (), trainer.adaptive, loader, args.device, keeping)
        self._trainer = trainer
        self._of_step: Sequence[KeptRows] = ()
        self._prepared: AdaptiveStep | None = None
        self.put_layers_back: Callable[[], None] = lambda: None
        """Function that checkpoints the layers that were checkpointed before the first step."""
        self._terms = Terms.ITEMS
        """What the loss is a mean of."""
        self._parts: list[averages.Part] = []
        """The micro-batches of the attempt to take a step."""
        self._logs: list[dict[str, Any]] | None = None
        """What the forward pass that runs has logged; None where none runs."""
        self._shared: list[int] = []
        """For each row of a step, the terms of its batch."""
        self._divides, self._dealt, self._chosen = divides, dealt, chosen
        self._weights_seen: list[float] = []
        """What losses were set to when they were looked at last."""

    def take(
        self, model: Any, batches: Sequence[KeptRows], training_step: Callable[..., Any], items: Any
    ) -> torch.Tensor:
        """Take a step with the last of its batches; until then there is nothing to do. ``items`` is what the
        trainer's own ``training_step`` divides a sum by."""
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros((), device=self._device)
        self._training_step, self._model, self._items = training_step, model, items
        self._of_step = batches
        self._parts.clear()
        if self._step is not None:
            self._look_again(self._step)
        loss = self._take(batches).loss
        if (scaler := self._trainer.accelerator.scaler) is not None:
            loss /= scaler.get_scale()
        self._average(batches)
        self._tell_loader(batches)
        state_in(self._trainer).steps = self
        return torch.tensor(loss, device=self._device)

    def keeps_log(self, logs: dict[str, Any]) -> bool:
        """Keep what is logged in a forward pass until the step is taken; False if none runs."""
        if self._logs is None:
            return False
        self._logs.append(logs)
        return True

    def _average(self, batches: Sequence[KeptRows]) -> None:
        """Give metrics and logs a value for each of the trainer's own batches, where micro-batches were
        others."""
        sizes = self._sizes(batches)
        own = [
            [*range(end - size, end)] for end, size in zip(accumulate(sizes), sizes, strict=True)
        ]
        parts = self._parts.copy()
        if [[*part.rows] for part in parts] == own:
            logs = [entry for part in parts for entry in part.logs]
        else:
            before = private.metrics_in(self._kept.values, "train")
            averages.settle(self._trainer, "train", before, sizes, parts, everyones=False)
            logs = averages.logs_of_batches(len(sizes), parts)
        self._parts.clear()  # which hold the micro-batches
        for entry in logs:
            self._trainer.log(entry)

    def _keep(self) -> None:
        self._kept = state_of(self._trainer)

    def restore(self) -> None:
        super().restore()
        self._parts.clear()

    def _tell_loader(self, batches: Sequence[KeptRows]) -> None:
        """Let the loader make micro-batches of the size that they have now."""
        assert self._step is not None
        size, rows = self._step.micro_batch, self._configured()[0]
        self._divides &= not self.slices
        if not self._divides or size == (self._keeping.size or rows):
            return
        if not self._keeping.size and not self._counts_the_same(batches, size):
            self._divides = False
            return
        self._keeping.size = size

    def _counts_the_same(self, batches: Sequence[KeptRows], size: int) -> bool:
        """Whether the trainer counts as many items in micro-batches of this size as in these batches.

        Not where that follows how rows are padded, as with labels that are padded in front.
        """
        if self._terms.of_labels:
            return False  # which are those of a batch
        rows, counted_in = RowsOfStep(batches), self._trainer.items_in
        made = [self._collated(rows[start : start + size]) for start in range(0, len(rows), size)]
        one, other = counted_in([batch.inputs for batch in batches]), counted_in(made)
        return all(isinstance(each, Mapping) for each in made) and (
            one is other is None or (None not in (one, other) and int(one) == int(other))
        )

    def _sizes(self, batches: Sequence[KeptRows]) -> list[int]:
        """The rows of each batch of a step, as the plain trainer has them."""
        if not self._divides:
            return [len(batch) for batch in batches]
        number, of_batch = sum(map(len, batches)), self._configured()[0]
        return [min(of_batch, number - start) for start in range(0, number, of_batch)]

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        trainer, found = self._trainer, self._found
        found.clear()
        trainer.current_gradient_accumulation_steps = self.parts(len(batch["rows"]))
        inputs, numbers = batch["inputs"].value, batch.get("numbers")
        if self._whole and numbers is not None:  # some trainers sum up over the batches of a step
            trainer.accelerator.sync_gradients = numbers.value[-1] + 1 == self._rows_of_step
        with averages.noted(lambda: private.metrics_in(vars(trainer), "train")) as added:
            self._training_step(self._model, copy.copy(inputs), self._items)
        if numbers is not None:  # not in a trial
            logs = tuple(self._logs or ())
            self._parts.append(averages.Part(numbers.value, added, inputs, logs))
        if self._logs is not None:
            self._logs.clear()
        if len(found) != 1:
            raise UsageError(
                f"training_step: it called accelerator.backward {counted(len(found), 'time')}, and must call "
                "it once, with the loss of the micro-batch."
            )
        loss = found.pop()  # or what it refers to would outlive a lost step
        if batch["inputs"].weight != 1:
            loss = loss * batch["inputs"].weight
        return loss

    def _scaled(self, batch: dict[str, Any]) -> torch.Tensor:
        loss, scaler = self._forward(batch), self._trainer.accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    def parts(self, rows: int) -> float:
        """What the trainer divides the loss of a micro-batch of so many rows by, if it is a mean."""
        return len(self._of_step)

    @property
    def terms(self) -> Terms | None:
        """What the loss is a mean of; None before the first step."""
        return None if self._step is None else self._terms

    def most_rows(self, rows: int) -> int:
        # Where they are dealt out, the first step may be the last of an epoch, with more on some processes.
        return rows if self._dealt is None else self._configured()[1]

    # --- what the loss is a mean of -----------------------------------------------------------------

    def _look_at_loss(self, step: AdaptiveStep) -> str | None:
        self._model.train()  # as in a step: layers that normalize over a batch may do so only then
        why = normalizes(step)
        terms, why = Found(Terms.BATCH, why) if why else self._found_terms(step)
        if self._options.token_budget and (terms.of_labels or self._chosen):
            why = "a batch sampler of your own has chosen them"
            if terms.of_labels:
                model = self._trainer.accelerator.unwrap_model(self._model)
                why = f"the loss of {type(model).__name__} is a mean over the labels of a batch"
            raise UsageError(
                f"token_budget: the rows of a micro-batch are of one batch, whatever their length, as {why}. "
                "Leave it off."
            )
        began, args = self._trainer.rows_begun_with, self._trainer.args
        batches, rows = args.gradient_accumulation_steps, args.per_device_train_batch_size
        if terms is not Terms.ITEMS and batches != began.accumulation:
            raise UsageError(
                f"resume_from_checkpoint: the loss is a mean over {terms.value}, of {began.accumulation} "
                "batches in a step, and these processes cannot have as many with as many rows. Resume on a "
                f"number of processes that divides {began.number // began.accumulation}."
            )
        if not terms.divides and rows != began.batch:
            raise UsageError(
                f"resume_from_checkpoint: its batches have {began.batch} rows, and {rows} on these "
                f"processes. They are not divided ({why or 'of one row'}), so losses would differ. Resume on "
                f"{counted(began.processes, 'process', 'processes')}."
            )
        processes = self._configured()[2]
        if terms is not Terms.ITEMS and (self._dealt or 0) % processes:
            which, last = "the last step of an epoch has", self._dealt or 0
            raise cannot_share(which, last, processes, began.number)
        self._weights_seen = self._weights
        step.objective.unequal_rows = self._dealt is not None and terms is Terms.ITEMS
        self._terms = terms
        return None if terms.divides else why

    def _found_terms(self, step: AdaptiveStep) -> Found:
        """What the loss is a sum or a mean of."""
        trainer = self._trainer
        if why := why_not_divided(trainer, self._model):
            return Found(Terms.BATCH, why)
        if refusals.is_mean_over_rows(type(trainer)):
            return Found(Terms.ROWS)
        drawn, buffers = Generators(self._device), Buffers(self._model)
        some = self._of_step[:1] if self._chosen else self._of_step
        rows = [row for one in some for row in one.rows]
        batches, (of_batch, of_step, _) = len(self._of_step), self._configured()
        of_batch = max(of_batch, len(self._of_step[0]))
        # The last step of an epoch, at which a run is resumed, may have few, and not as many on each process.
        rows = [*islice(cycle(rows), max(of_step, len(rows)))]

        def look(some: Sequence[Any], make: Callable[[Sequence[Any]], Any]) -> Found:
            collate = lambda part: make(part)["inputs"].value  # noqa: E731
            return terms_of_loss(
                trainer, self._model, step, of_batch, some, collate, self._items, batches
            )

        with self.around(step):
            found = self._look(self._of_step[0], rows, look, step)
        drawn.restore()
        buffers.restore()
        self.restore()
        return found

    def _look_again(self, step: AdaptiveStep) -> None:
        """Divide no more batches if the loss is no longer a mean of the same, as where a callback raises the
        weight of a part that compares rows."""
        weights, seen, began = self._weights, self._weights_seen, self._terms
        far = (abs(now - then) > abs(then) / 2 for now, then in zip(weights, seen, strict=False))
        changed = len(weights) != len(seen) or any(far)
        if self._whole or not seen or not any(step.ranks.gather(changed)):
            return
        self._weights_seen = weights
        self._keep()
        terms, why = self._found_terms(step)
        if terms is not began:
            self._undivided = why or "its loss is now a mean of something else"
            self._terms, self._size = Terms.BATCH, self._configured()[0]
            self._keep_whole(step)
            self._announce(step, f"batches are not divided from now on: {self._undivided}")

    @property
    def _weights(self) -> list[float]:
        """What losses are set to, such as the weights of their parts."""
        values = (value for loss in self._losses() for value in vars(loss).values())
        return [value for value in values if type(value) in (int, float)]

    def _losses(self) -> list[torch.nn.Module]:
        """The modules that the trainer has beside its models, one or, for several datasets, one for each; and
        those in them."""
        trainer = self._trainer
        models = (trainer.model, trainer.model_wrapped, getattr(trainer, "ref_model", None))
        values = [[*v.values()] if isinstance(v, dict) else [v] for v in vars(trainer).values()]
        held = [each for each in chain(*values) if isinstance(each, torch.nn.Module)]
        losses = [each for each in held if all(each is not model for model in models)]
        of_model = {*trainer.model.modules()} if losses else ()
        every = dict.fromkeys(module for loss in losses for module in loss.modules())
        return [module for module in every if module not in of_model]

    def _groups(self, batches: Sequence[KeptRows]) -> Sequence[int] | None:
        sizes, of_labels = self._sizes(batches), self._terms.of_labels
        terms = [self._terms.number(one.inputs, 0) for one in batches] if of_labels else sizes
        self._shared = [
            number for number, rows in zip(terms, sizes, strict=True) for _ in range(rows)
        ]
        if self.slices or self._chosen:
            return sizes
        if self._options.token_budget or self._terms is Terms.ITEMS:
            return None  # with a budget, rows of similar length go together, of whichever batch
        return self._terms.groups(sizes)

    def batch_of(self, rows: RowsOfStep, numbers: Sequence[int]) -> dict[str, Any]:
        batch = super().batch_of(rows, numbers)
        held, batch["numbers"] = batch["inputs"], OnHost(tuple(numbers))
        if self._terms.of_labels:
            own, shared = self._terms.number(held.value, len(numbers)), self._shared[numbers[0]]
            if shared and not own:
                held.value = with_a_label(held.value)
            held.weight = own / shared if shared else 1.0
        elif self._terms is Terms.ROWS:
            shares = Counter(self._shared[number] for number in numbers)
            held.weight = sum(count / of for of, count in shares.items())
        return batch

    def _numbers(self, batches: Sequence[KeptRows]) -> Sequence[int] | None:
        if self._options.dropout == "torch":
            return None
        accelerator, sizes = self._trainer.accelerator, self._sizes(batches)
        processes, process = accelerator.num_processes, accelerator.process_index
        # Processes take turns to get a batch or, where rows are dealt out, a row.
        first, turn = (process * sizes[0], 1) if self._dealt is None else (process, processes)
        return [
            batch * processes * sizes[0] + first + row * turn
            for batch, size in enumerate(sizes)
            for row in range(size)
        ]

    def _most(self, rows: int) -> int:
        of_a_batch = self._terms.of_labels or self.slices or self._chosen
        return min(rows, self._configured()[0]) if of_a_batch else rows

    @contextmanager
    def around(self, step: AdaptiveStep) -> Iterator[None]:
        """The trainer's ``backward`` only tells the loss: that of the step follows. Collectives for metrics,
        which it launches while it goes forward, are those of all ranks of the step, or of none."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        batches = trainer.current_gradient_accumulation_steps
        synchronizes = accelerator.sync_gradients
        self._found: list[torch.Tensor] = []
        self._logs = []
        replaced = collectives_of(step, accelerator)
        replaced["backward"] = lambda loss, **_: self._found.append(loss)
        try:
            with mock.patch.multiple(accelerator, **replaced):
                yield
        finally:
            self._logs, accelerator.sync_gradients = None, synchronizes
            trainer.current_gradient_accumulation_steps = batches

    def prepare(self) -> AdaptiveStep:
        """The step, which is there before the first is taken: completions are generated before, and an
        evaluation may come first.

        Not made in the middle of a step, where FSDP may have been told to keep gradients for the next batch.
        """
        if self._prepared is None:
            self._model = self._trainer.model_wrapped
            self._prepared = self._new_step()
        return self._prepared

    def new_step(self) -> AdaptiveStep:
        return self.prepare()

    def _new_step(self) -> AdaptiveStep:
        trainer, reference = self._trainer, getattr(self._trainer, "ref_model", None)
        one_by_one = self._options.fastest
        self.put_layers_back = layers.as_they_are(trainer)
        checkpointing = (layers.one_by_one if one_by_one else layers.all_at_once)(trainer)
        step = self._step_of(
            self._with_loss(trainer.optimizer),
            trainer.optimizer,
            activation_checkpointing=checkpointing,
            frozen=() if reference is None else (reference,),
            dropout=self._options.dropout,
            seed=trainer.args.seed,
            sequences=refusals.sequences_in(type(trainer)),
        )
        step.advice = lambda: ending.advice(trainer, self._undivided or "")
        if getattr(trainer.args, "neftune_noise_alpha", None):
            self._announce(step, _NOISE)
        return step

    def _with_loss(self, optimizer: Any) -> torch.nn.Module:
        """The model, with a loss of the trainer's that has parameters of its own, if these are trained."""
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        trained -= {*map(id, self._model.parameters())}
        losses = [each for each in self._losses() if trained & {*map(id, each.parameters())}]
        if not losses:
            return self._model
        if self._trainer.accelerator.num_processes > 1:
            raise UsageError(
                f"loss: {type(losses[0]).__name__} has parameters of its own, whose gradients processes do "
                "not share. Train on one."
            )
        return torch.nn.ModuleList([self._model, *losses])

    def _steps_before(self, step: AdaptiveStep) -> int:
        # With those that were taken on other processes, or by the plain trainer.
        return int(self._trainer.state.global_step)

    def _configured(self) -> tuple[int, int, int]:
        trainer, args = self._trainer, self._trainer.args
        rows, processes = args.per_device_train_batch_size, trainer.accelerator.num_processes
        if args.accelerator_config.split_batches:
            rows //= processes
        return rows, rows * args.gradient_accumulation_steps, processes

    def _saved(self) -> dict[str, Any] | None:
        return _learned(self._trainer.state.stateful_callbacks)

    @property
    def learned(self) -> dict[str, Any] | None:
        learned, began = super().learned, self._trainer.rows_begun_with
        return learned and {**learned, "began with": astuple(began)}

    def _begin_with(self) -> int:
        return min(self._configured()[0], self._trainer.rows_begun_with.batch)

    def _checkpoint(self) -> str:
        return f"checkpoint-{self._trainer.state.global_step}"


@cache
def _state_class() -> type:
    """The class of what was found and learned, which goes to the trainer's own checkpoints."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    class AdaptiveState(TrainerCallback, ExportableState):
        learned: dict[str, Any] | None = None
        steps: TrainerStep | None = None
        """The steps that have learned it, which are asked when a checkpoint is made."""

        def state(self) -> dict[str, Any]:
            if self.steps is not None:
                self.learned = self.steps.learned
            return {"args": {}, "attributes": {"learned": self.learned}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            # The trainer saves only states that it knows, and a checkpoint of the plain one has not this.
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    return AdaptiveState


def _learned(states: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was learned, among the states of callbacks."""
    saved = states.get(_state_class().__name__) or {}
    learned: dict[str, Any] | None = saved.get("attributes", {}).get("learned")
    return learned


def learned_in(checkpoint: str | None) -> dict[str, Any] | None:
    """What was learned in a checkpoint; None where there is none, or it has nothing of ours."""
    path = Path(checkpoint or "", "trainer_state.json")
    if not checkpoint or not path.exists():
        return None
    return _learned(json.loads(path.read_text()).get("stateful_callbacks") or {})


def state_in(trainer: Any) -> Any:
    """The callback that keeps what was found and learned, added if it is not there."""
    kind = _state_class()
    if kind not in map(type, trainer.callback_handler.callbacks):
        trainer.add_callback(kind)
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, kind))


def collectives_of(step: AdaptiveStep, accelerator: Any) -> dict[str, Any]:
    """An accelerator's methods that launch collectives, which all ranks of a step then do, or none;
    ``gather_for_metrics`` calls the first."""
    return {
        "gather": partial(_gathered, step, accelerator, accelerator.gather),
        **{
            name: partial(step.collective, getattr(accelerator, name))
            for name in ("reduce", "pad_across_processes")
        },
    }


def _gathered(
    step: AdaptiveStep, accelerator: Any, gather: Callable[[Any], Any], value: Any
) -> Any:
    if type(value) is not torch.Tensor or accelerator.state.debug:  # it compares shapes first
        return step.collective(gather, value)
    return step.train_step.collectives.gather(gather, value)
