"""With adaptive batching off, our recipes train like torchtune's: the losses are bitwise equal.

torchtune's recipes run beside ours, in the same kind of process, on the same data.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config
from omegaconf import DictConfig
from torch._dynamo.utils import counters

from tests.helpers.packed import flex_attention
from tests.helpers.recipes import quantised, run_ours, run_torchtunes, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    assert_near,
    assert_torchtunes,
    losses,
    named_checkpoint,
    refused,
    run_with,
    train,
)

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

CLIPPED = {"clip_grad_norm": 0.5}
TO_ROUNDING: dict[str, Any] = {"assert_same": assert_near, "rtol": None, "atol": None}
FULL: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "checkpointing": {"enable_activation_checkpointing": True},
    "selective checkpointing": {"ac_mode": "selective", "ac_option": 2},
    "accumulation": {"batch_size": 2, "gradient_accumulation_steps": 4},
    "packed": {"dataset.packed": True, "tokenizer.max_seq_len": 128, "batch_size": 2},
    "truncated": {"tokenizer.max_seq_len": 40},
    "plain cross-entropy": {"loss._component_": "torch.nn.CrossEntropyLoss"},
    "plain cross-entropy in bf16": {
        "loss._component_": "torch.nn.CrossEntropyLoss",
        "dtype": "bf16",
    },
    "optimizer in backward": {"optimizer_in_bwd": True},
    "no schedule": {"lr_scheduler": None},
    "SGD": {"optimizer._component_": "torch.optim.SGD"},
    "not resharded": {"fsdp_reshard_after_forward": False},
    "embeddings sharded apart": {"custom_sharded_layers": ["tok_embeddings"]},
    "output sharded apart": {
        "custom_sharded_layers": ["tok_embeddings", "output"],
        "dataset.packed": True,
        "tokenizer.max_seq_len": 128,
        "batch_size": 2,
    },
    "not shuffled": {"shuffle": False},
}
LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora bf16": {"dtype": "bf16"},
    "lora with dropout": {"model.lora_dropout": 0.2},
    "lora checkpointing": {"enable_activation_checkpointing": True},
    "lora accumulation": {"batch_size": 2, "gradient_accumulation_steps": 2},
    "dora": {"model.use_dora": True},
    "adapters only": {"save_adapter_weights_only": True},
}
ALWAYS = ("bf16", "plain cross-entropy", "no schedule", "SGD", "not resharded", "not shuffled")
# The quick tier trains combinations: any two settings that go together are in one of them. That takes a
# third of the runs; a failure does not name its setting, but --exhaustive does.
COMBINED: list[tuple[str, ...]] = [
    (*ALWAYS, "checkpointing", "packed", "optimizer in backward", "embeddings sharded apart"),
    (*ALWAYS, "selective checkpointing", "truncated", "accumulation", "embeddings sharded apart"),
    (*ALWAYS, "checkpointing", "packed", "accumulation", "output sharded apart"),
    (*ALWAYS, "selective checkpointing", "packed", "optimizer in backward", "output sharded apart"),
    (*ALWAYS, "checkpointing", "truncated", "optimizer in backward", "embeddings sharded apart"),
]
ONE_OR_THE_OTHER = [
    {"checkpointing", "selective checkpointing"},
    {"accumulation", "optimizer in backward"},
]


@pytest.mark.rotating
@pytest.mark.parametrize("names", COMBINED, ids=range(len(COMBINED)))
def test_settings_in_combination_are_torchtunes(names: tuple[str, ...], tmp_path: Path) -> None:
    changes = {key: value for name in names for key, value in FULL[name].items()}
    assert_torchtunes("full", tmp_path, changes)


def go_together(one: str, other: str) -> bool:
    shared = FULL[one].keys() & FULL[other].keys()
    return {one, other} not in ONE_OR_THE_OTHER and all(
        FULL[one][key] == FULL[other][key] for key in shared
    )


def test_every_two_settings_are_in_a_combination() -> None:
    names = FULL.keys() - {"fp32", "plain cross-entropy in bf16"}  # none, and two in one
    assert all(go_together(*pair) for run in COMBINED for pair in combinations(run, 2))
    for one, other in combinations(sorted(names), 2):
        assert not go_together(one, other) or any({one, other} <= {*run} for run in COMBINED)


@pytest.mark.exhaustive
def test_lora_with_everything_is_torchtunes(tmp_path: Path) -> None:
    changes = {key: value for settings in LORA.values() for key, value in settings.items()}
    assert_torchtunes("lora", tmp_path, changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", FULL.values(), ids=FULL)
def test_full_finetuning_is_torchtunes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_torchtunes("full", tmp_path, {**changes, "epochs": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", LORA.values(), ids=LORA)
def test_lora_finetuning_is_torchtunes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_torchtunes("lora", tmp_path, {**changes, "epochs": 2})


def with_flex_attention(run: Callable[..., Any], kind: str, cfg: DictConfig) -> Any:
    with flex_attention():
        counters.clear()
        records = run(kind, cfg)
        assert len(counters["frames"]) == 2 and len({*counters["frames"].values()}) == 1
        if run is run_ours:
            assert torch.compiler.config.recompile_limit == 256
    return records


@pytest.mark.exhaustive
def test_packed_rows_in_flex_attention_are_torchtunes(tmp_path: Path) -> None:
    changes = {**FULL["packed"], **FULL["checkpointing"], "gradient_accumulation_steps": 2}
    assert_torchtunes(
        "lora",
        tmp_path,
        {**changes, "max_steps_per_epoch": 2},
        run_theirs=partial(with_flex_attention, run_torchtunes),
        run_ours=partial(with_flex_attention, run_ours),
    )


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_clipping_differs_by_rounding_only(kind: str, tmp_path: Path) -> None:
    # One all-reduce takes the place of three, so the norm is summed in another order.
    assert_torchtunes(kind, tmp_path, CLIPPED, **TO_ROUNDING)


@pytest.mark.rotating
@pytest.mark.parametrize("how", ["quantised", "on three ranks", "tensor parallel"])
def test_other_ways_to_shard_are_torchtunes(how: str, tmp_path: Path) -> None:
    if how == "quantised":
        assert_torchtunes("lora", tmp_path, quantised(tmp_path))
    elif how == "on three ranks":
        # 640 rows do not divide by 3, and 1/3 does not end: the sampler's padding, and how numbers are
        # rounded. Three addends have two orders, so the logged loss may differ in its last bit.
        assert_torchtunes("full", tmp_path, {"batch_size": 2}, 3, **TO_ROUNDING)
    else:
        plan = "torchtune.models.llama3.base_llama_tp_plan"
        changes = {"tensor_parallel_dim": 2, "tensor_parallel_plan._component_": plan}
        assert_torchtunes("full", tmp_path, changes)


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "optimizer in backward": ("full", {"optimizer_in_bwd": True}),
    "lora": ("lora", {}),
}


@pytest.mark.rotating
@pytest.mark.parametrize("saved_by", ["torchtune", "us"])
@pytest.mark.parametrize("name", ["lora", "full", "optimizer in backward"])
def test_both_resume_what_either_saved(name: str, saved_by: str, tmp_path: Path) -> None:
    kind, changes = RESUMED[name]
    changes = {**changes, **ALL_KEPT, "epochs": 2}
    save = run_ours if saved_by == "us" else run_torchtunes
    whole = run_with(save, kind, tiny_config(kind, tmp_path, **changes), 2)
    if saved_by == "torchtune":  # ours will put a link in its place
        shutil.copy(tmp_path / "recipe_state" / "recipe_state.pt", tmp_path / "epoch_0")
    again = tiny_config(kind, tmp_path, **changes, **named_checkpoint(kind))
    for resume in (run_ours, run_torchtunes):
        second_epoch = run_with(resume, kind, again, 2)
        assert [step["step"] for step in second_epoch] == [4, 5, 6]
        assert [step["loss"] for step in second_epoch] == [step["loss"] for step in whole[3:]]
        assert [step["lr"] for step in second_epoch] == [step["lr"] for step in whole[3:]]


def test_qlora_on_one_rank_goes_on_on_two(tmp_path: Path) -> None:
    """One rank is where torchtune's recipe stops: torch's FSDP cannot hold quantised parameters there."""
    changes = {**quantised(tmp_path), **ALL_KEPT, "epochs": 2}
    whole = train("lora", tmp_path, **{**changes, "batch_size": 4})
    second_epoch = train("lora", tmp_path, 2, **changes, **named_checkpoint("lora"))
    assert losses(second_epoch) == pytest.approx(losses(whole)[3:], rel=1e-5)


def test_quantised_models_are_refused_where_they_cannot_be_sharded(tmp_path: Path) -> None:
    changes = {**quantised(tmp_path), "model.use_dora": True, "max_steps_per_epoch": 1}
    assert len(train("lora", tmp_path, **changes)) == 1
    said = refused("ConfigError", "lora", tmp_path, 2, **changes)
    assert "model.use_dora: True cannot be combined with a quantized base on several ranks" in said
    in_copies = {**changes, "data_parallel_replicate_dim": 2}
    said = refused("ConfigError", "lora", tmp_path / "copies", 4, **in_copies)
    assert "data_parallel_replicate_dim: 2 cannot be combined with a quantized base" in said


@pytest.mark.exhaustive
def test_leftovers_do_not_leak_into_the_next_epoch(tmp_path: Path) -> None:
    """torchtune's fault: an epoch of 10 micro-batches, 3 in a step, and the one left over joins the next
    epoch's first step. Here it is left out: the first epochs agree, the second's first steps do not."""
    changes = {
        "dataset.split": "train[:80]",
        "gradient_accumulation_steps": 3,
        "max_steps_per_epoch": None,
        "epochs": 2,
    }
    cfg = tiny_config("full", tmp_path, **changes)
    theirs, ours = (run_with(run, "full", cfg, 2) for run in (run_torchtunes, run_ours))
    assert [step["loss"] for step in ours[:3]] == [step["loss"] for step in theirs[:3]]
    assert len(ours) == len(theirs) == 6
    assert ours[3]["loss"] != theirs[3]["loss"]
