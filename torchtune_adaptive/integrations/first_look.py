"""A first look at the loss of a trainer: a few are computed to see what a loss is a sum or a mean of."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

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
    batch: int,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], Any],
    items: Any,
    batches: int = 1,
) -> Found:
    """What the loss of a trainer is a sum or a mean of, on all ranks.

    Args:
        batch: the rows of a batch.
        rows: some rows, as many on each rank.
        items: what a sum is divided by, as ``compute_loss`` gets it; None if it gets nothing.
        batches: the batches of a step.
    """

    def loss_of(tried: Any) -> torch.Tensor:
        from accelerate.utils import send_to_device

        # Some trainers change what they get.
        inputs = copy.copy(send_to_device(tried, trainer.args.device))
        with (
            mock.patch.object(trainer, "current_gradient_accumulation_steps", batches, create=True),
            private.unpacked(bare),
            trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            return loss

    bare = trainer.accelerator.unwrap_model(model)
    return look(step, loss_of, batch, rows, collate, told=items is not None)


def look(
    step: AdaptiveStep,
    loss_of: Callable[[Any], torch.Tensor],
    batch: int,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], Any],
    told: bool = False,
) -> Found:
    """What the losses of batches are a sum or a mean of, computed by ``loss_of`` as in evaluation."""
    # TF32 has as many digits as float16.
    exact = torch.get_float32_matmul_precision() == "highest"
    kinds = {torch.float32 if exact else torch.float16}

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Note the precision in which a layer computes: of weights, of autocast, of FSDP, of adapters."""
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            kinds.add(output.dtype)

    def loss_alone(held: OnHost) -> list[float]:
        seed, tried = held.value
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed)
        # Not compiled for these few shapes, and yet by way of what shards the model, maybe outside.
        with torch.compiler.set_stance("force_eager"):
            return [float(loss_of(tried))]

    losses = step.forward_only(loss_alone, name="a first look at the loss")
    by_ranks = lambda tried: losses(tried, lambda one: OnHost(one[0]), 1)  # noqa: E731
    rounding = lambda: max(_ROUNDING.get(kind, 2e-2) for kind in kinds)  # noqa: E731
    hook = register_module_forward_hook(note)
    try:
        return TermsFinder(by_ranks, collate, rows, batch, step.ranks, rounding, told).found()
    finally:
        hook.remove()
