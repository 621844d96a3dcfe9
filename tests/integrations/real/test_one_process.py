"""Trainers on one process: what is logged, and the weights, are those of the plain trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    ON_GPU,
    SEARCHING,
    Loss,
    distance,
    lora,
    on_ranks,
    padding_of_transformers,
    texts,
    tokens,
    trained,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
LOOSE = {"autocast": 2e-3, "autocast, checkpointing": 2e-3} | ({"compiled": 1e-5} if ON_GPU else {})


def _no_smaller_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


TRAINER: dict[str, dict[str, Any]] = {
    "plain": {"gradient_accumulation_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 4},
    "no clipping": {"max_grad_norm": 0.0},
    "clipping": {"max_grad_norm": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "autocast": {"bf16": True, "gradient_accumulation_steps": 1},
    "autocast, checkpointing": {
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 1,
    },
    "checkpointing": {"gradient_checkpointing": True},
    "ragged": {"ragged": True, "gradient_accumulation_steps": 1},
    "collated by transformers": {"ragged": True, "data_collator": padding_of_transformers},
    "ragged, accumulated": {"ragged": True, "gradient_accumulation_steps": 4},
    "by length": {"ragged": True, "train_sampling_strategy": "group_by_length"},
    "label smoothing": {"label_smoothing_factor": 0.1, "ragged": True},
    "compute_loss_func": {"compute_loss_func": _no_smaller_loss},
    "short last step": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5},
    "workers": {"dataloader_num_workers": 2},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "no token counts": {
        "average_tokens_across_devices": False,
        "include_num_input_tokens_seen": "all",
    },
}


def compare(kind: str, settings: dict[str, Any], where: str = "policy") -> dict[str, Any]:
    """The distances of ours from the plain trainer: searched, as configured, and with memory lost."""
    if settings.get("eval_strategy"):
        own = {"trainer": tokens(16), "dpo": texts("prompt", "chosen", "rejected", count=16)}
        settings = settings | {"eval_dataset": own[kind]}
    plain = trained(kind, None, **settings)
    searched = trained(kind, SEARCHING, **settings)
    equal = trained(kind, AS_CONFIGURED, **settings)
    where = "loss" if settings.get("torch_compile") else where
    lost = trained(kind, AS_CONFIGURED, Loss(where=where), **settings)
    evaluated = [one.column("eval_loss") for one in (plain, equal) if settings.get("eval_strategy")]
    assert not evaluated or evaluated[0] == evaluated[1]
    return {
        "searched": distance(searched, plain),
        "found": searched.sizes,
        "equal": distance(equal, plain),
        "same weights": torch.equal(equal.weights, plain.weights),
        "same logs": equal.without_times() == plain.without_times(),
        "lost": distance(lost, plain),
        "sizes": lost.sizes,
        "tokens": [
            [entry.get("num_tokens", entry.get("num_input_tokens_seen")) for entry in one.logs]
            for one in (plain, searched, equal, lost)
        ],
    }


@pytest.mark.parametrize("name", TRAINER)
def test_trainer(name: str) -> None:
    [seen] = on_ranks(compare, 1, "trainer", TRAINER[name])
    assert seen["equal"] == 0 and seen["same weights"] and seen["same logs"], seen
    loose = LOOSE.get(name, CLOSE)
    assert seen["searched"] <= loose and seen["lost"] <= loose, seen
    assert seen["found"][0] > 4 or TRAINER[name].get("gradient_accumulation_steps") == 1, seen
    assert seen["sizes"][1] < 4, seen
    assert all(each == seen["tokens"][0] for each in seen["tokens"])


SFT: dict[str, dict[str, Any]] = {
    "padded": {},
    "completion only": {"of": ("prompt", "completion")},
    "packed": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "padding-free": {"packing": True, "max_length": 16},
    "autocast, checkpointing": {"bf16": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", SFT)
def test_sft(name: str) -> None:
    [seen] = on_ranks(sft, 1, SFT[name])
    assert seen["equal"] == 0 and seen["same weights"] and seen["same logs"], seen
    loose = LOOSE.get(name, CLOSE)
    assert seen["searched"] <= loose and seen["lost"] <= loose, seen
    assert seen["found"][0] == 8 and seen["sizes"][1] < 4, seen
    assert seen["tokens"][0][0] and all(each == seen["tokens"][0] for each in seen["tokens"])


PREFERENCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "reference": ("dpo", {}, "reference"),
    "evaluated": ("dpo", {"eval_strategy": "steps", "eval_steps": 2}, "policy"),
    "precomputed": ("dpo", {"precompute_ref_log_probs": True}, "policy"),
    "several losses": ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}, "policy"),
    "reward": ("reward", {}, "policy"),
    "kto": ("kto", {}, "reference"),
    "kto, precomputed": ("kto", {"precompute_ref_log_probs": True}, "policy"),
    "kto, lora": ("kto", {"peft_config": "lora"}, "no adapter"),
    "lora, policy": ("dpo", {"peft_config": "lora"}, "policy"),
    "lora, reference": ("dpo", {"peft_config": "lora"}, "no adapter"),
    "lora, sft": ("sft", {"peft_config": "lora"}, "policy"),
}


def with_lora(kind: str, settings: dict[str, Any], where: str) -> dict[str, Any]:
    if "peft_config" in settings:
        settings = settings | {"peft_config": lora()}
    return compare(kind, settings, where)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_and_lora(name: str) -> None:
    kind, settings, where = PREFERENCES[name]
    [seen] = on_ranks(with_lora, 1, kind, settings, where)
    close = 2 * CLOSE if "lora" in name else CLOSE  # 1.06e-6 with the lowest versions
    assert seen["equal"] == 0 and seen["same weights"] and seen["same logs"], seen
    assert seen["searched"] <= close and seen["lost"] <= close, seen
    assert seen["found"][0] == 8 and seen["sizes"][1] < 4, seen
    assert seen["tokens"][0][0] and all(each == seen["tokens"][0] for each in seen["tokens"])


def sft(settings: dict[str, Any]) -> dict[str, Any]:
    of = settings.get("of", ("text",))
    rest = {key: value for key, value in settings.items() if key != "of"}
    return compare("sft", rest | {"data": texts(*of, count=200)})


def with_dropout() -> tuple[list[float], list[bool], Any]:
    """Ours beside the plain trainer where random numbers are drawn: plain, and with memory lost."""
    settings = {"config": {"attention_dropout": 0.1}}
    plain = trained("trainer", None, **settings)
    equal = trained("trainer", AS_CONFIGURED, **settings)
    relieved = trained("trainer", AS_CONFIGURED, Loss(times=1), **settings)
    ours = (equal, relieved)
    same = [torch.equal(one.weights, plain.weights) for one in ours]
    return [distance(one, plain) for one in ours], same, relieved.sizes


def test_dropout_draws_the_same_numbers_where_micro_batches_are_equal() -> None:
    assert on_ranks(with_dropout, 1) == [([0.0, 0.0], [True, True], (4, 4))]
