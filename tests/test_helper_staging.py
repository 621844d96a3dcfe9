"""FSDP through the staging process group is FSDP through gloo: what the tests on one GPU rely on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.decoder import adamw, batch, local_values
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.staging import init_staging_group
from torchtune_adaptive.core.ranks.agreement import Ranks

pytestmark = pytest.mark.ranks


def train(staged: bool) -> tuple[list[list[float]], int]:
    if staged:
        init_staging_group()
    else:
        dist.init_process_group("gloo")
    model = tiny_llama(layers=2)
    step = train_step(model, [adamw(model)], ranks=Ranks(timeout=200), clip_grad_norm=0.1)
    for seed in range(3):
        step.forward_backward(batch(seed=10 * seed + dist.get_rank()))
        assert not step.apply().lost
    group = dist.distributed_c10d._get_default_group()
    return [v.flatten().tolist() for v in local_values(model)], getattr(group, "collectives", 0)


def test_staged_collectives_give_the_same_training() -> None:
    staged, plain = run_ranks(train, 2, True, join=False), run_ranks(train, 2, False, join=False)
    for (values, collectives), (expected, _) in zip(staged, plain, strict=True):
        assert collectives > 10
        torch.testing.assert_close(
            [torch.tensor(v) for v in values], [torch.tensor(v) for v in expected]
        )
