"""Mixtures of experts in plans: memory at each routing beside a real trainer, and FLOPs beside arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.popular_models import SMALL
from tests.helpers.real_trainers import route
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive import AdaptiveStep, NoPrediction, TransformersStep, UsageError
from torchtune_adaptive.library import model_steps, planning
from torchtune_adaptive.library.expert_adapters import AdaptedParameter
from torchtune_adaptive.library.experts import Routing, sizes_of
from torchtune_adaptive.library.step_choices import EVEN, WORST
from torchtune_adaptive.planner.speed.operations import GEMM, Operation
from torchtune_adaptive.planner.speed.speed import SLOWEST_EXPERTS
from torchtune_adaptive.planner.workers import processes

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, LAYERS = 2, 32, 2
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 64, 256, 4, 2
PLAIN = {"trainer": "Trainer", "gradient_checkpointing": False, "bf16": False, "optim": "sgd"}
PLAIN |= {"per_device_train_batch_size": 4}
SORTED = ROWS * LENGTH * CHOSEN
"""Rows of all experts together."""


@pytest.fixture(scope="module")
def call() -> Iterator[Any]:
    with without_torchvision(), processes("tests.helpers.preload_transformers") as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    about = {"model_type": "qwen3_moe", **SMALL, "num_hidden_layers": LAYERS}
    about |= {"moe_intermediate_size": INTERMEDIATE, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(about))
    return tmp_path


def planned(folder: Path, settings: dict[str, Any]) -> planning.Plan:
    """A plan, made in this process."""
    vars(planning)["call_alone"] = lambda work, question, timeout: work(question)
    step = TransformersStep(folder=str(folder), max_length=LENGTH, **settings)
    return step.plan(gpu="cpu", memory="1TiB", ceiling=8, cache=False)


def operations(folder: Path, routing: str, implementation: str | None) -> list[Operation]:
    """Those of a micro-batch of the plain trainer with a model in bfloat16."""
    found: list[Operation] = []

    def traced(_: Any, question: Any, timeout: float) -> planning.Plan:
        steps = model_steps.StepsOfModel(question, routing)
        taken = steps.step(ROWS).operations
        assert taken is not None
        found.extend(taken.micro_batches[0])
        return planning.Plan(1, 1, 1, {}, 1, ())

    vars(planning)["call_alone"] = traced
    step = TransformersStep(
        folder=str(folder),
        trainer="Trainer",
        dtype="bfloat16",
        bf16=False,
        gradient_checkpointing=False,
        max_length=LENGTH,
        experts_implementation=implementation,
    )
    step.plan(gpu="h100-80gb", cache=False)
    return found


def planned_for_a_gpu(folder: Path, settings: dict[str, Any]) -> planning.Plan:
    vars(planning)["call_alone"] = lambda work, question, timeout: work(question)
    step = TransformersStep(folder=str(folder), max_length=LENGTH, **settings)
    return step.plan(gpu="h100-80gb", ceiling=8, cache=False)


def measured(folder: Path, routing: str, settings: dict[str, Any]) -> int:
    """The peak of the same step on real tensors, whose routers are set, on the simulated device."""
    step = TransformersStep(folder=str(folder), max_length=LENGTH, **settings)
    model = step.model().build()
    route(model, routing)
    run = AdaptiveStep(
        model,
        step.model().optimizer(model.parameters()),
        partial(step.model().forward, model),
        shares=True,
        max_grad_norm=1.0,
        memory_limit="1TiB",
    ).train_step
    for _ in range(3):
        run.memory.watch()
        run.forward_backward(step.model().batch(step.per_device_train_batch_size))
        run.apply()
    return run.memory.usage().peak_bytes


def refused(folder: Path, settings: dict[str, Any]) -> str:
    try:
        planned(folder, settings)
    except (UsageError, NoPrediction) as error:
        return str(error)
    return ""


def test_grouped_products_compute_what_is_routed_and_no_more(call: Any, folder: Path) -> None:
    taken = call(operations, folder, EVEN, None).result(200)
    grouped = [one for one in taken if one.name == "_grouped_mm"]
    assert {one.kind for one in grouped} == {GEMM}
    forward = LAYERS * 3 * 2 * SORTED * HIDDEN * INTERMEDIATE
    by_phase = {"forward": 0.0, "backward": 0.0}
    for one in grouped:
        by_phase[one.phase] += one.flops
    assert by_phase == {"forward": forward, "backward": 2 * forward}
    first = grouped[0]
    assert first.shape == (EXPERTS, SORTED / EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    weights = EXPERTS * HIDDEN * 2 * INTERMEDIATE
    ends = 4 * EXPERTS  # where the rows of each expert end, in 32 bits
    assert first.nbytes == 2 * (SORTED * (HIDDEN + 2 * INTERMEDIATE) + weights) + ends


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("implementation", "routing"), [("batched_mm", EVEN), ("eager", EVEN), ("eager", WORST)]
)
def test_all_implementations_compute_as_much(
    implementation: str, routing: str, call: Any, folder: Path
) -> None:
    grouped, other = (
        call(operations, folder, each, how).result(200)
        for each, how in ((EVEN, None), (routing, implementation))
    )
    assert not any(one.name == "_grouped_mm" for one in other)
    assert sum(one.flops for one in other) == sum(one.flops for one in grouped)


@pytest.mark.rotating
@pytest.mark.parametrize("implementation", [None, "batched_mm", "eager"])
def test_routing_changes_memory_only_where_experts_ask(
    implementation: str | None, call: Any, folder: Path
) -> None:
    # Checkpointing asks in backward again.
    again = implementation != "batched_mm"
    settings = {**PLAIN, "experts_implementation": implementation}
    settings["gradient_checkpointing"] = again
    found = call(planned, folder, settings).result(200)
    assert found.experts is not None
    assert found.experts.differ is (implementation == "eager")
    peaks = {EVEN: found.experts.even.peak, WORST: found.experts.worst.peak}
    assert found.peak == max(peaks.values()) and found.experts.worst.largest == 8
    for routing, peak in peaks.items():
        assert peak == call(measured, folder, routing, settings).result(200)  # to the byte


@pytest.mark.rotating
@pytest.mark.parametrize(
    "settings",
    [
        {"experts_implementation": "eager", "ranks": 2, "fsdp": True},
        {"lora": True, "dtype": "bfloat16", "ranks": 2, "fsdp": True},
        {"lora": True, "load_in_4bit": True, "dtype": "bfloat16", "ranks": 2},
    ],
    ids=["one by one", "adapters", "4 bits"],
)
def test_several_gpus_have_a_plan(settings: dict[str, Any], call: Any, folder: Path) -> None:
    found = call(planned_for_a_gpu, folder, settings).result(200)
    assert found.experts is not None and 0 < found.peak < 1 << 30 and found.largest == 8
    assert found.speed is not None and found.speed.band[0] == SLOWEST_EXPERTS


def test_a_dense_model_has_no_experts(call: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    found = call(planned_for_a_gpu, tmp_path, {}).result(200)
    assert found.experts is None
    assert found.speed is not None and found.speed.band[0] > SLOWEST_EXPERTS


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"lora": True, "lora_dropout": 0.1},
            "lora_dropout: 0.1, but the inputs of gate.weight, gate_up_proj, down_proj cannot be dropped",
        ),
        (
            {"lora": True, "target_modules": ["q_proj", "up_proj"]},
            "target_modules: up_proj without gate_proj, but they are one tensor (gate_up_proj)",
        ),
        (
            {"lora": True, "target_parameters": ["experts.w1"]},
            "target_parameters: experts.w1 is none of the model's parameters",
        ),
    ],
)
def test_adapters_that_peft_refuses(
    settings: dict[str, Any], complaint: str, call: Any, folder: Path
) -> None:
    assert complaint in call(refused, folder, settings).result(200)


def test_balance_is_part_of_the_step_where_trl_has_it(call: Any, folder: Path) -> None:
    step = {"gradient_checkpointing": False, "optim": "sgd"}
    peaks = [
        call(planned, folder, {**step, "router_aux_loss_coef": coef}).result(200)
        for coef in (None, 0.0)
    ]
    assert peaks[0].peak > peaks[1].peak, "the config has a weight that is not 0"


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(64, 2, 8), (7, 2, 4), (3, 1, 8)])
def test_rows_of_experts(tokens: int, chosen: int, experts: int) -> None:
    even, worst = (sizes_of(each, tokens, chosen, experts) for each in (EVEN, WORST))
    assert sum(even) == sum(worst) == tokens * chosen
    assert max(even) - min(even) <= 1 and worst == [tokens] * chosen
    assert len(even) == min(experts, tokens * chosen)


class Weights(nn.Module):
    """What shows which weight it computes with."""

    def __init__(self, *shape: int, is_transposed: bool = False) -> None:
        super().__init__()
        self.weight, self.is_transposed = nn.Parameter(torch.zeros(shape)), is_transposed

    def forward(self) -> torch.Tensor:
        return self.weight + 0


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 4, 4), (4, 6)])
def test_an_adapter_adds_the_product_of_its_factors(
    shape: tuple[int, ...], is_transposed: bool
) -> None:
    holder = Weights(*shape, is_transposed=is_transposed).requires_grad_(False)
    adapted = AdaptedParameter(holder, "weight", 2, torch.float32)
    number = shape[0] if len(shape) == 3 else 1
    down = adapted.lora_a.weight.view(number, 2, -1)
    up = adapted.lora_b.weight.view(-1, 2, number).permute(2, 0, 1)
    added = 2.0 * up @ down
    if is_transposed and len(shape) == 3:
        added = added.transpose(1, 2)
    found = adapted()
    torch.testing.assert_close(found, added.view(shape))
    found.sum().backward()
    assert adapted.lora_a.weight.grad is not None and holder.weight.grad is None
    assert isinstance(holder.weight, nn.Parameter) and not holder.weight.requires_grad
    adapted.enabled = False
    assert not adapted().any()


class LoopedExperts(nn.Module):
    """Experts as transformers computes them one after the other."""

    num_experts = 4

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> list[tuple[Any, int]]:
        mask = torch.nn.functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        return [(each[0], len(torch.where(mask[each[0]])[1])) for each in hit]


def test_experts_are_told_what_values_would_have_said() -> None:
    chosen = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    real = [(int(number), rows) for number, rows in LoopedExperts()(torch.ones(4, 3), chosen)]
    for routing, expected in ((EVEN, real), (WORST, [(0, 4), (1, 4)])):
        told = LoopedExperts()
        counts = Routing(routing, told)
        assert counts.experts == [told] and not counts.asked
        assert told(torch.ones(4, 3), chosen) == expected
        assert counts.asked
        assert torch.ones(3).nonzero().shape == (3, 1), "outside of experts it is torch's"


def test_what_ends_early_is_told_no_more() -> None:
    told = LoopedExperts()
    Routing(EVEN, told)
    with pytest.raises(RuntimeError):
        told(torch.ones(4, 3), torch.full((4, 2), -1))
    assert torch.ones(3).nonzero().shape == (3, 1)


@pytest.mark.exhaustive
def test_memory_at_each_routing_is_that_of_a_real_trainer(tmp_path: Path) -> None:
    names = [f"Trainer with experts one by one{end}" for end in ("", " at worst")]
    script = shutil.copy(ROOT / "tests" / "helpers" / "real_trainers.py", tmp_path)
    done = subprocess.run(
        [sys.executable, script, *names],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    (even, measured_even), (worst, measured_worst) = (results[name] for name in names)
    assert even == pytest.approx(measured_even, rel=0.001)
    assert worst == pytest.approx(measured_worst, rel=0.001)
    assert abs(even - worst) > 0.02 * even, "the trainer's memory follows from the routing"
