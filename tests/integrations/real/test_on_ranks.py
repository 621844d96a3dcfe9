"""Trainers on two ranks, with memory lost on either: what is logged is that of the plain trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    distance,
    fsdp2_on_cpu,
    lora,
    on_ranks,
    texts,
    tokens,
    trained,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
WAYS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": FSDP2}
CASES: dict[str, dict[str, Any]] = {
    "trainer": {"gradient_accumulation_steps": 4},
    "trainer, bf16": {"bf16": True},
    "sft": {},
    "sft, padding-free": {"packing": True, "max_length": 16},
    "sft, lora": {"peft_config": "lora"},
    "dpo": {},
    "dpo, lora": {"peft_config": "lora"},
    "reward": {},
    "kto": {},
}


def settings_of(name: str, way: str) -> dict[str, Any]:
    kind = name.partition(",")[0]
    settings = CASES[name] | WAYS[way]
    if kind == "trainer":
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": tokens(16)}
    if "peft_config" in settings:
        settings["peft_config"] = lora()
    if "packing" in settings:
        settings["data"] = texts("text", count=200)
    if way == "fsdp2":
        fsdp2_on_cpu()
    return settings


def compare(name: str, way: str) -> dict[str, Any]:
    kind = name.partition(",")[0]
    settings = settings_of(name, way)
    plain = trained(kind, None, **settings)
    searched = trained(kind, SEARCHING, **settings)
    equal = trained(kind, AS_CONFIGURED, **settings)
    other = "no adapter" if "peft_config" in settings else "reference"
    wheres = ("policy", other) if kind in ("dpo", "kto") else ("policy",)
    lost = {
        (on, where): trained(kind, AS_CONFIGURED, Loss(1 + on, on, 2, where), **settings)
        for on in (0, 1)
        for where in wheres
    }
    if kind == "trainer":
        evaluations = [one.column("eval_loss") for one in (plain, equal)]
        assert evaluations[0] and evaluations[0] == evaluations[1]
    return {
        "searched": distance(searched, plain),
        "found": searched.sizes,
        "equal": distance(equal, plain),
        "same weights": torch.equal(equal.weights, plain.weights),
        "lost": {key: distance(one, plain) for key, one in lost.items()},
        "sizes": {one.sizes for one in lost.values()},
        "tokens": [
            [entry.get("num_tokens") for entry in one.logs]
            for one in (plain, searched, equal, *lost.values())
        ],
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, way: str) -> None:
    for seen in on_ranks(compare, 2, name, way):
        assert seen["equal"] <= CLOSE, seen
        close = 5e-3 if "bf16" in name else CLOSE
        assert seen["searched"] <= close, seen
        assert all(each <= close for each in seen["lost"].values()), seen
        assert seen["found"][0] > 4, seen
        assert all(last < first for first, last in seen["sizes"]), seen
        assert all(each == seen["tokens"][0] for each in seen["tokens"])
