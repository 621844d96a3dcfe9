"""Each group's communicator is made when the step is: not when memory is full."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.decoder import train_step
from tests.helpers.mesh import OnMesh
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import step_of
from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core.private import launches_of
from torchtune_adaptive.core.ranks.communicators import of_communicator

NCCL = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    "detail", ["Failed to CUDA calloc 2097152 bytes", "Cuda failure 2 'out of memory'"]
)
@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError])
def test_no_memory_for_a_communicator_is_one_line_with_the_cure(
    kind: type[RuntimeError], detail: str
) -> None:
    def forward() -> None:
        raise kind(f"{NCCL}{detail}\n")

    model = nn.Linear(1, 1)
    step = step_of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TrainingOutOfMemory) as error:
        step._failures.attempt("forward", forward)
    assert "\n" not in str(error.value) and not error.value.everywhere
    assert "larger headroom" in str(error.value) and f"({detail})" in str(error.value)


def test_other_errors_of_nccl_are_theirs() -> None:
    assert (
        of_communicator(dist.DistBackendError(f"{NCCL}Cuda failure 700 'illegal access'")) is None
    )
    assert of_communicator(ValueError("Failed to CUDA calloc 1 bytes")) is None


def launches_of_a_new_step(way: str, shape: tuple[int, int, int]) -> list[int]:
    """How many collectives each group launches while a step is made, the group of all ranks first."""
    run = OnMesh(way, shape)
    assert dist.group.WORLD is not None
    groups = [dist.group.WORLD, *(group for group in run.groups if group is not dist.group.WORLD)]
    before = [launches_of(group) or 0 for group in groups]
    context = run.step.options.context_group
    train_step(run.model, [run.optimizer], ranks=run.ranks, context_group=context)
    return [(launches_of(group) or 0) - of for group, of in zip(groups, before, strict=True)]


@pytest.mark.ranks
@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("way", "shape", "groups"),
    [
        ("tensor", (1, 4, 1), 1),
        ("tensor", (2, 2, 1), 3),
        ("tensor", (1, 2, 2), 3),
        ("ring", (1, 2, 2), 2),
    ],
    ids=["sharded", "HSDP", "tensor parallel", "context parallel"],
)
def test_each_group_launches_once_while_a_step_is_made(
    way: str, shape: tuple[int, int, int], groups: int
) -> None:
    for launched in run_ranks(launches_of_a_new_step, math.prod(shape), way, shape):
        assert launched.count(1) == groups and set(launched) <= {0, 1} and launched[0] == 1
