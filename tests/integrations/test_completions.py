"""Completions as rows, and what they draw when they are generated in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations.completions import Draws, longest, rows_of, together

CPU = torch.device("cpu")
PROBABILITIES = torch.rand(6, 50, generator=torch.Generator().manual_seed(1))
LENGTHS = (3, 9, 5, 2, 7, 4)
"""The tokens after which each row ends."""


def generated(rows: Sequence[int]) -> list[list[int]]:
    """The tokens of some rows, as ``generate`` samples them: of all of them at once, until the last ends."""
    drawn = [
        torch.multinomial(PROBABILITIES[list(rows)], num_samples=1).squeeze(1)
        for _ in range(max(LENGTHS[row] for row in rows))
    ]
    return [
        column[: LENGTHS[row]].tolist()
        for row, column in zip(rows, torch.stack(drawn, 1), strict=True)
    ]


@pytest.mark.parametrize("size", [6, 4, 3, 1])
def test_rows_draw_the_same_in_parts_as_together(size: int) -> None:
    torch.manual_seed(0)
    together, after = generated(range(6)), torch.rand(3)
    torch.manual_seed(0)
    draws, made = Draws(6, CPU), []
    for at in range(0, 6, size):
        part = range(at, min(at + size, 6))
        with pytest.raises(torch.OutOfMemoryError):
            draws.of(part, lambda part=part: (generated(part), _lose()))
        made += draws.of(part, lambda part=part: generated(part))
    draws.end()
    assert made == together
    assert torch.equal(torch.rand(3), after), "what follows draws other numbers"


def _lose() -> None:
    raise torch.OutOfMemoryError


def test_parts_would_draw_other_numbers_by_themselves() -> None:
    torch.manual_seed(0)
    together = generated(range(6))
    torch.manual_seed(0)
    assert [*generated(range(3)), *generated(range(3, 6))] != together


def batch(rows: int, prompt: int, completion: int, first: int = 0) -> dict[str, Any]:
    ids = torch.arange(first, first + rows)
    return {
        "prompt_ids": ids[:, None].expand(rows, prompt),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": ids[:, None].expand(rows, completion),
        "completion_mask": torch.zeros(rows, completion, dtype=torch.long),
        "ref_per_token_logps": torch.rand(rows, completion),
        "advantages": ids.float(),
        "num_items_in_batch": torch.tensor(7),
        "images": None,
    }


def test_completions_go_together_again() -> None:
    one, other = batch(3, 2, 5), batch(2, 2, 5, first=3)
    rows = [*rows_of(one), *rows_of(other)]
    made = together(rows[1:4])
    assert made["completion_ids"][:, 0].tolist() == [1, 2, 3]
    assert made["advantages"].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(made["ref_per_token_logps"][:2], one["ref_per_token_logps"][1:])
    assert made["num_items_in_batch"] == 7 and made["images"] is None
    for name, value in together(rows[:3]).items():
        assert value is None or torch.equal(value, one[name])


def test_the_longest_completion_has_all_tokens() -> None:
    made = together([longest(rows_of(batch(3, 2, 5))[0], 8, 16)] * 4)
    shapes = {name: tuple(value.shape) for name, value in made.items() if value is not None}
    assert shapes == {
        "prompt_ids": (4, 8),
        "prompt_mask": (4, 8),
        "completion_ids": (4, 16),
        "completion_mask": (4, 16),
        "ref_per_token_logps": (4, 16),
        "advantages": (4,),
        "num_items_in_batch": (),
    }
    assert made["prompt_mask"].all() and made["completion_mask"].all()


def test_a_batch_with_something_besides_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="num_images: a list in a batch of completions"):
        rows_of(batch(2, 2, 2) | {"num_images": [1, 0]})
