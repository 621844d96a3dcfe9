"""FSDP with two ranks on one real device: its streams, its allocations, and one rank without memory."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.decoder import adamw, batch, local_values
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.helpers.staging import init_staging_group
from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LARGE, SMALL = 1 << 15, 4


def train(fails: list[int]) -> tuple[list[bool], list[list[float]]]:
    """Steps of ``SMALL`` rows, with one of ``LARGE`` before the last, for which some ranks lack memory."""
    warnings.simplefilter("ignore")
    init_staging_group()
    device = torch.device(DEVICE)
    ranks = Ranks(timeout=200)
    memory = device_memory(device)
    model = tiny_llama(layers=2)
    step = TrainStep(
        model=model,
        objective=NextTokenPrediction(CEWithChunkedOutputLoss(num_output_chunks=2)),
        optimizers=[adamw(model)],
        device=device,
        memory=memory,
        ranks=ranks,
        options=StepOptions(clip_grad_norm=1.0),
    )
    lost = []

    def take(rows: int) -> None:
        step.forward_backward(batch(rows=rows))
        lost.append(step.apply().lost)

    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            take(SMALL)
        if fails:
            memory.release()
            room = memory.usage().peak_bytes + (8 << 20)
            with memory.capped(room if ranks.rank in fails else memory.capacity()):
                take(LARGE)
        take(SMALL)
    return lost, [value.flatten().tolist() for value in local_values(model)]


@pytest.fixture(scope="module")
def healthy() -> list[tuple[list[bool], list[list[float]]]]:
    return run_ranks(train, 2, [], join=False, forked=False)


@pytest.mark.parametrize("fails", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_a_rank_without_memory_holds_nobody_up_and_leaves_no_trace(
    healthy: list[tuple[list[bool], list[list[float]]]], fails: list[int]
) -> None:
    disturbed = run_ranks(train, 2, fails, join=False, forked=False)
    for (lost, values), (_, expected) in zip(disturbed, healthy, strict=True):
        assert lost == [False, False, False, True, False]
        assert values == expected
