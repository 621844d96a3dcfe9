"""Mixtures of experts in plans of one's own steps: what they are told about the rows that each gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive.library.experts import Routing, sizes_of
from torchtune_adaptive.library.step_questions import EVEN, WORST


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(64, 2, 8), (7, 2, 4), (3, 1, 8)])
def test_rows_of_experts(tokens: int, chosen: int, experts: int) -> None:
    even, worst = (sizes_of(each, tokens, chosen, experts) for each in (EVEN, WORST))
    assert sum(even) == sum(worst) == tokens * chosen
    assert max(even) - min(even) <= 1 and worst == [tokens] * chosen
    assert len(even) == min(experts, tokens * chosen)


class LoopedExperts(nn.Module):
    """Experts as transformers computes them one after the other."""

    num_experts = 4

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> list[tuple[Any, int]]:
        mask = torch.nn.functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        return [(each[0], len(torch.where(mask[each[0]])[1])) for each in hit]


def test_experts_are_told_what_values_would_have_said() -> None:
    chosen = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    real = [(int(number), rows) for number, rows in LoopedExperts()(torch.ones(4, 3), chosen)]
    for routing, expected in ((EVEN, real), (WORST, [(0, 4), (1, 4)])):
        told = LoopedExperts()
        counts = Routing(routing, told)
        assert counts.experts == [told] and not counts.asked
        assert told(torch.ones(4, 3), chosen) == expected
        assert counts.asked
        assert torch.ones(3).nonzero().shape == (3, 1), "outside of experts it is torch's"


def test_what_ends_early_is_told_no_more() -> None:
    told = LoopedExperts()
    Routing(EVEN, told)
    with pytest.raises(RuntimeError):
        told(torch.ones(4, 3), torch.full((4, 2), -1))
    assert torch.ones(3).nonzero().shape == (3, 1)
