"""FSDP on stand-ins for cards, of which one is smaller: no rank is left waiting, and nothing is lost."""

from __future__ import annotations

import gc

import pytest

from tests.helpers.accelerator import Card
from tests.helpers.decoder import adamw, batch, local_values, tiny_decoder, train_step
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks

pytestmark = pytest.mark.ranks

GIB = 1 << 30
LARGE, SMALL = 32, 4


def train(small_cards: list[int]) -> tuple[list[bool], list[list[float]], int]:
    """Steps of ``SMALL`` rows, with one of ``LARGE`` in between where this rank's card is small."""
    ranks = Ranks(timeout=200)
    patch = pytest.MonkeyPatch()
    card = Card(16 * GIB)
    card.install(patch)
    model = tiny_decoder(layers=2)
    step = train_step(model, [adamw(model)], memory=card.memory(), ranks=ranks)
    gc.freeze()
    lost = []

    def take(rows: int) -> None:
        step.forward_backward(batch(rows=rows))
        lost.append(step.apply().lost)

    for _ in range(3):
        take(SMALL)
    room = int(step.memory.usage().peak_bytes * 1.2)
    if small_cards:
        with step.memory.capped(room if ranks.rank in small_cards else 16 * GIB):
            take(LARGE)
    take(SMALL)
    patch.undo()
    return lost, [v.flatten().tolist() for v in local_values(model)], card.waits_with_lock


@pytest.mark.rotating
@pytest.mark.parametrize("small", [[0], [1], [0, 1]])
def test_a_step_that_is_lost_on_one_card_is_lost_on_all_and_leaves_no_trace(
    small: list[int],
) -> None:
    healthy = run_ranks(train, 2, [])
    for (lost, values, waits), (_, expected, _) in zip(
        run_ranks(train, 2, small), healthy, strict=True
    ):
        assert lost == [False, False, False, True, False]
        assert values == expected
        assert waits == 0
