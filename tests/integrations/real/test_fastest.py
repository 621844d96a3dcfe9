"""``Adaptive(fastest=True)``: how many layers of a transformers model are checkpointed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.integrations.real.trainers import (
    Loss,
    Result,
    distance,
    lora,
    lose_memory,
    make,
    on_ranks,
    result,
    tokens,
)
from tests.integrations.real.ways import WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
LAYERS = 8
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 256}


def fastest(limit: str) -> Adaptive:
    return Adaptive(memory_limit=limit, fastest=True)


@contextmanager
def clock_of_computations() -> Iterator[None]:
    """A device's clock that counts what layers compute, so that timings do not depend on the machine."""
    computed, forward = 0, LlamaAttention.forward

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal computed
        output = forward(self, *args, **named)
        computed += output[0].numel()
        return output

    def clock(self: Any) -> float:
        return float(computed)

    with (
        mock.patch.object(LlamaAttention, "forward", counted),
        mock.patch.object(SimulatedMemory, "clock", clock),
    ):
        yield


def trained(
    kind: str,
    options: Adaptive | None,
    lost: Loss | None = None,
    resume: Any = None,
    **settings: Any,
) -> Result:
    """The result of a training, with the layers that are checkpointed in the end."""
    settings = {"gradient_checkpointing": True, "config": CONFIG} | settings
    with tempfile.TemporaryDirectory() as folder, clock_of_computations():
        trainer = make(kind, options, settings.pop("folder", folder), **settings)
        left = lose_memory(trainer, lost) if lost else lambda: 0
        trainer.train(resume_from_checkpoint=resume)
        assert not left()
        found = result(trainer)
    layers = trainer.accelerator.unwrap_model(trainer.model).modules()
    on = [
        each.gradient_checkpointing
        for each in layers
        if type(each).__name__.endswith("LlamaDecoderLayer")
    ]
    steps = getattr(trainer, "_adaptive_step", None)
    found.more = {
        "on": on,
        "chosen": steps and steps._step.layers and steps._step.layers.checkpointed,
    }
    return found


def beside_plain(kind: str, way: str, limit: str, settings: dict[str, Any]) -> dict[str, Any]:
    if way == "fsdp2":
        fsdp2_on_cpu()
    if settings.get("peft_config"):
        settings["peft_config"] = lora()
    settings = settings | WAYS.get(way, {})
    plain, ours = trained(kind, None, **settings), trained(kind, fastest(limit), **settings)
    lost = trained(kind, fastest(limit), Loss(step=2, times=1), **settings)
    return {
        "plain": plain.more["on"],
        "on": ours.more["on"],
        "chosen": ours.more["chosen"],
        "after": lost.more["on"],
        "losses": distance(ours, plain, "loss"),
        "near": max(distance(ours, plain), distance(lost, plain)),
    }


@pytest.mark.parametrize(
    ("kind", "way", "settings"),
    [
        ("sft", "alone", {}),
        ("sft", "alone", {"gradient_checkpointing": False}),
        ("sft", "alone", {"peft_config": True}),
        ("trainer", "ddp", {}),
        ("sft", "fsdp2", {}),
        ("reward", "alone", {}),
    ],
)
def test_fewer_layers_where_there_is_memory(kind: str, way: str, settings: dict[str, Any]) -> None:
    """The losses stay; where memory runs out, all layers are checkpointed first."""
    for seen in on_ranks(beside_plain, 1 if way == "alone" else 2, kind, way, "1GiB", settings):
        on = settings.get("gradient_checkpointing", True)
        assert seen["plain"] == [on] * LAYERS
        assert seen["on"] == [n < seen["chosen"] for n in range(LAYERS)]
        assert seen["chosen"] < LAYERS
        assert seen["after"] == [True] * LAYERS
        assert seen["losses"] <= 1e-6 and seen["near"] <= 1e-5


def between() -> list[int]:
    """The layers that are checkpointed with more and more memory."""
    data = tokens(64)
    settings: dict[str, Any] = {"data": data, "per_device_train_batch_size": 8}
    settings["gradient_accumulation_steps"] = 1
    return [
        trained("trainer", fastest(f"{limit}MiB"), **settings).more["chosen"]
        for limit in (14, 18, 24, 64)
    ]


def test_as_many_as_must_be() -> None:
    [chosen] = on_ranks(between, 1)
    assert chosen[-1] < LAYERS and chosen == sorted(chosen, reverse=True), chosen


def resumed() -> tuple[Any, ...]:
    with tempfile.TemporaryDirectory() as folder:
        saves = {"save_strategy": "steps", "save_steps": 2, "folder": folder}
        whole = trained("sft", fastest("1GiB"), **saves)
        [checkpoint] = Path(folder).glob("checkpoint-2")
        again = trained("sft", fastest("1GiB"), resume=str(checkpoint), **saves)
    return whole.more["on"] == again.more["on"], bool((whole.weights == again.weights).all())


def test_a_resumed_run_has_as_many() -> None:
    assert on_ranks(resumed, 1) == [(True, True)]


def refused() -> list[str]:
    said = []
    for kind, settings in (
        ("grpo", {}),
        ("dpo", {}),
        ("trainer", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ):
        with pytest.raises(UsageError) as error:
            trained(kind, fastest("1GiB"), **settings)
        said.append(str(error.value))
    return said


def test_what_is_refused() -> None:
    [said] = on_ranks(refused, 1)
    assert said[0].startswith("fastest: GRPOTrainer turns activation checkpointing off")
    assert said[1].startswith("fastest: DPOTrainer turns activation checkpointing off")
    assert said[2].startswith("fastest: with torch_compile, layers cannot be switched")
