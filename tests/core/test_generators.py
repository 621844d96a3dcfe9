"""Random number generators that are set back: everything that they draw next is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchtune_adaptive.core.step.generators import Generators

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
    kept = Generators(torch.device("cpu"))
    state, expected = kept.as_bytes(), drawn()
    for seed in (4, 5):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        DRAWS["normal numbers, of which a second is kept"]()
        Generators(torch.device("cpu")).load_bytes(state)
        assert drawn() == expected
        kept.restore()
        assert drawn() == expected


def test_there_are_as_many_bytes_whatever_was_drawn() -> None:
    lengths = set()
    for draw in DRAWS.values():
        draw()
        lengths.add(len(Generators(torch.device("cpu")).as_bytes()))
    assert len(lengths) == 1


@pytest.mark.parametrize("accelerator", [None, torch.arange(16, dtype=torch.uint8)])
def test_what_the_first_release_wrote_is_read(accelerator: torch.Tensor | None) -> None:
    (version, words, normal), numpy = random.getstate(), np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    written = {
        "python": [version, [*words], normal],
        "numpy": numpy,
        "torch": torch.get_rng_state(),
    }
    now, expected = Generators(torch.device("cpu")).as_bytes(), drawn()
    found = Generators.bytes_of({**written, "accelerator": accelerator})
    assert torch.equal(found, now) if accelerator is None else len(found) == len(now) + 16
    Generators(torch.device("cpu")).load_bytes(torch.stack([found] * 2)[1])
    assert drawn() == expected, "without the accelerator's, which is not here"


def test_another_generator_of_numpy_is_set_back_as_well() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        generators = Generators(torch.device("cpu"))
        assert not generators.have_moved()
        numbers = np.random.random(3).tolist()
        assert generators.have_moved()
        generators.restore()
        assert np.random.random(3).tolist() == numbers
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
