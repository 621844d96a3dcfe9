"""``Adaptive(dropout="sample")``: dropout of PEFT's adapters that follows the rows of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    Result,
    apart,
    assert_near,
    distance,
    make,
    on_ranks,
    texts,
    tokens,
    trained,
)
from tests.integrations.real.ways import WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
BY_SAMPLE = replace(AS_CONFIGURED, dropout="sample")
KINDS = ["sft", "dpo", "kto", "reward"]


def adapters(kind: str) -> Any:
    from peft import LoraConfig

    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    names = ["q_proj", "v_proj"]
    # Not zero, so that the first gradients follow the masks, too.
    return LoraConfig(
        r=4, target_modules=names, task_type=task, lora_dropout=0.3, init_lora_weights=False
    )


def run(
    kind: str,
    options: Adaptive,
    rows: int,
    batches: int,
    lost: Loss | tuple[()] = (),
    way: str = "ddp",
    **settings: Any,
) -> list[dict[str, float]]:
    """What a training logs."""
    if kind != "sft":
        settings["disable_dropout"] = False
    if way == "fsdp2":
        fsdp2_on_cpu()
    size = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batches}
    settings = {"peft_config": adapters(kind)} | size | WAYS[way] | settings
    return trained(kind, options, lost, **settings).logs


def logged(ranks: int, *arguments: Any, **settings: Any) -> Result:
    [logs, *_] = on_ranks(partial(run, **settings), ranks, *arguments)
    return Result(logs, torch.empty(0))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_processes_and_retries_change_no_mask(kind: str) -> None:
    expected = logged(1, kind, BY_SAMPLE, 8, 1)
    assert distance(logged(1, kind, AS_CONFIGURED, 8, 1), expected, "loss") > 1e-4
    others = logged(1, kind, BY_SAMPLE, 2, 4)
    retried = logged(1, kind, BY_SAMPLE, 8, 1, Loss())
    on_two = logged(2, kind, BY_SAMPLE, 2, 2)
    for found in (others, retried, on_two):
        assert_near(apart(found, expected))


def test_neither_do_shards_searches_and_budgets() -> None:
    expected = logged(1, "sft", BY_SAMPLE, 8, 1)
    searching = replace(SEARCHING, dropout="sample")
    budget = replace(searching, token_budget=True)
    for found in (
        logged(2, "sft", BY_SAMPLE, 4, 1, (), "fsdp2"),
        logged(1, "sft", searching, 4, 2),
        logged(1, "sft", budget, 2, 4),
        logged(2, "sft", budget, 2, 2),
    ):
        assert_near(apart(found, expected))


def test_neither_do_compilers_and_checkpointing() -> None:
    expected = logged(1, "sft", BY_SAMPLE, 8, 1)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    checkpointed = {"gradient_checkpointing": True}
    fastest = replace(SEARCHING, dropout="sample", fastest=True)
    assert_near(apart(logged(1, "sft", BY_SAMPLE, 4, 2, **compiled), expected))
    assert_near(apart(logged(1, "sft", BY_SAMPLE, 4, 2, **checkpointed), expected))
    assert_near(apart(logged(1, "sft", fastest, 4, 2, **checkpointed), expected))


def test_a_run_goes_on_on_other_processes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saving = {"folder": folder, "save_strategy": "steps", "save_steps": 2}
    whole = logged(1, "sft", BY_SAMPLE, 4, 2, **saving)
    resumed = logged(2, "sft", BY_SAMPLE, 4, 2, folder=folder, resume=f"{folder}/checkpoint-2")
    assert_near(apart(resumed, whole))


def left_behind(folder: str) -> list[str]:
    trainer = make("sft", BY_SAMPLE, folder, peft_config=adapters("sft"))
    trainer.train()
    return [type(each).__name__ for each in trainer.model.modules() if isinstance(each, nn.Dropout)]


def test_a_trained_model_drops_as_before(tmp_path: Path) -> None:
    assert {*on_ranks(left_behind, 1, str(tmp_path))[0]} == {nn.Dropout.__name__}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "neftune_noise_alpha": ("sft", {"neftune_noise_alpha": 5.0}),
    "padding_free": ("sft", {"packing": True, "max_length": 16}),
    "prompts are padded in front": ("grpo", {}),
    "attention_dropout: its random numbers": ("trainer", {"config": {"attention_dropout": 0.1}}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_drawn_for_no_sample_is_refused(said: str, tmp_path: Path) -> None:
    kind, settings = REFUSED[said]
    if "packing" in settings:
        settings = settings | {"data": texts("text", count=200)}
    if kind == "trainer":
        settings = settings | {"data": tokens(16)}
    with pytest.raises(UsageError, match=f"^dropout: by sample, but .*{said}"):
        make(kind, BY_SAMPLE, str(tmp_path), **settings)
