"""``Adaptive(dropout="sample")``: dropout of PEFT's adapters that follows the rows of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from torchtune_adaptive.core.step.sample_dropout import SampleDropout
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
BY_SAMPLE = replace(AS_CONFIGURED, dropout="sample")
KINDS = ["sft", "dpo", "reward"]


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
) -> Result:
    if kind in ("dpo", "reward"):
        settings["disable_dropout"] = False
    if way == "fsdp2":
        fsdp2_on_cpu()
    size = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batches}
    settings = {"peft_config": adapters(kind)} | size | WAYS[way] | settings
    return trained(kind, options, lost, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_processes_and_retries_change_no_mask(kind: str) -> None:
    [expected] = on_ranks(run, 1, kind, BY_SAMPLE, 8, 1)
    [by_torch] = on_ranks(run, 1, kind, AS_CONFIGURED, 8, 1)
    assert distance(by_torch, expected, "loss") > 1e-4
    [others] = on_ranks(run, 1, kind, BY_SAMPLE, 2, 4)
    [retried] = on_ranks(run, 1, kind, BY_SAMPLE, 8, 1, Loss())
    on_two = on_ranks(run, 2, kind, BY_SAMPLE, 2, 2)[0]
    for found in (others, retried, on_two):
        assert_near(apart(found, expected))


def test_neither_do_shards_searches_and_budgets() -> None:
    [expected] = on_ranks(run, 1, "sft", BY_SAMPLE, 8, 1)
    searching = replace(SEARCHING, dropout="sample")
    budget = replace(searching, token_budget=True)
    sharded = on_ranks(run, 2, "sft", BY_SAMPLE, 4, 1, (), "fsdp2")[0]
    for found in (
        sharded,
        *on_ranks(run, 1, "sft", searching, 4, 2),
        *on_ranks(run, 1, "sft", budget, 2, 4),
        on_ranks(run, 2, "sft", budget, 2, 2)[0],
    ):
        assert_near(apart(found, expected))


def test_a_run_goes_on_on_other_processes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saving = {"folder": folder, "save_strategy": "steps", "save_steps": 2}
    [whole] = on_ranks(run_with, 1, saving)
    resumed = on_ranks(run_with, 2, {"folder": folder, "resume": f"{folder}/checkpoint-2"})[0]
    assert_near(apart(resumed, whole))


def run_with(settings: dict[str, Any]) -> Result:
    return run("sft", BY_SAMPLE, 4, 2, **settings)


def left_behind(folder: str) -> list[str]:
    trainer = make("sft", BY_SAMPLE, folder, peft_config=adapters("sft"))
    trainer.train()
    return [type(each).__name__ for each in trainer.model.modules() if isinstance(each, nn.Dropout)]


def test_a_trained_model_drops_as_before(tmp_path: Path) -> None:
    assert {*on_ranks(left_behind, 1, str(tmp_path))[0]} == {nn.Dropout.__name__}
    assert nn.Dropout.__name__ != SampleDropout.__name__


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
