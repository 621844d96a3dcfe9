"""On a real device: real allocation failures, real capacity, real caps. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtune.models.llama2 import llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.models import local_values, same_bits
from torchtune_adaptive.batching.strategies import STRATEGIES, candidates, search
from torchtune_adaptive.device import device_memory
from torchtune_adaptive.device.accelerator import AcceleratorMemory
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.search.probe import Probe
from torchtune_adaptive.step.objective import NextTokenPrediction
from torchtune_adaptive.step.train_step import StepOptions, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 2 << 30


@pytest.fixture
def step() -> Iterator[TrainStep]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    with device:
        model = llama2(8192, 4, 8, 8, 512, 512).to(torch.bfloat16)
    model.set_num_output_chunks(8)
    yield TrainStep(
        model=model,
        optimizers=[torch.optim.AdamW(model.parameters(), fused=True)],
        objective=NextTokenPrediction(CEWithChunkedOutputLoss(8)),
        device=device,
        memory=device_memory(device, LIMIT),
        ranks=Ranks(),
        options=StepOptions(clip_grad_norm=1.0),
    )
    dist.destroy_process_group()
    torch.cuda.set_per_process_memory_fraction(1.0)


def batch(rows: int) -> dict[str, Any]:
    tokens = torch.randint(0, 8192, (rows, 512), generator=torch.Generator().manual_seed(rows))
    return {"tokens": tokens, "labels": tokens}


def probe_of(step: TrainStep) -> Probe:
    return Probe(
        step=step,
        batch=batch,
        accumulation=lambda size: 2,
        headroom=0.05,
        ranks=step.ranks,
        entering=lambda phase: None,
    )


def test_all_strategies_find_one_size_under_a_real_cap(step: TrainStep) -> None:
    found = set()
    for strategy in STRATEGIES:
        with probe_of(step) as probe:
            assert probe.prime().fits
            result = search(strategy, candidates("power_of_two", 1024, 0), probe.trial)
        found.add(result.size)
        for trial in result.trials:
            assert trial.deciding.peak_bytes <= LIMIT
    assert len(found) == 1 and found.pop() is not None


def test_a_search_leaves_no_trace(step: TrainStep) -> None:
    before, in_use = local_values(step.model), step.memory.in_use()
    generator = torch.cuda.get_rng_state()
    with probe_of(step) as probe:
        probe.prime()
        assert not probe.trial(4096).fits
        assert probe.trial(2).fits
    step.memory.release()
    assert same_bits([v.cpu() for v in before], [v.cpu() for v in local_values(step.model)])
    assert torch.equal(generator, torch.cuda.get_rng_state())
    assert step.memory.in_use() == in_use


def test_a_lost_step_is_followed_by_the_step_that_would_have_been(step: TrainStep) -> None:
    with probe_of(step) as probe:
        probe.prime()
        step.forward_backward(batch(4))
        step.apply()
        expected = [value.cpu() for value in local_values(step.model)]
    with probe_of(step) as probe:
        probe.prime()
        step.forward_backward(batch(4096))
        assert step.apply().lost
        step.forward_backward(batch(4))
        assert not step.apply().lost
        assert same_bits(expected, [value.cpu() for value in local_values(step.model)])


def test_capacity_leaves_out_what_neighbours_have(step: TrainStep) -> None:
    memory = step.memory
    assert isinstance(memory, AcceleratorMemory)
    assert memory.capacity() <= LIMIT
    free, total = torch.cuda.mem_get_info()
    assert device_memory(torch.device("cuda", 0)).capacity() <= total - (total - free) + (
        torch.cuda.memory_reserved()
    )
