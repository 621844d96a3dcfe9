"""Preference optimization of all weights, with the reference as a second model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchtune.training import disable_dropout

from torchtune_adaptive.core import Objective
from torchtune_adaptive.recipe.data.rows import Rows
from torchtune_adaptive.recipe.kinds.full import Full
from torchtune_adaptive.recipe.kinds.preference import Pairs, Preference
from torchtune_adaptive.recipe.setup.optimizer import build_loss


class FullDPO(Full):
    """Trains every weight to prefer what is chosen."""

    def prepare(self, model: nn.Module) -> nn.Module:
        disable_dropout(model)  # or log-probabilities would differ from the reference's by chance
        return model

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss_fn = build_loss(self.asked, self.environment, model)
        [reference] = frozen
        return Preference(loss_fn, reference, frozen)

    def rows(self) -> Rows:
        return Pairs()


TheKind = FullDPO
