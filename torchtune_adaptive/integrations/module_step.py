"""The steps of one call of a Lightning trainer's ``fit``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import LBFGS

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Buffers, Generators
from torchtune_adaptive.integrations.first_look import look
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.row_step import RowStep, normalizes
from torchtune_adaptive.integrations.rows import KeptRows
from torchtune_adaptive.integrations.terms import Terms
from torchtune_adaptive.library import AdaptiveStep


class ModuleStep(RowStep):
    """The steps of a module, with its own ``training_step``; ``saved`` is what was ``learned`` in the
    checkpoint that training resumes from."""

    def __init__(
        self,
        module: Any,
        trainer: Any,
        training_step: Callable[..., Any],
        saved: dict[str, Any] | None,
    ) -> None:
        # The mixin comes before the classes that may have these, so it has no defaults of its own.
        options, restored = getattr(module, "adaptive", Adaptive()), getattr(module, "restored", ())
        super().__init__(module, restored, options, trainer.train_dataloader, module.device)
        self._terms_of = getattr(module, "adaptive_num_items", None)
        self._module, self._trainer = module, trainer
        self._training_step = training_step
        self._resumed = saved
        self._takes_index = len(inspect.signature(training_step).parameters) > 1
        self._rows, self._weight = 0, 0
        """The rows of the micro-batch, and the terms in its loss."""
        self._voting: AdaptiveStep | None = None
        """The step that is taken or tried."""
        self._logged: dict[str, list[_Value]] | None = None
        """What a step logs, by name: each value with its weight and its rows, and how to log it."""

    def take(self, batches: Sequence[KeptRows], batch_idx: int, log: Callable[..., None]) -> float:
        """Take a step with the rows of these batches; gives its loss."""
        trainer = self._trainer
        self._batch_idx = batch_idx
        # The trainer divides by this number of batches, also where an epoch ends with fewer.
        self._of_step = batches
        self._part = len(batches) / trainer.accumulate_grad_batches
        self._terms = max(1, sum(self._count(batch.rows, batch.inputs) for batch in batches))
        self._logged = {}
        try:
            outcome = self._take(batches)
        finally:
            logged, self._logged = self._logged, None
        for name, values in logged.items():
            rows = sum(each.rows for each in values)
            last = values[-1]
            log(name, _mean(values), *last.args, **last.named | {"batch_size": rows})
        for name, number in self.metrics.items():
            log(name, float(number), batch_size=self._rows_of_step)
        return outcome.loss

    def collect(self, name: str, value: Any, args: Any, named: Any) -> bool:
        """Keep what a micro-batch logs until the step is done; False outside of one."""
        if self._logged is None:
            return False
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        rows = named.get("batch_size") or self._rows
        self._logged.setdefault(name, []).append(_Value(value, self._weight, rows, args, named))
        return True

    def together(self, launch: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a function that launches collectives."""
        if self._voting is None:
            return launch(*args, **named)
        return self._voting.collective(launch, *args, **named)

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        module, trainer = self._module, self._trainer
        self._rows = len(batch["rows"])
        torch.clear_autocast_cache()  # of the micro-batch before, whose graph is gone
        inputs = trainer.precision_plugin.convert_input(batch["inputs"].value)
        inputs = module.on_before_batch_transfer(inputs, 0)
        inputs = trainer.strategy.batch_to_device(inputs, dataloader_idx=0)
        self._weight = self._count(batch["rows"], inputs)
        with trainer.precision_plugin.train_step_context():
            result = self._training_step(
                *((inputs, self._batch_idx) if self._takes_index else (inputs,))
            )
        loss = result["loss"] if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"training_step: returned {loss!r}, and must return the loss of each batch. None would skip "
                "it on one rank only."
            )
        share = 1 / len(self._of_step) if self._whole else self._weight / self._terms
        return loss * (share * self._part)

    def _look_at_loss(self, step: AdaptiveStep) -> str | None:
        if why := normalizes(step):
            return why
        drawn, buffers = Generators(self._device), Buffers(step.train_step.model)
        rows, of_batch = [row for one in self._of_step for row in one.rows], len(self._of_step[0])
        with self.around(step):
            by = partial(look, step, self._forward, of_batch)
            terms, why = self._look(self._of_step[0], rows, by, step)
        drawn.restore()
        buffers.restore()
        self.restore()
        if terms is Terms.ITEMS:  # shares of the step add up
            return None
        return why or "its loss is not a mean over " + (
            "rows" if self._terms_of is None else "what adaptive_num_items counts"
        )

    def _count(self, rows: Sequence[Any] | torch.Tensor, inputs: Any) -> int:
        """The terms in a batch."""
        return len(rows) if self._terms_of is None else int(self._terms_of(inputs))

    @contextmanager
    def around(self, step: AdaptiveStep) -> Iterator[None]:
        self._voting = step
        try:
            # The trainer is in the context of its precision already, in which nothing goes backward.
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self._voting = None

    def new_step(self) -> AdaptiveStep:
        model = self._trainer.strategy.model
        [optimizer] = self._trainer.optimizers  # as automatic optimization has it
        if isinstance(optimizer, LBFGS):
            raise UsageError("optimizer: LBFGS takes several passes in a step. Use another.")
        functions = getattr(self._module, "activation_checkpointing", None)
        if not isinstance(functions, tuple):  # a flag of the module's own, say
            functions = None
        return self._step_of(model, optimizer, activation_checkpointing=functions)

    def _configured(self) -> tuple[int, int, int]:
        loader = self._loader
        rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", self._rows_of_step)
        return rows, rows * self._trainer.accumulate_grad_batches, self._trainer.world_size

    def _saved(self) -> dict[str, Any] | None:
        return self._resumed

    def _checkpoint(self) -> str:
        return f"the checkpoint of step {self._trainer.global_step}"

    def restore(self) -> None:
        super().restore()
        if self._logged is not None:
            self._logged.clear()


@dataclass(frozen=True)
class _Value:
    """A value that a micro-batch logs."""

    value: Any
    weight: int
    rows: int
    args: Any
    named: dict[str, Any]


def _mean(values: Sequence[_Value]) -> Any:
    """The mean of numbers; the last of anything else, such as metrics that keep count themselves."""
    last = values[-1].value
    if not isinstance(last, (torch.Tensor, int, float)) or len(values) == 1:
        return last
    return sum(each.value * each.weight for each in values) / max(1, sum(e.weight for e in values))
