"""NCCL with one rank: it counts what it launches, which is how a failure in a collective is placed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.helpers.counting import counted_launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["nccl", "cuda:nccl,cpu:gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_each_collective_is_counted_once() -> None:
    assert counted_launches("cuda") == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
