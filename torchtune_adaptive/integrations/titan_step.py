"""The steps of a trainer of torchtitan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.common import UsageError, counted
from torchtune_adaptive.integrations.row_step import RowStep
from torchtune_adaptive.integrations.rows import KeptRows
from torchtune_adaptive.integrations.titan_rows import data_ranks
from torchtune_adaptive.library import AdaptiveStep


class TitanStep(RowStep):
    """The steps of a trainer, with its own ``forward_backward_step``; a row is a number, that of a row in the
    tensors of the step."""

    def __init__(self, trainer: Any, forward_backward: Callable[..., torch.Tensor]) -> None:
        counters = ("ntokens_seen",)  # of what goes forward
        super().__init__(trainer, counters, trainer.adaptive, trainer.dataloader, trainer.device)
        self._trainer = trainer
        self._forward_backward = forward_backward
        self._data_ranks = data_ranks(trainer)
        self._losses: list[torch.Tensor] = []
        """Those of the micro-batches that the step has taken."""

    def take(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Take a step with these rows, up to the gradient; gives the part of this rank in the loss, which has
        so many ``valid_tokens`` on all ranks."""
        self._inputs, self._labels = inputs, labels
        # The gradient of a step is a mean over ranks, and the trainer's is a sum.
        self._terms = valid_tokens / self._data_ranks
        self._losses.clear()
        self._take([KeptRows(range(len(labels)))])
        return torch.stack(self._losses).sum() / self._data_ranks

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The part of a micro-batch in the loss: what the trainer would go backward from.

        The trainer gets a copy of the loss that is connected to nothing, so its own ``backward`` ends there,
        and leaves the factor in ``grad`` that it has multiplied the loss by.
        """
        rows, loss_fn = batch["rows"], self._trainer.loss_fn
        found: list[Any] = []

        def disconnected(*arguments: Any, **named: Any) -> Any:
            made = loss_fn(*arguments, **named)
            loss, *metrics = made if isinstance(made, tuple) else (made,)
            end = loss.detach().requires_grad_()
            found.append((loss, end))
            return (end, *metrics) if isinstance(made, tuple) else end

        with mock.patch.object(self._trainer, "loss_fn", disconnected):
            value = self._forward_backward(
                input_dict={name: tensor[rows] for name, tensor in self._inputs.items()},
                labels=self._labels[rows],
                global_valid_tokens=self._terms,
            )
        if len(found) != 1 or found[0][1].grad is None:
            raise UsageError(
                f"forward_backward_step: it called loss_fn {counted(len(found), 'time')}, and must call it "
                "once, and go backward from what that returns."
            )
        self._losses.append(value.detach())
        loss, end = found.pop()  # or the graph would outlive a lost step
        return loss * end.grad

    def restore(self) -> None:
        super().restore()
        self._losses.clear()

    # --- what a step of rows needs to know ----------------------------------------------------------

    def new_step(self) -> AdaptiveStep:
        [optimizer] = self._trainer.optimizers.optimizers
        return self._step_of(self._trainer.model_parts[0], optimizer)

    def around(self, step: AdaptiveStep) -> AbstractContextManager[None]:
        return nullcontext()

    def _configured(self) -> tuple[int, int, int]:
        rows = self._trainer.config.training.local_batch_size
        return rows, self._rows_of_step, self._trainer.parallel_dims.world_size

    def _saved(self) -> dict[str, Any] | None:
        return None  # a checkpoint has only what the plain trainer's has

    def _micro_batch(self, rows: Sequence[int]) -> dict[str, Any]:
        # With the length, because collectives of tensor parallelism follow it.
        return {"rows": torch.tensor(rows), "length": torch.empty(0, *self._labels.shape[1:])}

    def _longest(self) -> int:
        return 0  # all have the same length
