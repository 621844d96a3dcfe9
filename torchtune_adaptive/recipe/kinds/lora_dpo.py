"""Preference optimization of adapters; without them, the model is the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchtune_adaptive.core import Objective
from torchtune_adaptive.recipe.data.rows import Rows
from torchtune_adaptive.recipe.kinds.lora import LoRA, without_adapters
from torchtune_adaptive.recipe.kinds.preference import Pairs, Preference
from torchtune_adaptive.recipe.setup.optimizer import build_loss


class LoRADPO(LoRA):
    """Trains adapters to prefer what is chosen."""

    def objective(self, model: nn.Module, frozen: Sequence[nn.Module]) -> Objective:
        loss_fn = build_loss(self.asked, self.environment, model)
        return Preference(loss_fn, without_adapters(model, model))

    def rows(self) -> Rows:
        return Pairs()


TheKind = LoRADPO
