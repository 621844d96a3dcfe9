"""A first look at the loss of a trainer: a few are computed to see what a loss is a mean of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.row_step import OnHost
from torchtune_adaptive.integrations.terms import Terms, TermsFinder
from torchtune_adaptive.library import AdaptiveStep


def terms_of_loss(
    trainer: Any,
    model: torch.nn.Module,
    step: AdaptiveStep,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], Any],
    items: Any,
    batches: int = 1,
) -> Terms:
    """What the loss of a trainer is a mean of, on all ranks.

    Args:
        rows: some rows, as many on each rank.
        items: what a sum is divided by, as ``compute_loss`` gets it; None if it gets nothing.
        batches: the batches of a step.

    Raises:
        UsageError: it is a mean of nothing that is known.
    """

    def loss_alone(held: OnHost) -> list[float]:
        """The loss of a batch, as in evaluation."""
        from accelerate.utils import send_to_device

        tried = held.value
        torch.manual_seed(tried.seed)
        inputs = send_to_device(tried.inputs, trainer.args.device)
        divisor = None if items is None else items * tried.items
        with (
            # What the trainer itself divides by follows the items, as both do in a larger step.
            mock.patch.object(
                trainer, "current_gradient_accumulation_steps", batches * tried.items, create=True
            ),
            # Not compiled for these few shapes, and yet by way of what shards the model, maybe outside.
            torch.compiler.set_stance("force_eager"),
            private.unpacked(bare),
            trainer.compute_loss_context_manager(),
        ):
            return [float(trainer.compute_loss(model, inputs, num_items_in_batch=divisor))]

    bare = trainer.accelerator.unwrap_model(model)
    losses = step.forward_only(loss_alone, name="a first look at the loss")
    finder = TermsFinder(
        lambda tried: losses(tried, lambda one: OnHost(one[0]), 1),
        collate,
        rows,
        step.ranks,
        rounding=_rounding(bare, trainer.args.bf16),
    )
    if items is not None and finder.divides_by_items():
        return Terms.ITEMS
    terms = finder.mean_of()
    if terms is None:
        raise UsageError(
            f"compute_loss: the loss of {type(bare).__name__} is not divided by num_items_in_batch, and is a "
            "mean of neither rows nor labels, so it follows how rows are put together. Divide a sum over "
            "them by num_items_in_batch, in compute_loss_func, or use the plain trainer."
        )
    return terms


def _rounding(model: torch.nn.Module, half: bool) -> float:
    """The relative error of a loss."""
    kinds = {each.dtype for each in model.parameters() if each.is_floating_point()}
    kinds |= {torch.bfloat16} if half else set()
    return max(8 * torch.finfo(kind).eps for kind in kinds)
