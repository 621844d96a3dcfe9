"""Memory runs out on one rank, at every operation there is; the others never wait, and no bit changes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.helpers.faults import FailingMemory
from tests.helpers.models import adamw, batch, local_values, same_bits, tiny_llama, train_step
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.probe import Probe


def fail_everywhere(
    lora: bool, checkpointing: bool, accumulation: int, stride: int = 1, **settings: Any
) -> dict[str, int]:
    """Inject at every operation of a trial, on alternating ranks; after each, take a healthy step."""
    ranks = Ranks(timeout=20)
    model = tiny_llama(lora=lora, checkpointing=checkpointing, **settings)
    optimizer = adamw(model)
    memory = FailingMemory()
    step = train_step(model, [optimizer], memory=memory, ranks=ranks, clip_grad_norm=1.0)
    gc.collect()
    gc.freeze()  # or each collection after a failure would walk through all of torch
    worst = batch(rows=1)
    probe = Probe(
        step=step,
        batch=lambda rows: worst,
        accumulation=lambda size: accumulation,
        headroom=0.0,
        ranks=ranks,
        entering=lambda phase: None,
    )

    def healthy_step() -> list[torch.Tensor]:
        optimizer.state.clear()  # a trial leaves numbers there until the search ends
        for number in range(accumulation):
            step.forward_backward(batch(rows=2, seed=number * ranks.size + ranks.rank))
        assert not step.apply().lost
        return local_values(model)

    with probe:
        assert probe.prime().fits
        expected = healthy_step()
        probe._snapshot.restore()
        with memory.fail_at(0) as fault:
            assert probe.trial(1).fits
        operations = fault.seen
        counts = {"operations": operations, "failed": 0, "wrong": 0, "disagreed": 0}
        for operation in range(1, operations + 1, stride):
            victim = operation % ranks.size
            with memory.fail_at(operation if ranks.rank == victim else 0):
                trial = probe.trial(1)
            counts["failed"] += trial.reports[victim].failed_in is not None
            counts["disagreed"] += trial.fits or trial.deciding_rank != victim
            counts["wrong"] += not same_bits(healthy_step(), expected)
            probe._snapshot.restore()
    return counts


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_trial_survives_running_out_at_every_operation(
    lora: bool, checkpointing: bool, accumulation: int
) -> None:
    for counts in run_ranks(fail_everywhere, 2, lora, checkpointing, accumulation, timeout=400):
        assert counts["failed"] == counts["operations"] > 300
        assert counts["wrong"] == counts["disagreed"] == 0
