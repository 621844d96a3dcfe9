"""Tensor parallelism together with FSDP: the norm of gradients that are split twice, and what it clips."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step import gradients
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.library.step import SummedLoss
from torchtune_adaptive.planner.trace.fake_device import init_fake_ranks

WIDTH = 16
PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}
CLIP = 0.05


def layer() -> nn.Sequential:
    """A layer of which tensor parallelism splits the first matrix by rows, as FSDP does, the second by
    columns, and the norm not at all."""
    modules = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*modules)


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(layer(), layer())


def split(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for part in model:
        parallelize_module(part, mesh["tp"], PLAN, src_data_rank=None)  # all ranks have the weights
    if mesh["dp"].size() > 1:
        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp"])
    return model


def mesh_of(data_ranks: int, tensor_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)], ids=str)
def test_the_parts_of_all_ranks_make_up_the_norm(shape: tuple[int, int]) -> None:
    """Each rank's part, on one rank after the other."""
    ranks, squares = shape[0] * shape[1], []
    for rank in range(ranks):
        init_fake_ranks(rank, ranks)
        weights = [p.detach() for p in split(whole_model(), mesh_of(*shape)).parameters()]
        squares.append(float(gradients.squared_norm(weights, ranks, torch.device("cpu"))))
        dist.destroy_process_group()
    whole = torch.cat([p.detach().flatten() for p in whole_model().parameters()])
    assert sum(squares) ** 0.5 == pytest.approx(float(whole.norm()), rel=1e-6)


@pytest.mark.usefixtures("no_process_group")
def test_what_splits_a_tensor_is_known() -> None:
    init_fake_ranks(0, 4)
    mesh = mesh_of(2, 2)
    ways = {
        (Shard(0), Shard(1)): 4,
        (Replicate(), Shard(0)): 2,
        (Partial(), Replicate()): 1,
    }
    for placements, number in ways.items():
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, placements)
        assert gradients.parts(tensor) == number
    assert gradients.parts(torch.ones(1)) == 1


def step_beside_whole(data_ranks: int, tensor_ranks: int) -> tuple[float, float, float]:
    """A clipped step. Gives its norm, that of the whole gradient, and the largest difference in weights."""
    mesh, ranks = mesh_of(data_ranks, tensor_ranks), Ranks(timeout=200)
    generator = torch.Generator().manual_seed(1)
    rows, targets = torch.randn(2, data_ranks, 3, WIDTH, generator=generator)
    expected = whole_model()
    model = split(copy.deepcopy(expected), mesh)

    def forward(batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()

    step = TrainStep(
        model=model,
        objective=SummedLoss(forward, ()),
        optimizers=[torch.optim.SGD(model.parameters(), lr=1.0)],
        device=torch.device("cpu"),
        memory=SimulatedMemory(limit=None),
        ranks=ranks,
        options=StepOptions(survive=False, clip_grad_norm=CLIP),
    )
    mine = mesh["dp"].get_local_rank()
    step.forward_backward([rows[mine], targets[mine]])
    outcome = step.apply()
    assert not outcome.lost and outcome.gradient_norm is not None

    F.mse_loss(expected(rows), targets).backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    differences = [
        (p.full_tensor() if isinstance(p, DTensor) else p) - q
        for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    return outcome.gradient_norm, float(norm), max(float(d.abs().max()) for d in differences)


@pytest.mark.ranks
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)], ids=str)
def test_norm_and_clipped_weights_are_those_of_the_whole_model(shape: tuple[int, int]) -> None:
    ranks = run_ranks(step_beside_whole, shape[0] * shape[1], *shape)
    for norm, whole, difference in ranks:
        assert whole > 2 * CLIP
        assert norm == pytest.approx(whole, rel=1e-6)
        assert difference < 1e-6
