"""An estimate's step is whole: what it takes it frees, and what stays is what training keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from torchtune_adaptive.planner.memory.decoder import Decoder, Finetuning
from torchtune_adaptive.planner.memory.estimate import _WrittenStep, estimate
from torchtune_adaptive.planner.memory.peak import DeviceLimits

SMALL = Decoder(
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    embed=32,
    intermediate=96,
    vocabulary=1000,
    longest=64,
    positions=4,
)
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 96
DEVICE = DeviceLimits("device", 1 << 30)
ADAPTED = frozenset({"q_proj", "v_proj", "w1", "w2", "w3", "output"})
DECODERS = [
    replace(SMALL, tied=tied, gemma2=gemma2, kv_heads=kv_heads)
    for tied, gemma2, kv_heads in product((False, True), (False, True), (2, 4))
]
WAYS = {
    "full": Finetuning(),
    "checkpointed in part": Finetuning(checkpointed=lambda number: number % 2 == 0),
    "in backward": Finetuning(in_backward=True, copied=2),
    "accumulation": Finetuning(micro_batches=2, copied=2),
    "sharded": Finetuning(ranks=4, micro_batches=2),
    "kept after forward": Finetuning(ranks=4, reshards=False),
    "tables apart": Finetuning(ranks=4, apart=frozenset({"tok_embeddings", "output"})),
    "on the host": Finetuning(ranks=4, on_host=True),
    "offloaded": Finetuning(offloads=True, checkpointed=lambda number: False),
    "adapters": Finetuning(adapted=ADAPTED, adapter_rank=4, dropout=True),
    "sharded adapters": Finetuning(ranks=4, adapted=ADAPTED, adapter_rank=4),
    "quantized": Finetuning(adapted=ADAPTED, adapter_rank=4, quantized=True, micro_batches=2),
    "one chunk": Finetuning(chunks=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_frees_what_it_takes(way: str) -> None:
    for decoder in DECODERS:
        start_up, step = _WrittenStep(decoder, WAYS[way], 2, 16).written(searches=False)
        assert step.renumbered().most_in_use() > 0  # raises if anything is left, or is freed twice
        assert start_up.kept is not None
        kept = sum(each.event.nbytes for each in start_up.kept)
        state = sum(event.nbytes for event in start_up.first_step.events)
        assert kept == pytest.approx(state, abs=len(start_up.kept))  # each is rounded down


def test_what_stays_is_weights_and_state() -> None:
    def held(how: Finetuning, decoder: Decoder = SMALL) -> int:
        start_up, _ = _WrittenStep(decoder, how, 1, 2).written(searches=True)
        events = (*start_up.set_up.events, *start_up.first_step.events)
        return sum(event.nbytes for event in events)

    table, positions = 1000 * 32, 64 * 8 * 4
    numbers = 3 * LAYER + 2 * table
    assert held(Finetuning()) == positions + (2 + 4) * numbers
    assert held(Finetuning(), replace(SMALL, tied=True)) == positions + (2 + 4) * (numbers - table)
    assert held(Finetuning(ranks=4)) == positions + (2 + 4) * numbers // 4
    assert held(Finetuning(on_host=True)) == positions
    adapter = 8 * (32 + 32)  # of rank 8, on queries
    lora = Finetuning(adapted=frozenset({"q_proj"}), adapter_rank=8)
    assert held(lora) == positions + 2 * numbers + 3 * (2 + 4) * adapter
    saved = 3 * LAYER * (2 - 0.5 - 1 / 64)
    assert held(replace(lora, quantized=True)) == pytest.approx(held(lora) - saved, abs=100)


def test_what_saves_memory_saves_memory() -> None:
    def peak(how: Finetuning) -> int:
        wide = replace(SMALL, layers=12, embed=512, intermediate=2048, head_dim=128)
        return estimate(wide, how, 8, 512, DEVICE).live

    chunked = Finetuning(checkpointed=lambda number: False)
    half = replace(chunked, checkpointed=lambda number: number > 6)
    assert peak(Finetuning()) < peak(half) < peak(chunked)
    assert peak(replace(chunked, offloads=True)) < peak(chunked)
    assert peak(replace(chunked, ranks=8)) < peak(chunked)
    lora = replace(chunked, adapted=frozenset({"q_proj"}), adapter_rank=8)
    assert peak(lora) < peak(chunked)
    assert peak(lora) < peak(replace(lora, dropout=True))
