"""With adaptive batching off, our recipes train like torchtune's: the losses are bitwise equal.

torchtune's recipes run beside ours, in the same kind of process, on the same data.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, saved_weights, tiny_config
from torchtune_adaptive.recipe import tiny

CLIPPED = {"clip_grad_norm": 0.5}
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


def assert_same_run(
    kind: str, folder: Path, changes: dict[str, Any], *, ranks: int = 2, exactly: bool = True
) -> None:
    """Run both recipes and compare what they logged and saved."""
    theirs_at, ours_at = folder / "theirs", folder / "ours"
    theirs, *_ = run_ranks(
        run_torchtunes, ranks, kind, tiny_config(kind, theirs_at, **changes), join=False
    )
    ours, *_ = run_ranks(run_ours, ranks, kind, tiny_config(kind, ours_at, **changes), join=False)
    assert len(theirs) == len(ours) > 0
    tolerance = 0.0 if exactly else 1e-5
    for their, our in zip(theirs, ours, strict=True):
        for key in their.keys() - {"tokens_per_second_per_gpu"}:
            assert our[key] == pytest.approx(their[key], rel=tolerance, abs=0.0), (key, their, our)
    their_weights, our_weights = saved_weights(theirs_at), saved_weights(ours_at)
    assert their_weights.keys() == our_weights.keys() and their_weights
    for name, weight in their_weights.items():
        if exactly:
            assert torch.equal(weight, our_weights[name]), name
        else:
            torch.testing.assert_close(our_weights[name], weight)


@pytest.mark.parametrize("number", range(len(COMBINED)))
def test_settings_in_combination_are_torchtunes(
    number: int, tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    if not exhaustive and (number + shard) % len(COMBINED) > 1:
        pytest.skip("in the sample of another SHARD")
    names = COMBINED[number]
    changes = {key: value for name in names for key, value in FULL[name].items()}
    assert_same_run("full", tmp_path, changes)


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


def test_lora_with_everything_is_torchtunes(tmp_path: Path) -> None:
    changes = {key: value for settings in LORA.values() for key, value in settings.items()}
    assert_same_run("lora", tmp_path, changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", FULL.values(), ids=FULL)
def test_full_finetuning_is_torchtunes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same_run("full", tmp_path, changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[pytest.mark.exhaustive] if changes else [])
        for name, changes in LORA.items()
    ],
)
def test_lora_finetuning_is_torchtunes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same_run("lora", tmp_path, changes)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_clipping_differs_by_rounding_only(kind: str, tmp_path: Path) -> None:
    # One all-reduce takes the place of three, so the norm is summed in another order.
    assert_same_run(kind, tmp_path, CLIPPED, exactly=False)


def quantised(folder: Path) -> dict[str, Any]:
    """What makes the tiny LoRA config one of QLoRA."""
    size = {
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "embed_dim": 256,
        "intermediate_dim": 256,
    }
    assets = folder / "assets"
    assets.mkdir()
    tiny.make(assets, size)
    return {
        "assets": str(assets),
        "model.quantize_base": True,
        "batch_size": 2,
        **{f"model.{key}": value for key, value in size.items()},
    }


def test_qlora_is_torchtunes(tmp_path: Path) -> None:
    assert_same_run("lora", tmp_path, quantised(tmp_path))


def test_three_ranks(tmp_path: Path) -> None:
    # 640 rows do not divide by 3, and 1/3 does not end: the sampler's padding, and how numbers are rounded.
    # Three addends have two orders, so the logged loss may differ in its last bit.
    assert_same_run("full", tmp_path, {"batch_size": 2}, ranks=3, exactly=False)


def test_tensor_parallel(tmp_path: Path) -> None:
    plan = {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
    }
    assert_same_run("full", tmp_path, plan)


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "optimizer in backward": ("full", {"optimizer_in_bwd": True}),
    "lora": ("lora", {}),
}
QUICKLY_RESUMED = [("lora", "torchtune")]


def resumed(cfg: DictConfig, saved_at: Path) -> DictConfig:
    """The config that resumes after the first epoch of the run that was saved there."""
    changes: dict[str, Any] = {
        "resume_from_checkpoint": True,
        "output_dir": str(saved_at),
        "checkpointer.recipe_checkpoint": "recipe_state/recipe_state.pt",
    }
    if "lora_rank" in cfg.model:
        changes["checkpointer.adapter_checkpoint"] = "epoch_0/adapter_model.pt"
    else:
        changes["checkpointer.checkpoint_files"] = ["epoch_0/model-00001-of-00001.safetensors"]
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


@pytest.mark.parametrize(
    ("kind", "changes", "saved_by"),
    [
        pytest.param(
            *RESUMED[name],
            saved_by,
            id=f"{name}, saved by {saved_by}",
            marks=[] if (name, saved_by) in QUICKLY_RESUMED else [pytest.mark.exhaustive],
        )
        for name in RESUMED
        for saved_by in ("us", "torchtune")
    ],
)
def test_both_resume_what_either_saved(
    kind: str, changes: dict[str, Any], saved_by: str, tmp_path: Path
) -> None:
    save = run_ours if saved_by == "us" else run_torchtunes
    whole, *_ = run_ranks(save, 2, kind, tiny_config(kind, tmp_path, **changes), join=False)
    for resume in (run_ours, run_torchtunes):
        cfg = resumed(tiny_config(kind, tmp_path, **changes), tmp_path)
        second_epoch, *_ = run_ranks(resume, 2, kind, cfg, join=False)
        assert [step["step"] for step in second_epoch] == [4, 5, 6]
        assert [step["loss"] for step in second_epoch] == [step["loss"] for step in whole[3:]]
        assert [step["lr"] for step in second_epoch] == [step["lr"] for step in whole[3:]]


def test_qlora_on_one_rank_goes_on_on_two(tmp_path: Path) -> None:
    """One rank is where torchtune's recipe stops: torch's FSDP cannot hold quantised parameters there."""
    changes = quantised(tmp_path)
    one = tiny_config("lora", tmp_path, **{**changes, "batch_size": 4})
    [whole] = run_ranks(run_ours, 1, "lora", one, join=False)
    two = resumed(tiny_config("lora", tmp_path, **changes), tmp_path)
    second_epoch, _ = run_ranks(run_ours, 2, "lora", two, join=False)
    assert [step["loss"] for step in second_epoch] == pytest.approx(
        [step["loss"] for step in whole[3:]], rel=1e-5
    )


def test_leftovers_do_not_leak_into_the_next_epoch(tmp_path: Path) -> None:
    """torchtune's fault: an epoch of 10 micro-batches, 3 in a step, and the one left over joins the next
    epoch's first step. Here it is left out: the first epochs agree, the second's first steps do not."""
    changes = {
        "dataset.split": "train[:80]",
        "gradient_accumulation_steps": 3,
        "max_steps_per_epoch": None,
    }
    theirs, *_ = run_ranks(
        run_torchtunes, 2, "full", tiny_config("full", tmp_path / "theirs", **changes), join=False
    )
    ours, *_ = run_ranks(
        run_ours, 2, "full", tiny_config("full", tmp_path / "ours", **changes), join=False
    )
    assert [step["loss"] for step in ours[:3]] == [step["loss"] for step in theirs[:3]]
    assert len(ours) == len(theirs) == 6
    assert ours[3]["loss"] != theirs[3]["loss"]
