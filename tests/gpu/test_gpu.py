"""On a real device: real allocation failures, real capacity, real caps. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtune.models.llama2 import llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.counting import fail_in_backward
from tests.helpers.decoder import local_values, same_bits
from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.device.memory import is_out_of_memory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import STRATEGIES, find_largest
from torchtune_adaptive.core.sizes.split import candidates
from torchtune_adaptive.core.step.failures import drop_unfinished
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's, about torchtune's RMSNorm in bf16
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
LIMIT = 2 << 30
ROWS = 7
"""Of 512 tokens each: with up to 3,072 tokens, the gradient of an embedding is not the same each time."""


@pytest.fixture
def step() -> Iterator[TrainStep]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda")
    torch.manual_seed(0)
    with device:
        model = llama2(8192, 4, 8, 8, 512, 512).to(torch.bfloat16)
    model.set_num_output_chunks(8)
    with sdpa_kernel(SDPBackend.MATH):  # the backward of flash attention is not deterministic
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
        accumulation=lambda size: 2,
        headroom=0.05,
        entering=lambda phase: None,
    )


def test_all_strategies_find_one_size_under_a_real_cap(step: TrainStep) -> None:
    found = set()
    for strategy in STRATEGIES:
        with probe_of(step) as probe:
            assert probe.prime(batch).fits
            result = find_largest(
                strategy, candidates("power_of_two", 1024, 0), lambda n: probe.trial(n, batch)
            )
        found.add(result.size)
        for trial in result.trials:
            assert trial.deciding.peak_bytes <= LIMIT
    assert len(found) == 1 and found.pop() is not None


def test_a_search_leaves_no_trace(step: TrainStep) -> None:
    with probe_of(step) as probe:
        probe.prime(batch)  # the workspaces of cuBLAS are made once, and stay
    step.memory.release()
    before = [value.cpu() for value in local_values(step.model)]
    step.memory.release()
    in_use = step.memory.in_use()
    generator = torch.cuda.get_rng_state()
    with probe_of(step) as probe:
        probe.prime(batch)
        assert not probe.trial(4096, batch).fits
        assert probe.trial(2, batch).fits
    step.memory.release()
    left = step.memory.in_use()
    assert same_bits(before, [v.cpu() for v in local_values(step.model)])
    assert torch.equal(generator, torch.cuda.get_rng_state())
    assert left == in_use


def test_a_lost_step_is_followed_by_the_step_that_would_have_been(step: TrainStep) -> None:
    with probe_of(step) as probe:
        probe.prime(batch)
        step.forward_backward(batch(ROWS))
        step.apply()
        expected = [value.cpu() for value in local_values(step.model)]
    with probe_of(step) as probe:
        probe.prime(batch)
        step.forward_backward(batch(4096))
        assert step.apply().lost
        step.forward_backward(batch(ROWS))
        assert not step.apply().lost
        assert same_bits(expected, [value.cpu() for value in local_values(step.model)])


def test_a_device_without_an_index_is_the_current_one() -> None:
    assert device_memory(torch.device("cuda"), LIMIT).capacity() <= LIMIT
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_capacity_leaves_out_what_neighbours_have() -> None:
    free, _ = torch.cuda.mem_get_info()
    capacity = device_memory(torch.device("cuda")).capacity()
    assert abs(capacity - free - torch.cuda.memory_reserved()) < 64 << 20  # a context is made


@pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"), reason="torch cannot tell"
)
def test_the_fraction_of_the_user_is_respected_and_put_back() -> None:
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        memory = device_memory(torch.device("cuda"))
        assert memory.capacity() <= total / 4
        with memory.capped(total // 8):
            assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.125, abs=1e-3)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.25, abs=1e-3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_host_memory_is_released() -> None:
    memory = device_memory(torch.device("cuda"))
    torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= 64 << 20
    memory.release()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] < 64 << 20


def test_running_out_is_recognised_as_torch_reports_it() -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which it is, is the question
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(raised.value)


def test_nothing_is_left_of_a_backward_pass_that_failed() -> None:
    alive = fail_in_backward("cuda")
    drop_unfinished(torch.device("cuda"))
    assert alive() == 0
