"""Random number generators as bytes: everything that they draw next is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchtune_adaptive.core.step.generator_bytes import pack_generators, unpack_generators
from torchtune_adaptive.core.step.snapshot import Generators

DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a number of each": lambda: (random.random(), np.random.random(), torch.rand(1)),
    "normal numbers, of which a second is kept": lambda: (random.gauss(0, 1), np.random.randn()),
    "more than they make at once": lambda: (
        [random.random() for _ in range(700)],
        np.random.random(700),
        torch.rand(700),
    ),
}


def drawn() -> list[Any]:
    normal = [random.gauss(0, 1) for _ in range(3)]
    return [random.random(), normal, np.random.randn(3).tolist(), torch.randn(5).tolist()]


@pytest.mark.parametrize("draw", DRAWS)
def test_they_go_on_where_they_were(draw: str) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    DRAWS[draw]()
    state = Generators(torch.device("cpu")).as_bytes()
    expected = drawn()
    for seed in (4, 5):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        DRAWS["normal numbers, of which a second is kept"]()
        Generators(torch.device("cpu")).load_bytes(state)
        assert drawn() == expected


def test_there_are_as_many_bytes_whatever_was_drawn() -> None:
    lengths = set()
    for draw in DRAWS.values():
        draw()
        lengths.add(len(Generators(torch.device("cpu")).as_bytes()))
    assert len(lengths) == 1


@pytest.mark.parametrize("accelerator", [None, torch.arange(16, dtype=torch.uint8)])
def test_bytes_become_what_they_were(accelerator: torch.Tensor | None) -> None:
    state = Generators(torch.device("cpu")).state_dict() | {"accelerator": accelerator}
    found = unpack_generators(torch.stack([pack_generators(state)] * 2)[1])
    assert torch.equal(found.pop("torch"), state.pop("torch"))
    on_accelerator, expected = found.pop("accelerator"), state.pop("accelerator")
    assert found == state
    assert expected is None if on_accelerator is None else torch.equal(on_accelerator, expected)
