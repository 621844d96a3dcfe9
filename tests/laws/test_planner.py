"""How the planner's work grows with the number of ranks: counted, never timed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.library import model_steps, planning
from torchtune_adaptive.planner import private
from torchtune_adaptive.planner.speed import collectives
from torchtune_adaptive.planner.speed.devices import SPEEDS
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.self_check import SMALL_RUN
from torchtune_adaptive.recipe.tracing.tracer import Tracer

QUANTIZED = {
    "model": {
        "_component_": "torchtune.models.llama2.lora_llama2",
        "lora_attn_modules": ["q_proj", "v_proj"],
        "lora_rank": 4,
        "lora_alpha": 8,
        "quantize_base": True,
        "embed_dim": 256,
        "intermediate_dim": 256,
        "num_kv_heads": 4,
    }
}


def small(changes: dict | None = None) -> DictConfig:
    """A small run, as on GPUs."""
    on_gpus = {"device": "cuda", "dtype": "bf16", "gradient_accumulation_steps": 1}
    merged = OmegaConf.merge(SMALL_RUN, on_gpus, changes or {})
    assert isinstance(merged, DictConfig)
    return merged


class Results(TorchDispatchMode):
    """Counts the tensors without values that operations give."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.number += sum(each.is_meta for each in tensors)
        return result


def tensors_of(set_up: Callable[[], object]) -> tuple[int, int]:
    """The number of fake tensors that are made meanwhile, and of those that operations give on the meta
    device."""
    make = private.FakeTensor.__new__
    made = 0

    def counting(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal made
        made += 1
        return make(*arguments, **options)

    with mock.patch.object(private.FakeTensor, "__new__", counting), Results() as results:
        set_up()
    return made, results.number


def made_for_a_recipe(ranks: int) -> tuple[int, int]:
    sizes = {"vocab_size": 8192, "embed_dim": 4096, "intermediate_dim": 4096}
    heads = {"num_heads": 64, "num_kv_heads": 64}
    asked = Asked.of(small({"model": {**sizes, **heads}}), "full")  # no rank's part is empty
    return tensors_of(lambda: Tracer(asked, ranks))


def sharded() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def forward(model: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(rows).sum(), len(rows)


def rows(number: int) -> torch.Tensor:
    return torch.zeros(number, 4096)


def made_for_a_users_model(ranks: int) -> tuple[int, int]:
    asked = []
    with mock.patch.object(
        planning, "call_alone", lambda _, question, **__: asked.append(question)
    ):
        planning.plan_batch_size(
            sharded, optimizer=adam, forward=forward, worst_case=rows, ranks=ranks
        )
    return tensors_of(lambda: model_steps.StepsOfModel(asked[0]))


def digests(ranks: int, changes: dict | None, name: str, as_torch: bool) -> list[str]:
    """Digests of all that is recorded in set-up, in the first step and in a later one."""
    asked = Asked.of(small(changes), name)
    ways: AbstractContextManager = (
        mock.patch.object(private, "of_chunks", return_value=()) if as_torch else nullcontext()
    )
    with ways:
        tracer = Tracer(asked, ranks)
        recorded = [tracer.set_up, *(tracer.take_step(2, 32) for _ in range(2))]
    return [hashlib.sha256(repr(one).encode()).hexdigest() for one in recorded]


def alone(function: Callable[..., object], *arguments: object) -> object:
    """What it gives in a process of its own, which a tracer needs."""
    return run_ranks(function, 1, *arguments, join=False)[0]


@pytest.mark.parametrize("made", [made_for_a_recipe, made_for_a_users_model])
def test_4096_ranks_take_as_many_tensors_as_64(made: Callable[[int], tuple[int, int]]) -> None:
    few, many = (alone(made, ranks) for ranks in (64, 4096))
    assert few == many


@pytest.mark.parametrize(
    ("ranks", "changes", "kind"),
    [(64, None, "full"), (1024, None, "full"), (3, None, "full"), (2, QUANTIZED, "lora")],
)
def test_what_is_recorded_is_the_same(ranks: int, changes: dict | None, kind: str) -> None:
    """Where one rank's part is made, and where torch makes the parts of all."""
    one, all_of_them = (alone(digests, ranks, changes, kind, way) for way in (False, True))
    assert one == all_of_them


def parts(sizes: list[tuple[int, ...]], number: int, dim: int) -> None:
    [(_, _, split)] = private.of_chunks()
    [(module, name, _)] = private.of_chunks()
    for size in sizes:
        whole = torch.randn(size)
        ours, theirs = split(whole, number, dim), getattr(module, name)(whole, number, dim)
        assert len(ours) == len(theirs) == number
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride()
            assert torch.equal(one, other)
            assert one.storage_offset() == other.storage_offset() or not other.numel()
        assert torch.equal(ours[-1], theirs[-1])
        with pytest.raises(IndexError):
            ours[number]


def test_parts_are_those_of_torch() -> None:
    for dim in (0, 1):
        for number in (1, 2, 3, 7, 64):
            parts([(12, 8), (1, 1), (7, 5), (64, 3), (5, 64)], number, dim)


HOPPER = SPEEDS["h100-80gb"]


def took(name: str, nbytes: float, ranks: int, distance: int = 1) -> float:
    return collectives.seconds(name, nbytes, ranks, distance, HOPPER)


def test_a_short_all_reduce_grows_with_the_logarithm_of_the_nodes() -> None:
    """Each doubling of the nodes adds what the one before it did."""
    times = [took("allreduce_", 16, 8 << doubling) for doubling in range(10)]
    added = [later - before for before, later in pairwise(times)]
    assert added[4:] == pytest.approx(added[4:5] * len(added[4:]))
    assert times[-1] < 6 * times[1]


def test_a_long_all_reduce_takes_a_ring_on_few_nodes_and_a_tree_on_many() -> None:
    ring = [2 * collectives.NETWORK_HOP * (nodes - 1) for nodes in (2, 512)]
    few, many = (took("allreduce_", 1e9, nodes, distance=8) for nodes in (2, 512))
    assert few == pytest.approx(ring[0] + 1e9 / HOPPER.network, rel=0.01)
    assert many < ring[1] + 2e9 / HOPPER.network


def test_gathers_of_ranks_with_a_node_each_need_fewer_hops() -> None:
    """PAT is for them alone, for short messages, and not for what FSDP reduces."""
    apart = took("_allgather_base_", 1e4, 512, distance=8)
    assert apart < 0.5 * took("_reduce_scatter_base_", 1e4, 512, distance=8)
    assert took("_allgather_base_", 1e4, 512) == took("_reduce_scatter_base_", 1e4, 512)
    long = [took(name, 1e12, 64, distance=8) for name in ("_allgather_base_", "_reduce_scatter_")]
    assert long[0] == long[1]


def test_without_nvlink_hops_are_those_of_the_simple_protocol() -> None:
    cards = SPEEDS["l40s-48gb"]
    time = collectives.seconds("_allgather_base_", 8, 8, 1, cards)
    assert time > 7 * collectives.PCIE_HOP
    assert took("_allgather_base_", 8, 8) < 7 * collectives.NVLINK_HOP + collectives.BEGIN
