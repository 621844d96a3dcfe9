"""What a user has set on FSDP2 is refused by name where a step would replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from tests.helpers.faults import FailingMemory
from torchtune_adaptive import UsageError
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.library.step import SummedLoss
from torchtune_adaptive.planner.trace.fake_device import init_fake_ranks
from torchtune_adaptive.planner.trace.step_tracer import FakeRanks


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    init_fake_ranks(0, 2)
    yield
    dist.destroy_process_group()


def sharded(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def step_of(model: nn.Module, *frozen: nn.Module) -> TrainStep:
    return TrainStep(
        model=model,
        objective=SummedLoss(lambda batch: model(batch), frozen),
        optimizers=[],
        device=torch.device("cpu"),
        memory=FailingMemory(),
        ranks=FakeRanks(0, 2),
    )


def compiled_by(how: str, **options: Any) -> nn.Module:
    model = sharded()
    if how == "whole":
        return torch.compile(model, **options)  # type: ignore[return-value]
    if how == "layer":
        model[0].compile(**options)
    else:
        model[0].forward = torch.compile(model[0].forward, **options)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["whole", "layer", "forward"])
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
        ({"backend": "eager"}, False),
    ],
)
def test_cuda_graphs_are_refused(how: str, options: dict[str, Any], graphs: bool) -> None:
    model = compiled_by(how, **options)
    if not graphs:
        step_of(model)
        return
    with pytest.raises(
        UsageError, match=r"model: torch\.compile replays it as CUDA graphs"
    ) as error:
        step_of(model)
    assert "max-autotune-no-cudagraphs" in str(error.value)


def test_graphed_callables_are_refused() -> None:
    """On a GPU, ``make_graphed_callables`` leaves such a function in the place of forward."""

    def graphed(*arguments: Any) -> Any:
        raise NotImplementedError

    graphed.__module__ = torch.cuda.make_graphed_callables.__module__
    model = sharded()
    model[0].forward = graphed
    with pytest.raises(UsageError, match="model: make_graphed_callables replays it"):
        step_of(model)


class Custom:
    """Communication of the user's own."""

    def allocate(self, *size: int, **options: Any) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, **options: Any) -> None:
        raise NotImplementedError


CHANGES: dict[str, Callable[[Any], None]] = {
    "set_custom_all_gather": lambda module: module.set_custom_all_gather(Custom()),
    "set_custom_reduce_scatter": lambda module: module.set_custom_reduce_scatter(Custom()),
    "set_allocate_memory_from_process_group_for_comm": lambda module: (
        module.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_symm_mem_for_comm": lambda module: module.set_symm_mem_for_comm(),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("method", CHANGES)
def test_communication_that_the_user_has_set_is_not_replaced(
    method: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(FSDPModule, method):
        pytest.skip(f"torch {torch.__version__} has no {method}")
    monkeypatch.setattr(_symmetric_memory, "set_backend", lambda backend: None)  # it needs a GPU
    model, other = sharded(), sharded()
    CHANGES[method](model[1])
    with pytest.raises(UsageError, match=f"model: {method} was called"):
        step_of(other, model) if frozen else step_of(model)


def test_communication_that_is_as_it_was_is_watched() -> None:
    model = sharded()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    step_of(model)
    step_of(model)  # in place of the first step


def test_parameters_of_a_module_on_several_meshes() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip(f"torch {torch.__version__} has one mesh for each module")
    one, two = (
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards")),
    )
    infos = [
        _fsdp_common.FSDPMeshInfo(one, shard_mesh_dim=0),
        _fsdp_common.HSDPMeshInfo(two, shard_mesh_dim=1, replicate_mesh_dim=0),
    ]

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), infos[parameter.ndim - 1])

    with pytest.raises(
        UsageError, match="model: fully_shard spreads the parameters of 0 over 2 meshes"
    ):
        step_of(sharded(shard_placement_fn=place))
