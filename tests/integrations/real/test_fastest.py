"""``Adaptive(fastest=True)``: how many layers of a transformers model are checkpointed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.helpers.faults import OutOfMemoryAt
from tests.integrations.real.trainers import (
    Loss,
    Result,
    distance,
    lora,
    lose_memory,
    make,
    on_ranks,
    rank,
    result,
    tokens,
)
from tests.integrations.real.ways import WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.library.fastest import _Comparing

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


class Ending(TrainerCallback):  # type: ignore[misc]
    """Notes which layers are checkpointed at the end of a training, which puts them back."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.on: list[bool] = []

    def on_train_end(self, *_: Any, **__: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        names = ((type(each).__name__, each) for each in model.modules())
        self.on = [e.gradient_checkpointing for name, e in names if name.endswith("DecoderLayer")]


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
        ending = Ending(trainer)
        trainer.add_callback(ending)
        trainer.train(resume_from_checkpoint=resume)
        assert not left()
        found = result(trainer)
    on = ending.on
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


class Choosing:
    """Loses memory on a rank, at an operation on the device, after the largest micro-batch is found."""

    def __init__(self, operation: int, on: int) -> None:
        self.fault = OutOfMemoryAt(operation if rank() == on else 0)
        self._running, self._choose = SimulatedMemory.running, _Comparing.choose
        self._choosing = False

    @contextmanager
    def running(self, memory: SimulatedMemory) -> Iterator[None]:
        with self._running(memory), self.fault if self._choosing else nullcontext():
            yield

    def choose(self, comparing: _Comparing, *args: Any) -> Any:
        self._choosing = True
        try:
            return self._choose(comparing, *args)
        finally:
            self._choosing = False

    @contextmanager
    def once(self) -> Iterator[None]:
        with (
            mock.patch.object(SimulatedMemory, "running", lambda memory: self.running(memory)),
            mock.patch.object(
                _Comparing, "choose", lambda comparing, *args: self.choose(comparing, *args)
            ),
        ):
            yield


def lost_while_choosing(way: str) -> list[tuple[Any, ...]]:
    """With memory lost in trials and timed steps: on which rank, whether it was, the choice, and the distance
    of the losses from the plain trainer's."""
    if way == "fsdp2":
        fsdp2_on_cpu()
    settings: dict[str, Any] = {"max_steps": 3, **WAYS[way]}
    plain = trained("sft", None, **settings)
    counting = Choosing(0, 0)
    with counting.once():
        trained("sft", fastest("1GiB"), **settings)
    seen = []
    for number, part in enumerate((0.03, 0.35, 0.65, 0.97)):
        choosing = Choosing(int(part * counting.fault.seen), on := number % 2)
        with choosing.once():
            ours = trained("sft", fastest("1GiB"), **settings)
        failed = choosing.fault.failed is not None
        seen.append((on, failed, ours.sizes, ours.more["chosen"], distance(ours, plain)))
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_memory_lost_while_choosing(way: str) -> None:
    """All ranks choose the same, and train as the plain trainer does."""
    for one, other in zip(*on_ranks(lost_while_choosing, 2, way, timeout=600), strict=True):
        on, *_, near = one
        assert (one[1], other[1]) == (on == 0, on == 1)
        assert one[2:4] == other[2:4]
        assert near <= 1e-5 and other[-1] <= 1e-5


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
