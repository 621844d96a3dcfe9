"""A first look at the loss of a trainer: a few are computed to see what a loss is a sum or a mean of."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.row_step import OnHost
from torchtune_adaptive.integrations.terms import Found, TermsFinder
from torchtune_adaptive.library import AdaptiveStep

_ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3}
"""The relative error of a loss, where rows go through alone and beside others. Of other kinds: 2 %."""


def terms_of_loss(
    trainer: Any,
    model: torch.nn.Module,
    step: AdaptiveStep,
    rows: Sequence[Any],
    batch: int,
    collate: Callable[[Sequence[Any]], Any],
    items: Any,
    batches: int = 1,
) -> Found:
    """What the loss of a trainer is a sum or a mean of, on all ranks.

    Args:
        rows: some rows, as many on each rank.
        batch: the rows of a batch.
        items: what a sum is divided by, as ``compute_loss`` gets it; None if it gets nothing.
        batches: the batches of a step.
    """

    def loss_alone(held: OnHost) -> list[float]:
        """The loss of a batch, as in evaluation."""
        from accelerate.utils import send_to_device

        seed, tried = held.value
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed)
        # Some trainers change what they get.
        inputs = copy.copy(send_to_device(tried, trainer.args.device))
        with (
            mock.patch.object(trainer, "current_gradient_accumulation_steps", batches, create=True),
            # Not compiled for these few shapes, and yet by way of what shards the model, maybe outside.
            torch.compiler.set_stance("force_eager"),
            private.unpacked(bare),
            trainer.compute_loss_context_manager(),
        ):
            return [float(trainer.compute_loss(model, inputs, num_items_in_batch=items))]

    bare = trainer.accelerator.unwrap_model(model)
    losses = step.forward_only(loss_alone, name="a first look at the loss")
    finder = TermsFinder(
        lambda tried: losses(tried, lambda one: OnHost(one[0]), 1),
        collate,
        rows,
        batch,
        step.ranks,
        rounding=_rounding(bare, trainer.args),
    )
    return finder.found()


def _rounding(model: torch.nn.Module, args: Any) -> float:
    """The relative error of a loss."""
    kinds = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if args.bf16:
        kinds.add(torch.bfloat16)
    if args.fp16 or torch.get_float32_matmul_precision() != "highest":  # TF32 has as many digits
        kinds.add(torch.float16)
    return max(_ROUNDING.get(kind, 2e-2) for kind in kinds)
