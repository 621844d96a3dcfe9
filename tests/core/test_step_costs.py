"""What a healthy step adds to a plain one: calls, waits, readings, requests. The counts are limits."""

from __future__ import annotations

import pytest

from tests.helpers.accelerator import Card
from tests.helpers.decoder import adamw, batch, tiny_decoder, train_step
from tests.helpers.library import Trained, collate, rows_of
from tests.helpers.ranks import Alone, run_ranks
from tests.helpers.step_costs import Costs, costs_of, plain_loop
from torchtune_adaptive.core import Recovery
from torchtune_adaptive.core.step.retry import StepRunner

ROWS = 8


def ours_and_plain(way: str, micro_batches: int) -> tuple[Costs, Costs]:
    """The costs of our step, and of a plain one."""
    size, rows = ROWS // micro_batches, rows_of(ROWS)
    run, other = Trained(way, layers=12), Trained(way, layers=12)
    batches = lambda: (collate(rows[at : at + size]) for at in range(0, ROWS, size))  # noqa: E731
    plain = plain_loop(other.model, other.optimizer, other.forward, batches)
    for _ in range(4):  # the first ones allocate, and are recorded
        plain()
        run.step(rows, collate, size)
    return costs_of(lambda: run.step(rows, collate, size)), costs_of(plain)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_rank_makes_few_calls_and_waits_once(micro_batches: int) -> None:
    ours, plain = ours_and_plain("alone", micro_batches)
    added = ours - plain
    # A plain step makes 1,100 calls with one micro-batch, and 1,900 with four.
    assert added.calls <= 107 + 65 * micro_batches
    assert added.waits <= 0  # the optimizer's own are in both
    assert (ours.of_store, ours.agreements, ours.collectives) == (0, 0, 0)


def on_ranks(way: str) -> tuple[Costs, Costs]:
    return ours_and_plain(way, 2)


@pytest.mark.ranks
def test_two_ranks_agree_once_and_exchange_once() -> None:
    for ours, plain in run_ranks(on_ranks, 2, "fsdp"):
        assert ours.waits <= plain.waits
        assert (ours.of_store, ours.agreements) == (0, 1)
        assert ours.collectives == plain.collectives


def test_a_step_reads_the_statistics_of_the_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(16 << 30)
    card.install(monkeypatch)
    model = tiny_decoder(sharded=False)
    step = train_step(model, [adamw(model)], memory=card.memory(), ranks=Alone(), survive=True)
    runner = StepRunner(step, advice=lambda: "")
    runner.begin(4, Recovery(4, [1, 2, 4], None, 0))
    take = lambda: runner.run(lambda size: [batch(size), batch(size)], 1)  # noqa: E731
    take()
    before = card.readings
    take()
    assert card.readings - before == 1
