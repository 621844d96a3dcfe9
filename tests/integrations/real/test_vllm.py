"""Trainers whose completions a stand-in of vLLM generates: what is asked of it, and when memory runs out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Adaptive,
    Loss,
    Result,
    apart,
    assert_near,
    fsdp2_on_cpu,
    llama,
    lora,
    lose_memory,
    losses_in,
    make,
    on_ranks,
    rank,
    result,
    saved,
    texts,
)
from tests.integrations.real.ways import WAYS
from torchtune_adaptive import TrainingOutOfMemory

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
ASLEEP = {"vllm_enable_sleep_mode": True}
SERVER = {"vllm_mode": "server", "vllm_server_timeout": 30.0}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, asleep": ASLEEP,
    "grpo, server": SERVER,
    "grpo, reference": {"beta": 0.1} | ASLEEP,
    "grpo, several iterations": {"num_iterations": 2},
    "grpo, generated for several steps": {"steps_per_generation": 4} | ASLEEP,
    "grpo, uncorrected": {"vllm_importance_sampling_correction": False},
    "grpo, lora": {"peft_config": "lora"} | ASLEEP,
    "grpo, evaluated": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    "rloo": {"beta": 0.05},
    "rloo, asleep": {"beta": 0.05} | ASLEEP,
    "rloo, server": {"beta": 0.05} | SERVER,
}
Call = tuple[str, Any]


def trained(
    name: str,
    way: str,
    options: Adaptive | None,
    *lost: Loss,
    failing: Callable[[Any], None] = lambda trainer: None,
) -> tuple[Result, list[Call]]:
    """The result of a training, and what was asked of vLLM in turn."""
    import vllm

    vllm.calls.clear()
    settings = {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": None}
    settings |= CASES[name] | WAYS.get(way, {})
    if "peft_config" in settings:
        settings["peft_config"] = lora()
    if "eval_strategy" in settings:
        settings["eval_dataset"] = texts("prompt", count=8)
    # In the environment TRL tells the engine that there are ranks, and the next trainer would believe it.
    with (
        mock.patch.dict(os.environ),
        tempfile.TemporaryDirectory() as folder,
        served(settings, folder),
    ):
        trainer = make(name.partition(",")[0], options, folder, **settings)
        left = [lose_memory(trainer, one) for one in lost]
        note_training(trainer)
        failing(trainer)
        trainer.train()
        assert not any(each() for each in left)
        return result(trainer), [(call.name, call.of) for call in vllm.calls]


@contextmanager
def served(settings: dict[str, Any], folder: str) -> Iterator[None]:
    """A context in which a server is there, if the settings are for one."""
    from trl.generation.vllm_client import VLLMClient
    from vllm.server import serving

    if settings["vllm_mode"] != "server" or os.environ.get("RANK", "0") != "0":
        yield
        return
    saved(llama(), f"{folder}/served")
    connect = VLLMClient.init_communicator  # which knows that NCCL needs a GPU
    with (
        mock.patch.object(
            VLLMClient, "init_communicator", lambda self, device: connect(self, "cuda")
        ),
        serving(f"{folder}/served") as port,
    ):
        settings["vllm_server_base_url"] = f"http://127.0.0.1:{port}"
        yield


def note_training(trainer: Any) -> None:
    """Note when the policy is trained or tried, and whether vLLM is asleep then."""
    import vllm

    engine = getattr(trainer.vllm_generation, "llm", None)
    [layer] = [each for name, each in trainer.model.named_modules() if name.endswith("layers.1")]

    def note(*_: Any) -> None:
        call = vllm.Call("train", bool(engine is not None and engine._asleep))
        if torch.is_grad_enabled() and vllm.calls[-1:] != [call]:
            vllm.calls.append(call)

    layer.register_forward_pre_hook(note)


def compare(name: str, way: str = "") -> dict[str, Any]:
    """The distances of ours from the plain trainer: as configured, searched, and with memory lost."""
    if way == "fsdp2":
        fsdp2_on_cpu()
    places = ["policy"]
    if "uncorrected" not in name or "iterations" in name:
        places.append("scoring")
    if CASES[name].get("beta"):
        places.append("reference")
    lost = losses_in(places, way)
    plain, asked = trained(name, way, None)
    ours = {
        "equal": trained(name, way, AS_CONFIGURED),
        "searched": trained(name, way, SEARCHING),
        "lost": trained(name, way, AS_CONFIGURED, *lost),
    }
    for one, _ in ours.values():
        assert one.logs[0].keys() >= plain.logs[0].keys()
        if "eval_strategy" in CASES[name]:
            assert len(one.column("eval_loss")) == len(plain.column("eval_loss")) == 2
    return {
        "apart": {key: apart(one, plain) for key, (one, _) in ours.items()},
        "same weights": torch.equal(ours["equal"][0].weights, plain.weights),
        "searched": ours["searched"][0].sizes,
        "lost": ours["lost"][0].sizes,
        "plain asked": asked,
        "others asked": [key for key, (_, calls) in ours.items() if calls != asked],
    }


def check(name: str, seen: dict[str, Any]) -> None:
    for distances in seen["apart"].values():
        assert_near(distances)
    assert seen["searched"] == (8, 8) and seen["lost"][1] < 4, seen
    assert seen["others asked"] == [], seen  # in the same order, by the same numbers of prompts


@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str) -> None:
    [seen] = on_ranks(compare, 1, name)
    assert not any(seen["apart"]["equal"].values()) and seen["same weights"], seen
    check(name, seen)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["grpo, asleep", "grpo, server", "rloo"])
def test_two_ranks(name: str, way: str) -> None:
    for seen in on_ranks(compare, 2, name, way):
        check(name, seen)


def test_what_is_asked_of_the_engine() -> None:
    """Trials and steps run while it sleeps, and it gets weights before it generates, as in plain."""
    [seen] = on_ranks(compare, 1, "grpo, asleep")
    calls = seen["plain asked"]
    assert seen["others asked"] == []
    weights = dict(calls)["load_weights"]
    round_of_calls = [
        ("wake_up", ("weights",)),
        ("load_weights", weights),
        ("reset_prefix_cache", None),
        ("wake_up", ("kv_cache",)),
        ("generate", 8),
        ("sleep", None),
        ("train", True),
    ]
    assert calls == [("LLM", None), ("sleep", None), *4 * round_of_calls]


def test_what_is_asked_of_the_server() -> None:
    [seen] = on_ranks(compare, 1, "grpo, server")
    assert seen["others asked"] == []
    names = [name for name, _ in seen["plain asked"]]
    round_of_calls = ["start_weight_update", "load_weights", "finish_weight_update"]
    round_of_calls += ["reset_prefix_cache", "generate", "train"]
    assert names == ["LLM", "init_weight_transfer_engine", *4 * round_of_calls]


# --- memory that runs out beside vLLM -----------------------------------------------------------------


def failing_at(calls: int, own: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """A function that fails at the last of so many calls."""
    left = calls

    def called(*args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return own(*args, **named)

    return called


def fail(place: str, calls: int, on: int, trainer: Any) -> None:
    """Let memory run out at a place, on a rank, at one of its calls."""
    if rank() != on:
        return
    generation = trainer.vllm_generation
    error = torch.OutOfMemoryError("CUDA out of memory (injected)")
    if place == "load":
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
        runner.load_weights = failing_at(calls, runner.load_weights, error)
    elif place == "gather":
        from torch.distributed.tensor import DTensor

        DTensor.full_tensor = failing_at(calls, DTensor.full_tensor, error)  # type: ignore[method-assign]
    elif place == "wake up":
        text = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
        engine = generation.llm
        engine.wake_up = failing_at(calls, engine.wake_up, RuntimeError(text))
    else:
        generation.llm.generate = failing_at(calls, generation.llm.generate, error)


def ended(name: str, way: str, place: str, calls: int, on: int) -> str:
    if way == "fsdp2":
        fsdp2_on_cpu()
    with pytest.raises(TrainingOutOfMemory) as error:
        trained(name, way, AS_CONFIGURED, failing=partial(fail, place, calls, on))
    return str(error.value)


REMEDY = "There is no checkpoint; begin again, with vllm_gpu_memory_utilization below 0.3"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [1, 2, 13, 21, 22, 63])
def test_all_ranks_end_where_weights_do_not_fit_on_one(way: str, calls: int) -> None:
    said = on_ranks(ended, 2, "grpo", way, "load", calls, calls % 2, timeout=120)
    where = f"Out of memory in sending weights to vLLM on rank {calls % 2}, after step {(calls - 1) // 21}"
    for each in said:
        assert each.startswith(where) and REMEDY in each, said
        assert "or with vllm_enable_sleep_mode=True" in each


@pytest.mark.parametrize("calls", [1, 5, 21, 22, 50])
def test_all_ranks_end_where_a_gathered_weight_does_not_fit_on_one(calls: int) -> None:
    for each in on_ranks(ended, 2, "grpo", "fsdp2", "gather", calls, 1, timeout=120):
        assert each.startswith("Out of memory in sending weights to vLLM on rank 1"), each


@pytest.mark.parametrize("on", [0, 1])
def test_all_ranks_end_before_a_server_is_told_of_weights_that_cannot_be_gathered(on: int) -> None:
    for each in on_ranks(ended, 2, "grpo, server", "fsdp2", "gather", 7, on, timeout=120):
        assert each.startswith(f"Out of memory in sending weights to vLLM on rank {on}"), each
        assert "FSDP over more devices" in each


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_all_ranks_end_where_the_engine_cannot_wake_up_on_one(calls: int) -> None:
    said = on_ranks(ended, 2, "grpo, asleep", "ddp", "wake up", calls, 1, timeout=120)
    assert "vLLM" in said[1] and REMEDY in said[1] and "sleep_mode" not in said[1], said
    assert REMEDY in said[0] or said[0].startswith("generation failed on another process")


def test_all_ranks_end_where_the_engine_cannot_generate_on_one() -> None:
    zero, one = on_ranks(ended, 2, "grpo", "fsdp2", "generate", 2, 1, timeout=120)
    assert zero.startswith("generation failed on another process")
    assert one.startswith("Out of memory in vLLM (CUDA out of memory (injected)), after step 1"), (
        one
    )
