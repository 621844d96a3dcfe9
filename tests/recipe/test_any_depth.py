"""A deep model is planned by a few of its layers: its steps are those of the model itself, to the byte.

Widths are those of the configs. Wholes have fewer layers than the configs, but more than what is computed
from needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.torchvision import use_torchvision
from torchtune_adaptive.planner import RecordedStep, deep_step, processes
from torchtune_adaptive.planner.trace import any_depth
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.phase_names import GATHERING, GENERATION, SCORING
from torchtune_adaptive.recipe.tracing import tracer
from torchtune_adaptive.recipe.tracing.traces import Traces

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LENGTH = 512
"""Tokens of a row; of a prompt, where rows are generated."""
SHALLOW, SHALLOW_IF_OFFLOADED = 14, 30
"""Repetitions of layers in the wholes."""
TENSOR_PARALLEL = (
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.fused=False",
)
CHECKPOINTED = "enable_activation_checkpointing=True"
OFFLOADED = (CHECKPOINTED, "enable_activation_offloading=True")
IN_BACKWARD = ("optimizer_in_bwd=True", "clip_grad_norm=null", "gradient_accumulation_steps=1")
PATTERN = "ac_mode=selective"
PACKED = ("dataset.packed=True", "tokenizer.max_seq_len=512")
COMPILED = "compile=True"

Case = tuple[int, str, tuple[str, ...]]
"""The number of ranks, the name of a config, and what is changed in it."""


def case(ranks: int, name: str, *changes: str) -> Case:
    return ranks, name, changes


MODELS = [
    case(2, "llama2/7B_full"),
    case(1, "llama2/7B_qlora_single_device"),
    case(2, "llama2/70B_qlora"),
    case(1, "code_llama2/7B_lora_single_device"),
    case(2, "llama3/8B_full"),
    case(1, "llama3/8B_dora_single_device"),
    case(8, "llama3_1/8B_full"),
    case(8, "llama3_1/405B_qlora"),
    case(2, "llama3_2/1B_full"),
    case(1, "llama3_2/3B_lora_single_device"),
    case(8, "llama3_3/70B_full"),
    case(2, "llama3_3/70B_qlora"),
    case(2, "mistral/7B_full"),
    case(1, "mistral/7B_qlora_single_device"),
    case(2, "gemma/2B_full"),
    case(1, "gemma/7B_lora_single_device"),
    case(2, "gemma2/2B_full"),  # every second layer attends to a window
    case(1, "gemma2/9B_qlora_single_device"),
    case(2, "phi3/mini_full"),
    case(1, "phi3/mini_qlora_single_device"),
    case(2, "phi4/14B_lora"),
    case(2, "qwen2/7B_full"),
    case(1, "qwen2/0.5B_lora_single_device"),
    case(2, "qwen2_5/3B_full"),
    case(8, "qwen2_5/72B_lora"),
]
KINDS = [
    case(1, "llama3_1/8B_full_single_device"),
    case(2, "llama3_1/8B_lora"),
    case(1, "llama3_1/8B_qlora_single_device"),
    case(2, "llama3_1/8B_full_dpo"),
    case(1, "llama3_1/8B_lora_dpo_single_device"),
    case(2, "llama3_1/8B_lora_dpo"),
    case(2, "llama3_2/8B_to_1B_KD_lora_distributed"),
    case(1, "qwen2/1.5_to_0.5B_KD_lora_single_device"),
    case(2, "llama3/8B_qat_full"),
    case(2, "llama3_1/8B_qat_lora"),
    case(2, "llama3_1/8B_adaptive_grpo"),
    case(1, "llama3_2/3B_adaptive_grpo_lora"),
    case(1, "mistral/7B_full_ppo_low_memory"),
]
SETTINGS = [
    case(7, "llama3_1/8B_full"),
    case(4, "llama3_1/8B_full", "data_parallel_shard_dim=2", "data_parallel_replicate_dim=2"),
    case(4, "llama3_1/8B_full", *TENSOR_PARALLEL),
    case(2, "llama3_1/8B_full", *TENSOR_PARALLEL),
    case(2, "llama3_1/8B_full", "fsdp_cpu_offload=True", "optimizer.fused=False"),
    case(2, "llama3_1/8B_full", "fsdp_reshard_after_forward=False"),
    case(2, "llama3_1/8B_full", "custom_sharded_layers=[tok_embeddings,output]"),
    case(2, "llama3_1/8B_full", CHECKPOINTED),
    case(2, "llama3_1/8B_full", CHECKPOINTED, PATTERN, "ac_option=2"),
    case(1, "llama3_1/8B_full_single_device", CHECKPOINTED, PATTERN, "ac_option=3"),
    case(1, "llama3_1/8B_lora_single_device", "enable_activation_checkpointing=False"),
    case(2, "llama3_1/8B_full", *IN_BACKWARD),
    case(2, "llama3_1/8B_full", *PACKED),
]
SLOW = [
    case(2, "llama3_1/8B_full", *OFFLOADED),
    case(2, "llama3_1/8B_lora", *OFFLOADED),
    case(1, "llama3_1/8B_qlora_single_device", *OFFLOADED),
    case(1, "llama2/7B_full_low_memory"),
    case(2, "llama3_1/8B_full", COMPILED),
    case(1, "llama3_1/8B_lora_single_device", COMPILED, *PACKED),
]


def numbered(*steps: RecordedStep) -> list[Any]:
    """What steps do, in terms of places in them: two traces number blocks and events each in its own way."""
    noted = [deep_step._of_operations(step.operations) for step in steps if step.operations]
    return [deep_step._of_memory(*steps), *noted]


def traced(
    asked: Asked,
    ranks: int,
    length: int,
    shallow: Callable[[], Shortening],
    beside: bool = False,
) -> tuple[Any, list[int]]:
    """All that a plan is made of, for models that are shortened before anything looks at them; and the number
    of layers of each model that was traced."""
    made: list[int] = []

    class Counted(tracer.Tracer):
        def __init__(
            self,
            asked: Asked,
            ranks: int,
            rank: int,
            shorten: Callable[[nn.Module], None],
            before_ampere: bool,
        ) -> None:
            first = shallow()

            def shorten_twice(model: nn.Module) -> None:
                first(model)
                shorten(model)

            super().__init__(asked, ranks, rank, shorten_twice, before_ampere)
            made.append(self.layers)

    with mock.patch.object(tracer, "Tracer", Counted):
        traces = Traces(asked, ranks, 0, beside=beside)
        start_up = traces.start_up(length)
        found: dict[str, Any] = {"start-up": numbered(start_up.set_up, start_up.first_step)}
        for rows in (11, 13) if traces.compiled else (2, 3):
            found[f"{rows} rows"] = numbered(traces.step(rows, length))
        found["noted"] = numbered(traces.noted(2, length))
        if asked.kind.generates:
            for phase in (*([GATHERING] if ranks > 1 else []), GENERATION, SCORING):
                found[phase] = numbered(traces.of_phase(phase, 2, length))
        found["model"] = traces.layers, traces.uneven, traces.max_seq_len, traces.as_written
    return found, made


def few_and_all(ranks: int, name: str, changes: tuple[str, ...], beside: bool = False) -> None:
    cfg = with_overrides(load_config(name), ["adaptive_batching.cache=False", *changes])
    plan = plan_request(cfg, ranks, "h100-80gb", length=LENGTH)
    asked = plan.asked
    period = int(asked["ac_option"]) if PATTERN in changes else 1
    repetitions = SHALLOW_IF_OFFLOADED if asked["enable_activation_offloading"] else SHALLOW

    def shallow() -> Shortening:
        return Shortening(repetitions, period)

    few, made = traced(asked, ranks, plan.length, shallow, beside)
    with mock.patch.object(any_depth, "_KEPT", ()):
        whole, whole_made = traced(asked, ranks, plan.length, shallow)
    for what in whole:
        assert few[what] == whole[what], (what, made)
    assert len(whole_made) == 1 and max(made) < whole_made[0], (made, whole_made)
    if beside:
        assert len(made) == 1, "the second model is another process's"


def label(one: Case) -> str:
    ranks, name, changes = one
    return " ".join([str(ranks), name, *(change.rpartition("_")[2] for change in changes)])


@pytest.mark.rotating
@pytest.mark.parametrize("one", MODELS, ids=label)
def test_steps_of_every_model_are_those_of_all_its_layers(one: Case) -> None:
    run_ranks(few_and_all, 1, *one, join=False)


@pytest.mark.rotating
@pytest.mark.parametrize("one", KINDS, ids=label)
def test_steps_of_every_kind_are_those_of_all_layers(one: Case) -> None:
    run_ranks(few_and_all, 1, *one, join=False)


@pytest.mark.rotating
@pytest.mark.parametrize("one", SETTINGS, ids=label)
def test_steps_with_any_settings_are_those_of_all_layers(one: Case) -> None:
    run_ranks(few_and_all, 1, *one, join=False)


BESIDE = [case(2, "llama2/70B_qlora"), case(2, "llama3_1/8B_adaptive_grpo")]


@pytest.mark.rotating
@pytest.mark.parametrize("one", BESIDE, ids=label)
def test_steps_that_two_processes_trace_are_those_of_all_layers(one: Case) -> None:
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        run(few_and_all, *one, True).result(600)


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", SLOW, ids=label)
def test_steps_that_take_long_to_trace_are_those_of_all_layers(one: Case) -> None:
    run_ranks(few_and_all, 1, *one, join=False, timeout=900)


@pytest.mark.exhaustive
def test_steps_with_images_are_those_of_all_layers() -> None:
    use_torchvision()
    run_ranks(
        few_and_all_with_images, 1, *case(2, "llama3_2_vision/90B_lora"), join=False, timeout=900
    )


def few_and_all_with_images(*one: Any) -> None:
    use_torchvision()
    few_and_all(*one)
