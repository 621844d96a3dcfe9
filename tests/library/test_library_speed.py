"""The library's plans answer speed as well: for the recipes' model, what the recipes' plan says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchtune import training
from torchtune.models.llama2 import llama2

from torchtune_adaptive import NoPrediction, Plan, plan_batch_size
from torchtune_adaptive.core import NextTokenPrediction
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.plan.predict import predict
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides

pytestmark = pytest.mark.ranks

LENGTH, ROWS, ACCUMULATION, GPU = 64, 4, 3, "h100-80gb"
SHAPE = {
    "vocab_size": 512,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 160,
    "max_seq_len": 512,
}
OVERRIDES = (
    "device=cuda",
    "dtype=bf16",
    "use_maximum_batch_size=False",
    f"batch_size={ROWS}",
    f"gradient_accumulation_steps={ACCUMULATION}",
    f"tokenizer.max_seq_len={LENGTH}",
    "loss._component_=torch.nn.CrossEntropyLoss",
    "adaptive_batching.cache=False",
)
AS_RECIPES = NextTokenPrediction(nn.CrossEntropyLoss())


def build(ranks: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with training.set_default_dtype(dtype):
        model = llama2(**SHAPE)
    if ranks == 1:
        return model
    kind = torch.accelerator.current_accelerator()
    mesh = init_device_mesh(str(kind), (ranks,))
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(model=model, shard_conditions=conditions, cpu_offload=False, dp_mesh=mesh)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    terms = batch["labels"].numel()
    return AS_RECIPES.summed_loss(model, batch, terms), terms  # type: ignore[arg-type, return-value]


def with_autocast(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    with torch.autocast("cuda", torch.bfloat16):
        return forward(model, batch)


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, LENGTH, dtype=torch.long) for name in ("tokens", "labels")}


def planned(build: Any, ranks: int, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"forward": forward, "worst_case": batch, "ceiling": 8, "rows": ROWS}
    settings |= {"accumulation": ACCUMULATION, "max_grad_norm": 1.0, "length": LENGTH, **changes}
    return plan_batch_size(build, optimizer=adamw, gpu=GPU, ranks=ranks, timeout=300.0, **settings)


def built(shape: str) -> nn.Module:
    """The model, spread over ranks in one of the ways."""
    if shape == "replicas":
        return DistributedDataParallel(build(), broadcast_buffers=False)
    kind = str(torch.accelerator.current_accelerator())
    if shape == "hybrid":
        mesh = init_device_mesh(kind, (2, 8), mesh_dim_names=("replicate", "shard"))
        return sharded(build(), mesh=mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(build(dtype=torch.float32), mp_policy=policy)


def in_buckets(megabytes: float) -> nn.Module:
    return DistributedDataParallel(build(), broadcast_buffers=False, bucket_cap_mb=megabytes)


def sharded(model: Any, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize(("shape", "ranks"), [("replicas", 8), ("hybrid", 16), ("fp32", 8)])
def test_every_way_to_spread_a_model_has_a_speed(shape: str, ranks: int) -> None:
    found = planned(partial(built, shape), ranks)
    weights = sum(p.numel() for p in build().parameters())
    of_each = {"replicas": 2, "hybrid": 2 / 8, "fp32": 4 / 8}[shape]
    assert found.parts["gradients"] == pytest.approx(weights * of_each, rel=0.01)
    assert found.speed is not None
    assert found.speed.rows_per_second_per_gpu == found.speed.tokens_per_second_per_gpu / LENGTH
    assert found.speed.parts["collective"] > 0


@pytest.mark.alternating
def test_backward_hides_the_reductions_of_replicas() -> None:
    """All but the last, which is all that waits if there is only one."""
    waiting = []
    for megabytes in (0.05, 1000):
        speed = planned(partial(in_buckets, megabytes), 8, accumulation=1).speed
        assert speed is not None
        waiting.append(speed.seconds * speed.parts["collective"])
    assert 0 < waiting[0] < 1.5 * waiting[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_numbers_are_those_of_the_recipes_plan(ranks: int) -> None:
    request = plan_request(with_overrides(load_config("tiny/full"), OVERRIDES), ranks, GPU)
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        answer = run(predict, request.query())
        found = planned(partial(build, ranks), ranks)
        recipes = answer.result(timeout=300)
    assert found.speed == recipes.speed is not None
    assert found.peak == recipes.configured.reserved


@pytest.mark.exhaustive
def test_autocast_is_refused() -> None:
    with pytest.raises(NoPrediction, match=r"torch\.autocast cannot be traced\. Use fully_"):
        planned(build, 1, forward=with_autocast)
