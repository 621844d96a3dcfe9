"""Rows of a rollout, and what generates them: as small as they can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.decoder import VOCABULARY
from tests.helpers.models import tiny_llama
from torchtune_adaptive.recipe.rollout.generate import Generation
from torchtune_adaptive.recipe.rollout.rows import Row, draws

PADDING = 0
LONGEST_PROMPT, MAX_NEW = 9, 20


def policy(seed: int = 0, **settings: Any) -> nn.Module:
    """A model that gives all logits at once, in evaluation mode."""
    model = tiny_llama(**{"sharded": False, "layers": 2, "seed": seed, **settings})
    model.set_num_output_chunks(0)  # type: ignore[operator]
    return model.eval()


def prompted(number: int, seed: int = 0) -> list[Row]:
    """Rows with prompts of different lengths; of the same seed, the first are the same."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(number):
        length = int(torch.randint(1, LONGEST_PROMPT + 1, (1,), generator=generator))
        prompt = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        rows.append(Row(index, prompt, draws(seed, 0, index, MAX_NEW)))
    return rows


def answered(number: int, seed: int = 0, value_terms: bool = False) -> list[Row]:
    """Rows with responses of 1 to 20 tokens, and all numbers that losses need, drawn at random."""
    rows = prompted(number, seed)
    generator = torch.Generator().manual_seed(seed)
    for at, row in enumerate(rows):
        length = (1, MAX_NEW, 2, MAX_NEW - 1, 7)[at % 5]
        row.response = torch.randint(1, VOCABULARY, (length,), generator=generator)
        row.old, row.reference = (torch.randn(length, generator=generator) - 3 for _ in range(2))
        row.reward = float(torch.randn(1, generator=generator))
        if value_terms:
            row.values = torch.randn(length + 1, generator=generator)
        else:
            row.advantages = row.reward
    return rows


def generation(model: nn.Module, **settings: Any) -> Generation:
    standard: dict[str, Any] = {
        "padding_id": PADDING,
        "stop_tokens": [1, 5],
        "max_new": MAX_NEW,
        "temperature": 1.0,
        "top_k": None,
        "width": LONGEST_PROMPT,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return Generation(model, **standard | settings)
