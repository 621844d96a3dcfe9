"""The steps of one call of a trainer's ``train``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from torchtune_adaptive.common import UsageError, counted
from torchtune_adaptive.integrations.rows import Keeping, Rows, keeping_in, longest, tokens_in
from torchtune_adaptive.integrations.votes import voting
from torchtune_adaptive.library import AdaptiveStep, find_batch_size

TrainingStep = Callable[[Any, Any, Any], Any]
"""The trainer's own ``training_step``."""

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""How a model's methods for it begin; the older names warn where there are others."""


class TrainerStep:
    """The steps of a trainer.

    Args:
        trainer: the trainer.
        loader: its loader, whose batches are ``Rows``.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._trainer = trainer
        self._loader = loader
        self._step: AdaptiveStep | None = None
        self._size = 0
        self._rows_of_step = 0
        self._kept: dict[str, Any] = {}

    def take(
        self, model: Any, batches: Sequence[Rows], training_step: TrainingStep, items: Any
    ) -> torch.Tensor:
        """Take a step with the last of its batches; until then there is nothing to do.

        Args:
            model: the model, as the trainer has wrapped it.
            batches: the loader's batches of the step.
            training_step: the trainer's own.
            items: what that divides a sum by.
        """
        trainer = self._trainer
        device = trainer.args.device
        if not trainer.accelerator.sync_gradients:
            return torch.zeros((), device=device)
        rows = [row for batch in batches for row in batch.rows]
        self._training_step, self._model, self._items = training_step, model, items
        self._rows_of_step = len(rows)
        self._keep()
        if self._step is None:
            self._keeping.require_repeatable(batches[0])
            self._step = self._begin(model, len(rows))
        with self._own_backward(self._step):
            outcome = self._step(rows, self._micro_batch, self._size, self._lengths(rows))
        state_in(trainer).learned = {
            "size": self._size,
            "for": self._circumstances(),
            "step": self._step.state_dict(),
        }
        return torch.tensor(outcome.loss, device=device)

    # --- one micro-batch ------------------------------------------------------------------------

    @property
    def _keeping(self) -> Keeping:
        """The collate function of the loader, which may drop columns of a row first."""
        return keeping_in(self._loader.collate_fn)

    def _micro_batch(self, rows: Sequence[Any]) -> dict[str, Any]:
        # Rows are told apart from inputs: the tensors of some collate functions have no row for each.
        return {"inputs": _Held(self._keeping.again(rows)), "rows": torch.empty(len(rows))}

    def _lengths(self, rows: Sequence[Any]) -> list[int] | None:
        """The tokens in each row, where micro-batches are sized in them; a row may have all there may be."""
        if not self._trainer.adaptive.tokens:
            return None
        return [max(1, min(tokens_in(self._keeping.again([row])), self._size)) for row in rows]

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The part of a micro-batch in the loss of this rank."""
        trainer, found = self._trainer, self._found
        found.clear()
        # What a loss that is a mean over rows is divided by.
        trainer.current_gradient_accumulation_steps = self._rows_of_step / len(batch["rows"])
        self._training_step(self._model, copy.copy(batch["inputs"].value), self._items)
        if len(found) != 1:
            raise UsageError(
                f"training_step: it called accelerator.backward {counted(len(found), 'time')}, and must call "
                "it once, with the loss of the micro-batch."
            )
        return found.pop()  # or what it refers to would outlive a lost step

    @contextmanager
    def _own_backward(self, step: AdaptiveStep) -> Iterator[None]:
        """The trainer's ``backward`` only tells the loss: that of the step follows."""
        trainer = self._trainer
        batches = trainer.current_gradient_accumulation_steps
        self._found: list[torch.Tensor] = []
        trainer.accelerator.backward = lambda loss, **_: self._found.append(loss)
        try:
            with voting(trainer.accelerator, step):
                yield
        finally:
            del trainer.accelerator.backward
            trainer.current_gradient_accumulation_steps = batches

    # --- before the first step ------------------------------------------------------------------

    def _begin(self, model: Any, rows: int) -> AdaptiveStep:
        trainer, options = self._trainer, self._trainer.adaptive
        step = AdaptiveStep(
            model,
            trainer.optimizer,
            self._forward,
            optimizer_steps=False,
            memory_limit=options.memory_limit,
            grow_back_after=options.grow_back_after,
            relief=_checkpointing(trainer),
            restore=self._restore,
            frozen=[each for each in (getattr(trainer, "ref_model", None),) if each is not None],
        )
        ceiling = min(rows, options.ceiling or rows)
        self._size = min(trainer.args.per_device_train_batch_size, ceiling)
        saved = trainer.state.stateful_callbacks.get(_state_class().__name__) or {}
        learned = saved.get("attributes", {}).get("learned")
        if learned and learned["for"] == self._circumstances():
            self._size = learned["size"]
            step.load_state_dict(learned["step"])
            return step
        searches = options.search and step.train_step.memory.measured
        if searches or options.tokens:
            row = longest(self._loader.dataset, self._loader.collate_fn, trainer.args.device)
            [row] = self._loader.collate_fn([row]).rows
        if searches:
            self._size = self._search(step, row, ceiling, several=rows > 1)
        if options.tokens:
            self._size *= tokens_in(self._keeping.again([row]))
        return step

    def _search(self, step: AdaptiveStep, row: Any, ceiling: int, several: bool) -> int:
        trainer = self._trainer
        with self._own_backward(step):
            found = find_batch_size(
                step,
                lambda rows: self._micro_batch([row] * rows),
                ceiling=ceiling,
                accumulation=1 + several,
                rounding="none" if trainer.adaptive.tokens else "power_of_two",
                headroom=trainer.adaptive.headroom,
            )
        return int(found)

    def _circumstances(self) -> str:
        """What the size was found for; with anything else, a resumed run searches again."""
        trainer, args = self._trainer, self._trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return json.dumps([asdict(trainer.adaptive), trainer.accelerator.num_processes, rows])

    # --- what a forward pass changes on the host ------------------------------------------------

    def _keep(self) -> None:
        own = vars(self._trainer)
        self._kept = {
            name: copy.deepcopy(own[name]) for name in self._trainer.restored if name in own
        }

    def _restore(self) -> None:
        vars(self._trainer).update(copy.deepcopy(self._kept))


class _Held:
    """A collated batch; it goes to the device where the trainer sends it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@cache
def _state_class() -> type:
    """The class of what was found and learned, which goes to the trainer's own checkpoints."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    class AdaptiveState(TrainerCallback, ExportableState):
        learned: dict[str, Any] | None = None

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"learned": self.learned}}

    return AdaptiveState


def state_in(trainer: Any) -> Any:
    """The callback that keeps what was found and learned, added if it is not there."""
    kind = _state_class()
    if kind not in map(type, trainer.callback_handler.callbacks):
        trainer.add_callback(kind)
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, kind))


def _checkpointing(trainer: Any) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """The two functions that turn activation checkpointing on and off, where it is off and can be on."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.args.torch_compile or getattr(plugin, "activation_checkpointing", False):
        return None
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None
    name = next(each for each in _CHECKPOINTING if hasattr(model, f"{each}_enable"))
    if getattr(model, f"is_{name}"):
        return None
    enable, disable = getattr(model, f"{name}_enable"), getattr(model, f"{name}_disable")
    return lambda: enable({"use_reentrant": False}), disable
