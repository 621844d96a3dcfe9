"""The step of a trainer is planned by a few of the model's layers: it is that of the model, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.helpers.first_steps import in_use
from tests.helpers.hugging_face import about
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.library import TransformersStep, model_steps, planning
from torchtune_adaptive.library.step_choices import EVEN
from torchtune_adaptive.planner import RecordedStep, call_alone, deep_step
from torchtune_adaptive.planner.memory.recorded_step import (
    first_of_its_size,
    kept_by,
)
from torchtune_adaptive.planner.trace import any_depth

pytestmark = pytest.mark.ranks

LAYERS = 14
MODELS = {
    "Llama": about("Llama", 96, LAYERS, 4, 2, 64, 96, 512),
    # Every second layer attends to a window.
    "Gemma2": about("Gemma2", 96, 2 * LAYERS, 4, 2, 64, 96, 512, head_dim=16),
    "Qwen3": about("Qwen3", 96, LAYERS, 4, 2, 64, 96, 512, head_dim=16, tie_word_embeddings=True),
}
STEPS: dict[str, dict[str, Any]] = {
    "full": {},
    "Trainer": {"trainer": "Trainer", "bf16": False, "gradient_checkpointing": False},
    "FSDP": {"ranks": 2, "fsdp": True},
    "LoRA": {"lora": True},
    "QLoRA": {"lora": True, "load_in_4bit": True},
    "8 bits": {"lora": True, "load_in_8bit": True},
    "packed": {"packing": True, "padded": False},
    "DPO": {"trainer": "DPOTrainer"},
    "DPO with adapters": {"trainer": "DPOTrainer", "lora": True},
    "accumulation": {"gradient_accumulation_steps": 2, "optim": "adamw_torch"},
}
DDP = {"ranks": 2, "lora": True}
CASES = [("Llama", name) for name in STEPS] + [
    ("Gemma2", "full"),
    ("Gemma2", "LoRA"),
    ("Qwen3", "QLoRA"),
    ("Qwen3", "FSDP"),
]


@pytest.fixture(autouse=True)
def no_torchvision() -> Iterator[None]:
    with without_torchvision():
        yield


class _Asked(Exception):
    """Carries a question."""


def asked(folder: Path, model: str, **settings: Any) -> Any:
    """The question that a step asks of the process that traces."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    settings = {"padded": False, "max_length": 24, **settings}
    step = TransformersStep(folder=str(folder), **settings)

    def ask(_: Any, question: Any, **__: Any) -> None:
        raise _Asked(question)

    with mock.patch.object(planning, "call_alone", ask), pytest.raises(_Asked) as found:
        step.plan(cache=False)
    return found.value.args[0]


def traced(question: Any) -> tuple[list[Any], list[int]]:
    """All that a plan is made of, and the number of layers of each model that was traced."""
    made: list[int] = []

    class Counted(model_steps.ModelTracer):
        def _built(self, build: Any) -> Any:
            self.model = super()._built(build)
            return self.model

        def take_step(self, rows: int) -> RecordedStep:
            lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
            made.append(max(map(len, lists)))
            return super().take_step(rows)

    with mock.patch.object(model_steps, "ModelTracer", Counted):
        steps = model_steps.StepsOfModel(question, EVEN)
        start_up = steps.start_up
        found = [start_up.first_step, *(steps.step(rows) for rows in (2, 3))]
    places: list[Any] = [in_any_order(deep_step._of_memory(start_up.set_up, found[0]))]
    for each in found[1:]:
        assert each.operations is not None
        places += [in_any_order(deep_step._of_memory(each))]
        places += [deep_step._of_operations(each.operations)]
    return places, made


def in_any_order(events: list[Any]) -> list[Any]:
    """Events with what is released at once, which garbage collection orders, in one order."""
    found: list[Any] = []
    for released, together in groupby(events, key=lambda event: event.kind[0] == "freed"):
        at_once = list(together)
        found += sorted(at_once, key=lambda event: event.refers_to) if released else at_once
    return found


def few_and_all(question: Any) -> tuple[bool, int, int]:
    few, made = traced(question)
    with mock.patch.object(any_depth, "_KEPT", ()):
        whole, whole_made = traced(question)
    return few == whole, max(made), max(whole_made)


@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize(("model", "name"), CASES)
def test_the_step_of_all_layers_follows_from_a_few(tmp_path: Path, model: str, name: str) -> None:
    question = asked(tmp_path, model, **STEPS[name])
    same, few, all_layers = call_alone(few_and_all, question, timeout=300)
    assert same
    assert few < all_layers == MODELS[model]["num_hidden_layers"]


@pytest.mark.alternating
def test_buckets_of_gradients_need_all_layers(tmp_path: Path) -> None:
    """A bucket of DDP ends after so many bytes, wherever that is in a layer."""
    question = asked(tmp_path, "Llama", **DDP)
    same, few, all_layers = call_alone(few_and_all, question, timeout=300)
    assert same
    assert few == all_layers == LAYERS


FIRST_STEPS: dict[str, dict[str, Any]] = {
    **{name: STEPS[name] for name in ("full", "Trainer", "FSDP", "LoRA", "QLoRA", "accumulation")},
    "8 bits": {"optim": "adamw_8bit"},
    "DDP": {"ranks": 2, "gradient_accumulation_steps": 3},
}


def first_steps(question: Any) -> tuple[list[Any], list[Any], int]:
    """A first step of many rows: as it follows from one of few, and as it is traced; and how many blocks it
    keeps."""
    few, many = question.least, 2 * question.least + 1
    begun = model_steps.StepsOfModel(question, EVEN)
    step = begun.step(many)
    kept = kept_by(begun.start_up.first_step, step)
    of_many = model_steps.StepsOfModel(replace(question, least=many), EVEN)
    assert few < many
    computed = first_of_its_size(step, kept)
    return in_use(computed), in_use(of_many.start_up.first_step.events), len(kept)


@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_a_first_step_of_any_size_follows_from_a_small_one(tmp_path: Path, name: str) -> None:
    question = asked(tmp_path, "Llama", **FIRST_STEPS[name])
    assert not question.searches
    computed, as_traced, kept = call_alone(first_steps, question, timeout=300)
    assert computed == as_traced
    assert kept > LAYERS
