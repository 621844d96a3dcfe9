"""Plans of TRL's GRPOTrainer and RLOOTrainer for a tiny model; ``test_real_rollouts`` has the trainers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library import (
    RolloutsPlan,
    TransformersRollouts,
    phase_planning,
)
from torchtune_adaptive.library.rollout_parts import gathered, numbers_in_weights, shard
from torchtune_adaptive.library.trainer_parts import Adapters, adapt
from torchtune_adaptive.library.vllm_engine import ASLEEP, EngineNeeds, VllmEngine, engine_needs
from torchtune_adaptive.planner import call_alone

GIB = 1 << 30
MEMORY = 6 * GIB
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "vocab_size": 2048}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
VLLM = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"gradient_accumulation_steps": 2},
    "beta": {"beta": 0.1},
    "lora": {"lora": True, "beta": 0.1},
    "padded": {**VLLM, "vllm_mode": "server", "padded": True},
    "colocate": VLLM,
    "sleep": {**VLLM, "vllm_enable_sleep_mode": True},
    "server": {**VLLM, "vllm_mode": "server"},
    "rloo": {"trainer": "RLOOTrainer", "beta": 0.05, "top_p": 0.9},
    "fsdp": {"beta": 0.1, "ranks": 2, "fsdp": True},
}


def step(**settings: Any) -> TransformersRollouts:
    given = {"folder": "model", "max_prompt_length": 16, "max_completion_length": 112} | settings
    return TransformersRollouts(**given)


def plan_all(folder: str) -> dict[str, RolloutsPlan]:
    """All plans, in one process that does nothing else."""

    def here(work: Any, *arguments: Any, timeout: float) -> Any:
        return work(*arguments)

    with mock.patch.object(phase_planning, "call_alone", here):
        return {
            name: step(folder=folder, dtype="bfloat16", **case).plan(
                gpu="h100", memory=MEMORY, cache=False
            )
            for name, case in CASES.items()
        }


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RolloutsPlan]:
    folder = tmp_path_factory.mktemp("model")
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
    (folder / "config.json").write_text(json.dumps(about))
    with without_torchvision():
        return call_alone(plan_all, str(folder), timeout=500)


def peaks(plan: RolloutsPlan) -> dict[str, int]:
    return {phase.name: phase.peak for phase in plan.phases}


def beside(plan: RolloutsPlan) -> dict[str, int]:
    return {phase.name: phase.beside for phase in plan.phases}


WEIGHTS = 2 * (2 * 2048 * 256 + 256 + 256 * 256 * 3 + 3 * 256 * 704 + 2 * 256)
"""Bytes of the weights: embeddings and head, the last norm, and a layer."""


def test_phases_follow_from_the_settings(plans: dict[str, RolloutsPlan]) -> None:
    reference = "scoring by the reference"
    assert {name: [*peaks(plan)] for name, plan in plans.items()} == {
        "plain": ["generation", "training"],
        "beta": ["generation", reference, "training"],
        "lora": ["generation", reference, "training"],
        "padded": ["generation", "scoring", "training"],
        "colocate": ["generation", "scoring", "training"],
        "sleep": ["generation", "scoring", "training"],
        "server": ["generation", "scoring", "training"],
        "rloo": ["generation", "scoring", "training"],
        "fsdp": ["generation", reference, "training"],
    }


def test_the_model_generates_all_rows_at_once_with_a_cache(plans: dict[str, RolloutsPlan]) -> None:
    generation, training = plans["plain"].phases
    assert (generation.rows, training.rows) == (16, 8)
    # Keys and values of one layer, 4 heads of 32 numbers, of all tokens but the last.
    assert generation.parts["caches of keys and values"] >= 16 * 127 * 2 * 4 * 32 * 2
    assert generation.largest >= plans["plain"].largest == training.largest > 0


def test_a_reference_is_a_second_model_or_the_same_without_adapters(
    plans: dict[str, RolloutsPlan],
) -> None:
    with_it, without = plans["beta"].phases[-1].parts, plans["plain"].phases[-1].parts
    assert without["parameters"] == pytest.approx(WEIGHTS, rel=0.001)  # and buffers
    assert with_it["parameters"] == pytest.approx(2 * WEIGHTS, rel=0.001)
    adapters = plans["lora"].phases[-1].parts["parameters"] - WEIGHTS
    assert 0 < adapters < WEIGHTS / 4
    assert plans["fsdp"].phases[-1].parts["parameters"] < with_it["parameters"]
    gathers = plans["fsdp"].phases[1].parts["gathered parameters"]
    assert gathers >= WEIGHTS, "TRL shards the reference as one unit"


def test_padding_costs_a_mask(plans: dict[str, RolloutsPlan]) -> None:
    mask = 8 * 128 * 128
    padded, plain = (plans[name].phases[-1] for name in ("padded", "server"))
    assert padded.parts["activations"] - plain.parts["activations"] >= mask


def test_colocated_vllm_takes_its_share_all_the_time_or_while_it_generates(
    plans: dict[str, RolloutsPlan],
) -> None:
    share = MEMORY // 2
    assert beside(plans["colocate"]) == dict.fromkeys(("generation", "scoring", "training"), share)
    assert beside(plans["sleep"]) == {"generation": share, "scoring": ASLEEP, "training": ASLEEP}
    assert {*beside(plans["server"]).values()} == {0}
    alike = [peaks(plans[name]) for name in ("colocate", "sleep", "server")]
    assert alike[0] == alike[1] == alike[2], "of the trainer itself"
    found = [plans[name].largest for name in ("colocate", "sleep", "server")]
    assert 0 < found[0] < found[1] < found[2]


def test_what_is_usable_is_what_vllm_leaves(plans: dict[str, RolloutsPlan]) -> None:
    plan = plans["colocate"]
    training = plan.phases[-1]
    assert plan.largest == min(training.largest, plan.phases[1].largest)
    assert training.usable_bytes == int(MEMORY * 0.95) - MEMORY // 2


@pytest.mark.parametrize("name", ["colocate", "sleep"])
def test_the_highest_share_leaves_room_for_the_rows(
    name: str, plans: dict[str, RolloutsPlan]
) -> None:
    plan, usable = plans[name], int(MEMORY * 0.95)
    assert plan.most_utilization is not None
    taken = [
        peak for phase, peak in peaks(plan).items() if name == "colocate" or phase == "generation"
    ]
    assert max(taken) + plan.most_utilization * MEMORY <= usable
    assert max(taken) + (plan.most_utilization + 0.01) * MEMORY > usable
    assert plans["server"].most_utilization is None


def test_what_vllm_needs_is_told(plans: dict[str, RolloutsPlan]) -> None:
    needs = plans["colocate"].engine
    assert needs == EngineNeeds(WEIGHTS, 1024 * 2 * 4 * 32 * 2, 1024)
    assert plans["plain"].engine is None and plans["server"].engine is None


def test_the_phase_with_the_least_room_limits(plans: dict[str, RolloutsPlan]) -> None:
    for plan in plans.values():
        room = {phase.name: phase.usable_bytes - phase.peak for phase in plan.phases}
        assert plan.limiting == min(room, key=lambda name: room[name])
        assert plan.peak == peaks(plan)[plan.limiting]
        assert plan.largest == min(phase.largest for phase in plan.phases)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"trainer": "SFTTrainer"}, "trainer: 'SFTTrainer' must be one of: 'GRPOTrainer'"),
        ({"max_completion_length": 0}, "max_completion_length: 0 must be a whole number"),
        ({"steps_per_generation": 1.5}, "steps_per_generation: 1.5 must be a whole number"),
        ({"num_generations": 1}, "num_generations: advantages compare completions"),
        ({"num_generations": 3}, "num_generations: 3 does not divide the 8 completions"),
        ({"generation_batch_size": 12}, "generation_batch_size: 12 is no multiple of 8"),
        (
            {"generation_batch_size": 16, "steps_per_generation": 2},
            "steps_per_generation says the same",
        ),
        ({"vllm_mode": "elsewhere"}, "vllm_mode: 'elsewhere' must be one of: 'colocate', 'server'"),
        ({"vllm_gpu_memory_utilization": 30}, "vllm_gpu_memory_utilization: 30 must be a share"),
        ({**VLLM, "vllm_tensor_parallel_size": 2}, "does not divide the 1 GPUs"),
        ({"precompute_ref_log_probs": True}, "completions are not known before"),
        ({"packing": True}, "packing: what is packed is SFTTrainer's, not GRPOTrainer's"),
        ({"use_vllm": "yes"}, "use_vllm: 'yes' must be one of: True, False"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        step(**settings)


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({}, False),
        ({"steps_per_generation": 4}, True),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, False),
        ({"num_iterations": 2}, True),
        (VLLM, True),
        ({**VLLM, "vllm_importance_sampling_correction": False}, False),
        ({"trainer": "RLOOTrainer"}, True),
    ],
)
def test_the_policy_scores_where_it_may_have_changed(
    settings: dict[str, Any], scores: bool
) -> None:
    assert step(**settings).scores is scores


def test_rows_that_are_generated_together() -> None:
    assert step(gradient_accumulation_steps=4).rows_generated == 32
    assert step(gradient_accumulation_steps=4, steps_per_generation=2).rows_generated == 16
    of_all = step(generation_batch_size=64, ranks=2)
    assert (of_all.generated_together, of_all.rows_generated) == (4, 32)
    assert step().max_length == 128


def test_the_share_of_vllm_is_of_the_whole_card() -> None:
    engine = VllmEngine(80 * GIB, 0.3, here=True, sleeps=False)
    assert engine.share == engine.share_in_training == 24 * GIB
    assert VllmEngine(80 * GIB, 0.3, here=False, sleeps=False).share == 0
    asleep = VllmEngine(80 * GIB, 0.3, here=True, sleeps=True)
    assert (asleep.share, asleep.share_in_training) == (24 * GIB, ASLEEP)
    assert engine.most(76 * GIB, 20 * GIB, 44 * GIB) == 0.4
    assert asleep.most(76 * GIB, 20 * GIB, 44 * GIB) == 0.7
    assert asleep.most(76 * GIB, 20 * GIB, 76 * GIB) == 0.0, "nothing is left for what sleeps"
    assert engine.most(76 * GIB, 80 * GIB, 1) == 0.0
    assert engine.most(200 * GIB, 0, 0) == 0.99


def test_the_cache_of_vllm_is_known_for_keys_and_values_of_each_token() -> None:
    qwen = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
    qwen |= {"head_dim": 128, "hidden_size": 1024, "max_position_embeddings": 40960}
    needs = engine_needs(qwen, 600_000_000, 2, None)
    each = 2 * 28 * 8 * 128 * 2
    assert needs == EngineNeeds(600_000_000, 40960 * each // 2, 40960)
    assert engine_needs(qwen, 1, 1, 2048).tokens == 2048
    assert needs.sequences(needs.weights + 10 * 1000 * each // 2, 1000) == 10
    for other in ({"kv_lora_rank": 512}, {"layer_types": ["linear_attention", "full_attention"]}):
        unknown = engine_needs({**qwen, **other}, 600_000_000, 1, None)
        assert unknown.cache is None and unknown.sequences(GIB, 10) is None
        assert unknown.least == unknown.weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def test_a_share_of_a_model_is_whole_where_it_is_gathered() -> None:
    model = Tied()
    shard(model, 4)
    assert model.embedding.weight.shape == (3, 4) and model.head.weight.shape == (0, 4)
    with gathered(model, torch.bfloat16):
        assert model.head.weight is model.embedding.weight
        assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 10)
        assert model.layer.weight.dtype == torch.bfloat16
    assert model.layer.weight.shape == (1, 4) and not [*model.parameters()]


def test_adapters_are_not_among_the_weights_of_vllm() -> None:
    class Model(Tied):
        config = SimpleNamespace(model_type="llama")

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    before = numbers_in_weights(model)
    adapt(model, Adapters(["layer"], 2))
    assert numbers_in_weights(model) == before == 40 + 16 + 4


def test_it_says_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtune_adaptive.library import transformers_step

    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    text = "\n".join(step(lora=True, beta=0.1).about())
    assert "GRPOTrainer as of TRL 1.16" in text and "the model without adapters" in text
    assert "prompts of 16 tokens, completions of 112" in text and "8 for each prompt" in text
    assert "asleep it is taken to keep 1 GiB" in "\n".join(
        step(**VLLM, vllm_enable_sleep_mode=True).about()
    )
    assert (
        "0.5 of the whole card by its own setting (arithmetic, not measured) all the time"
        in "\n".join(step(**VLLM).about())
    )
    assert "by a server of vLLM on other GPUs" in "\n".join(
        step(**VLLM, vllm_mode="server").about()
    )
