"""Preference optimization (DPO): samples of two rows, and what is learned from comparing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.rlhf import get_batch_log_probs
from torchtune.training import disable_dropout

from torchtune_adaptive.core import Batch, Forward, Objective, Summed
from torchtune_adaptive.recipe.data.rows import Collate, Row, Rows
from torchtune_adaptive.recipe.kinds.recipe_kind import Full, LoRA, without_adapters
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.optimizer import build_loss

_SIDES = ("chosen", "rejected")


class Pairs(Rows):
    """Pairs of a chosen and a rejected row. A batch has all chosen rows, then all rejected ones."""

    sample = "pair"
    sequences = len(_SIDES)
    keys = ("chosen_input_ids", "rejected_input_ids")

    def length(self, row: Row) -> int:
        return max(len(row[f"{side}_input_ids"]) for side in _SIDES)

    def stretched(self, row: Row, length: int) -> Row:
        long: Row = {}
        for side in _SIDES:
            tokens = list(row[f"{side}_input_ids"])
            tokens = (tokens * -(-length // len(tokens)))[:length]
            long |= {f"{side}_input_ids": tokens, f"{side}_labels": tokens}
        return {**row, **long}

    def collate(self, asked: Asked, tokenizer: Any, objective: Any) -> Collate:
        padding, ignored = tokenizer.pad_id, objective.ignored

        def collate(rows: list[Row]) -> dict[str, Any]:
            tokens, labels = padded_collate_dpo(rows, padding, ignored)
            return {"tokens": tokens, "labels": labels}

        return collate

    def imagined(self, rows: int, length: int, simulated: bool) -> dict[str, torch.Tensor]:
        shape = (len(_SIDES) * rows, length)
        return {name: torch.empty(shape, dtype=torch.int64) for name in ("tokens", "labels")}


class Preference:
    """Prefers the chosen row of a pair to the rejected one, by more than a reference does.

    The loss is a mean over pairs, as in torchtune's recipes. There it is one of means, over micro-batches and
    ranks; the two are the same as long as all of these have as many pairs.

    Args:
        loss_fn: one of ``torchtune.rlhf.loss``: of log-probabilities of both sides, by the model that is
            trained and by the reference, the losses of the pairs and the rewards of both sides.
        reference: the function from tokens to the logits of the reference.
        frozen: the model that the reference is, if it is one of its own.
    """

    unit = "pairs"
    ignored: int = CROSS_ENTROPY_IGNORE_IDX
    metrics: Sequence[str] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "log_probs/chosen",
        "log_probs/rejected",
        "logits/chosen",
        "logits/rejected",
    )

    def __init__(
        self,
        loss_fn: nn.Module,
        reference: Callable[[torch.Tensor], torch.Tensor],
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.loss_fn = loss_fn
        self.frozen = frozen
        self._reference = reference

    def rows(self, batch: Batch) -> int:
        return len(batch["tokens"]) // len(_SIDES)

    def weight(self, batch: Batch) -> int:
        return self.rows(batch)

    def summed_loss(self, forward: Forward, batch: Batch, weight: int) -> Summed:
        tokens, labels = batch["tokens"], batch["labels"]
        # First, while nothing is kept for backward: logits are what takes most memory.
        with torch.no_grad():
            reference = get_batch_log_probs(self._reference(tokens), labels, self.ignored)
        logits = forward(tokens)
        mean_logits = logits.detach().mean(dim=(1, 2))
        log_probs = get_batch_log_probs(logits, labels, self.ignored)
        del logits  # backward does not need it
        sides = (*log_probs.chunk(2), *reference.chunk(2))
        losses, chosen, rejected = self.loss_fn(*sides)
        sums = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
        }
        for name, values in (("log_probs", log_probs.detach()), ("logits", mean_logits)):
            sums |= {f"{name}/{side}": v for side, v in zip(_SIDES, values.chunk(2), strict=True)}
        return Summed(losses.sum(), metrics={k: v.float().sum() for k, v in sums.items()})


class FullDPO(Full):
    """Trains every weight to prefer what is chosen; the reference is a second model."""

    def prepare(self, model: nn.Module) -> nn.Module:
        disable_dropout(model)  # or log-probabilities would differ from the reference's by chance
        return model

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss_fn = build_loss(self.asked, self.environment, model)
        [reference] = frozen
        return Preference(loss_fn, reference, frozen)

    def rows(self) -> Rows:
        return Pairs()


class LoRADPO(LoRA):
    """Trains adapters to prefer what is chosen; without them, the model is the reference."""

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss_fn = build_loss(self.asked, self.environment, model)
        return Preference(loss_fn, without_adapters(model, model))

    def rows(self) -> Rows:
        return Pairs()
