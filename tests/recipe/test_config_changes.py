"""What a resumed run says of a config that has changed, and which value it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.earlier import UNNUMBERED
from tests.helpers.recipes import tiny_config
from torchtune_adaptive.common.errors import CheckpointError
from torchtune_adaptive.recipe.checkpoints.config_changes import (
    FlatConfig,
    batch_keys,
    require_same_optimizer,
    resumed,
    training_config,
)
from torchtune_adaptive.recipe.checkpoints.progress import CONFIG_KEY, TRAINING_KEY, Progress
from torchtune_adaptive.recipe.settings.kind_table import KINDS

RATE = "adaptive_batching.resume_learning_rate=config takes the config's"
KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"optimizer.lr": 1e-4}, f"optimizer.lr 0.0001 -> 0.003 (the checkpoint's; {RATE})"),
    "weight decay": (
        {"optimizer.weight_decay": 0.3},
        "optimizer.weight_decay 0.3 -> unset (the checkpoint's)",
    ),
    "betas": (
        {"optimizer.betas": [0.9, 0.95]},
        "optimizer.betas [0.9, 0.95] -> unset (the checkpoint's)",
    ),
    "shuffle": ({"shuffle": False}, "shuffle False -> True (the checkpoint's)"),
    "way to shuffle": (
        {"adaptive_batching.sample_order": "streaming"},
        "adaptive_batching.sample_order streaming -> unset (the checkpoint's)",
    ),
}
USED: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({"batch_size": 8}, "batch_size 4 -> 8 (the config's)"),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps 1 -> 2 (the config's)",
    ),
    "split": (
        {"dataset.split": "train[:50%]"},
        "dataset.split train -> train[:50%] (the config's)",
    ),
    "dtype": ({"dtype": "bf16"}, "dtype fp32 -> bf16 (the config's)"),
    "row length": (
        {"tokenizer.max_seq_len": 40},
        "tokenizer.max_seq_len unset -> 40 (the config's)",
    ),
    "schedule": (
        {"lr_scheduler.num_warmup_steps": 9},
        "lr_scheduler.num_warmup_steps 5 -> 9 (the config's)",
    ),
    "clipping": ({"clip_grad_norm": 0.5}, "clip_grad_norm unset -> 0.5 (the config's)"),
    "growth": (
        {"batch_increase_function": "a.b"},
        "batch_increase_function unset -> a.b (the config's)",
    ),
    "of our block": (
        {"adaptive_batching.lr_scaling": "linear"},
        "adaptive_batching.lr_scaling unset -> linear (the config's)",
    ),
}


def flat(kind: str = "full", **changes: Any) -> FlatConfig:
    return training_config(tiny_config(kind, "out", **changes), KINDS[kind])


@pytest.mark.parametrize(("changes", "line"), KEPT.values(), ids=KEPT)
def test_what_is_the_checkpoints(changes: dict[str, Any], line: str) -> None:
    """And still is when the run is resumed once more, with the same config."""
    first = resumed(flat(), flat(**changes))
    assert first.changes == [line] and first.config == flat()
    assert resumed(first.config, flat(**changes)).changes == [line]


@pytest.mark.parametrize(("changes", "line"), USED.values(), ids=USED)
def test_what_is_the_configs(changes: dict[str, Any], line: str) -> None:
    first = resumed(flat(), flat(**changes))
    assert first.changes == [line] and first.config == flat(**changes)
    assert not resumed(first.config, flat(**changes)).changes


def test_what_depends_on_the_run() -> None:
    searched = resumed(flat(), flat(batch_size=8), keeps=batch_keys(KINDS["full"]))
    assert searched.changes == ["batch_size 8 -> 4 (the checkpoint's)"]
    assert searched.kept == {"batch_size": 4}
    prompts = resumed(flat(), flat(batch_size=8), keeps=batch_keys(KINDS["grpo"]))
    assert prompts.changes == ["batch_size 4 -> 8 (the config's)"] and not prompts.kept
    lower = flat(**{"optimizer.lr": 1e-4})
    changed = resumed(flat(), lower, takes_rate=True)
    assert changed.changes == ["optimizer.lr 0.003 -> 0.0001 (the config's)"]
    assert changed.config == lower


def test_a_list_of_datasets() -> None:
    one, other = ({"_component_": "a.b", "source": source} for source in ("x", "y"))
    found = resumed(flat(dataset=[one, one]), flat(dataset=[one, other]))
    assert found.changes == ["dataset[1].source x -> y (the config's)"]


def test_weights_that_are_not_trained_are_read_again() -> None:
    """Those that are, come from the checkpoint."""
    for kind, keys in {
        "full": [],
        "lora": ["checkpointer"],
        "full_dpo": ["ref_checkpointer"],
        "kd": ["checkpointer", "teacher_checkpointer"],
    }.items():
        cfg = tiny_config(kind, "out")
        before = training_config(cfg, KINDS[kind])
        for key in ("checkpointer", "ref_checkpointer", "teacher_checkpointer"):
            if key in cfg:
                cfg[key].checkpoint_files = ["other.safetensors"]
        lines = resumed(before, training_config(cfg, KINDS[kind])).changes
        assert [line.split(".checkpoint_files ")[0] for line in lines] == keys


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointer.output_dir": "elsewhere"},
        {"resume_from_checkpoint": True},
        {"metric_logger.log_dir": "elsewhere", "log_every_n_steps": 7},
        {"enable_activation_checkpointing": True, "compile": True},
        {"use_maximum_batch_size": True, "adaptive_batching.headroom": 0.2},
        {"save_every_n_steps": 3, "keep_last_n_checkpoints": 1, "run_val_every_n_steps": 3},
        {"seed": 2, "epochs": 7, "max_steps_per_epoch": 7},  # told from the recipe state
    ],
)
def test_what_does_not_matter(changes: dict[str, Any]) -> None:
    assert flat(**changes) == flat()


def test_another_optimizer_is_refused() -> None:
    require_same_optimizer(flat(), flat(**{"optimizer.lr": 1.0}))
    require_same_optimizer(flat(optimizer_in_bwd=None), flat(optimizer_in_bwd=False))
    with pytest.raises(CheckpointError, match=r"SGD cannot .* Set optimizer._component_=torch.opt"):
        require_same_optimizer(flat(), flat(**{"optimizer._component_": "torch.optim.SGD"}))
    with pytest.raises(CheckpointError, match=r"optimizer_in_bwd: True .* optimizer_in_bwd=False"):
        require_same_optimizer(flat(), flat(optimizer_in_bwd=True))


def progress(samples_of_epoch: int, **more: Any) -> Progress:
    """That of a resumed run, whose checkpoint was saved with 96 samples."""
    state = {
        **Progress(2, 3, 9, epochs_run=1, config=flat(), samples=96).state_dict(),
        TRAINING_KEY: {**UNNUMBERED, "samples_of_epoch": samples_of_epoch},
    }
    found = Progress(1, 2, None, config=flat(shuffle=False, **more))
    found.resume(state)
    return found


def test_a_run_that_is_resumed() -> None:
    found = progress(0)
    assert found.changes == [
        "seed 1 -> 2 (the checkpoint's; a resumed run keeps its seed)",
        "max_steps_per_epoch unset -> 9 (the checkpoint's)",
        "epochs 3 -> 2 (the config's)",
        "shuffle False -> True (the checkpoint's)",
    ]
    assert found.shuffle and found.epochs_run == 1


def test_other_data() -> None:
    assert progress(64).require_data(96) is None
    assert progress(0).require_data(48) == "samples in the dataset 96 -> 48 (the config's)"
    with pytest.raises(CheckpointError, match=r"dataset: has 48 samples, .* epoch of 96, .* same"):
        progress(64).require_data(48)


def test_a_checkpoint_without_a_config() -> None:
    state = Progress(1, 2, None, config=flat()).state_dict()
    del state[CONFIG_KEY]
    found = Progress(1, 2, None, config=flat(shuffle=False))
    found.resume(state)
    (line,) = found.changes
    assert "does not say which config it was saved with" in line
    assert not found.shuffle and found.require_data(7) is None


def test_what_is_saved_can_be_read_without_running_anything(tmp_path: Path) -> None:
    import torch

    state = Progress(1, 2, None, config=flat(**{"optimizer.betas": [0.9, 0.95]})).state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
