"""Keys of torchtune's that need more than a parity run, or that torchtune itself cannot run on a CPU."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers.packed import flex_attention
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_found_by_trying,
    assert_same_end,
    losses,
    named_checkpoint,
    refused,
    run_with,
    train,
    undisturbed,
)

pytestmark = [pytest.mark.runs, pytest.mark.alternating]


@pytest.mark.exhaustive
@pytest.mark.rotating
@pytest.mark.parametrize("in_backward", [True, False])
def test_asynchronous_checkpoints(in_backward: bool, tmp_path: Path) -> None:
    """torchtune's hang on gloo: the save's collectives meet those of training on one group."""
    changes = {"optimizer_in_bwd": in_backward, "epochs": 2, "max_steps_per_epoch": 2}
    _, plain = undisturbed("full", 2, **changes)
    changes["enable_async_checkpointing"] = True
    whole = train("full", tmp_path, 2, **changes)
    assert losses(whole) == losses(plain)
    assert (tmp_path / "dist_epoch_0" / ".metadata").exists()
    shutil.rmtree(tmp_path / "epoch_1")  # the end of the run, after which nothing is left to do
    again = train("full", tmp_path, 2, **changes, **RESUME)
    assert [step["step"] for step in again] == [3, 4]
    assert_same_end(again, whole)


def run_compiled(cfg: Any) -> Records:
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # inductor takes half a minute here
    return run_ours("full", cfg)


@pytest.mark.exhaustive
def test_compiled(tmp_path: Path) -> None:
    plain = train("full", tmp_path / "plain", 2, max_steps_per_epoch=1)
    cfg = tiny_config("full", tmp_path / "compiled", compile=True, max_steps_per_epoch=1)
    compiled, *_ = run_ranks(run_compiled, 2, cfg, join=False)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


def test_a_compiled_run_searches_and_says_that_trials_ran_eager(tmp_path: Path) -> None:
    changes = {
        "compile": True,
        "use_maximum_batch_size": True,
        "adaptive_batching.memory_limit": "24MiB",
        "max_steps_per_epoch": 1,
    }
    cfg = tiny_config("full", tmp_path, **changes)
    (first,) = watch_ranks(run_compiled, 1, cfg, until_exit_of=[0], join=False)
    assert first.exit_code == 0, first.said
    assert "compiled regions run eager in trials" in first.said
    assert re.search(r"batch_size 4 -> \d", first.said)


def test_clipping_with_tensor_parallelism(tmp_path: Path) -> None:
    """torchtune raises here (mixed plain and sharded gradients). The norm must be that of the whole model."""
    changes = {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
        "clip_grad_norm": 0.5,
        "shuffle": False,
    }
    split = train("full", tmp_path / "split", 2, **changes)
    whole = train("full", tmp_path / "whole", clip_grad_norm=0.5, shuffle=False)
    for one, other in zip(split, whole, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


TENSOR_PARALLEL = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.foreach": False,
    "shuffle": False,
}


def in_flex_attention(kind: str, cfg: DictConfig) -> Records:
    with flex_attention():
        return run_ours(kind, cfg)


def test_packed_rows_with_tensor_parallelism_run_in_flex_attention(tmp_path: Path) -> None:
    """As they do on a GPU, while the collectives of its layers are recorded."""
    packed = {"dataset.packed": True, "tokenizer.max_seq_len": 128, "batch_size": 2}
    changes = {**TENSOR_PARALLEL, **packed, "max_steps_per_epoch": 2}
    dense = train("full", tmp_path / "dense", 2, **changes)
    cfg = tiny_config("full", tmp_path / "flex", **changes)
    assert losses(run_with(in_flex_attention, "full", cfg, 2)) == losses(dense)


@pytest.mark.exhaustive
def test_searches_with_tensor_parallelism_find_what_trying_every_size_finds(tmp_path: Path) -> None:
    """Four ranks, of which two have the same rows."""
    searches = ("extrapolate", "bisect", "halve")
    assert_found_by_trying(train, tmp_path, searches, **TENSOR_PARALLEL)


@pytest.mark.exhaustive
def test_search_and_growth_with_tensor_parallelism_and_fsdp(tmp_path: Path) -> None:
    """A size that is searched for, and a batch that grows past it."""
    limited = {**TENSOR_PARALLEL, "adaptive_batching.memory_limit": "14MiB"}
    found = train(
        "full", tmp_path / "found", 4, **limited, use_maximum_batch_size=True, max_steps_per_epoch=1
    )
    size = found[0]["micro_batch_size"]
    assert size == 4, "8 rows of the longest do not fit"
    growing = {
        "batch_increase_function._component_": "torchtune_adaptive.schedule.Step",
        "batch_increase_function.at": {0: 16, 32: 32},
        "adaptive_batching.grow_past_memory": True,
        "batch_size": 4,
        "max_steps_per_epoch": 12,
    }
    grown = train("full", tmp_path / "grown", 4, **limited, **growing)
    assert [record["global_batch_size"] for record in grown] == [16, 16, 32, 32]
    assert [record["samples_seen"] for record in grown] == [16, 32, 64, 96]


@pytest.mark.exhaustive
def test_validation_and_a_resumed_run_with_tensor_parallelism(tmp_path: Path) -> None:
    """A resumed run continues with the same bits, and validation sees each row once."""
    data = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json"}
    data |= {"data_files": "${assets}/data.json", "split": "train[:11]"}
    changes = {"dataset_val": data, "run_val_every_n_steps": 2, "save_every_n_steps": 2}
    changes |= {"max_steps_per_epoch": 4, "keep_last_n_checkpoints": 9, "shuffle": False}
    plain = train("full", tmp_path / "plain", 2, **changes)
    split = tmp_path / "split"
    whole = train("full", split, 4, **{**TENSOR_PARALLEL, **changes})
    for one, other in zip(validation_losses(whole), validation_losses(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name in ("epoch_0", "epoch_0_step_4"):
        shutil.rmtree(split / name)
    assert_same_end(train("full", split, 4, **{**TENSOR_PARALLEL, **changes, **RESUME}), whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copies_of_shards_train_as_shards_do(kind: str, tmp_path: Path) -> None:
    """HSDP, with what users combine it with: a search, lost memory, validation, a resumed run."""
    data = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json"}
    data |= {"data_files": "${assets}/data.json", "split": "train[:11]"}
    changes = {"dataset_val": data, "run_val_every_n_steps": 2, "save_every_n_steps": 2}
    changes |= {"max_steps_per_epoch": 4, "keep_last_n_checkpoints": 9, "clip_grad_norm": 0.5}
    copies = {**changes, "data_parallel_replicate_dim": 2}
    folder = tmp_path / "copies"
    logged = train(kind, folder, 4, **copies, data_parallel_shard_dim=2)
    if kind == "full":  # new adapters are other ones
        plain = train(kind, tmp_path / "plain", 4, **changes)
        for key in ("loss", "grad_norm", "val_loss"):
            expected = [step[key] for step in plain if key in step]
            found = [step[key] for step in logged if key in step]
            assert found == pytest.approx(expected, rel=1e-5)
    for name in ("epoch_0", "epoch_0_step_4"):
        shutil.rmtree(folder / name)
    # It begins with the adapters of the first copy, so they were those of each.
    assert_same_end(train(kind, folder, 4, **copies, **RESUME), logged)
    limit = {"adaptive_batching.memory_limit": "24MiB", "use_maximum_batch_size": True}
    found = train(kind, tmp_path / "found", 4, **copies, **limit)
    assert found[0]["micro_batch_size"] == 8


def validation_losses(records: Records) -> list[float]:
    return [step["val_loss"] for step in records if "val_loss" in step]


def test_rows_shorter_than_the_losss_chunks_with_the_output_sharded_apart(tmp_path: Path) -> None:
    """torchtune's ranks wait for each other for ever: batches of 30 and 33 tokens have 8 and 7 chunks."""
    layers = ["tok_embeddings", "output"]
    apart = train("full", tmp_path, 2, custom_sharded_layers=layers)
    _, together = undisturbed("full", 2)
    assert losses(apart) == pytest.approx(losses(together), rel=1e-4)


def test_several_datasets_in_one(tmp_path: Path) -> None:
    cfg = tiny_config("full", tmp_path)
    one = OmegaConf.to_container(cfg.dataset)
    cfg.dataset = [one, {**one, "split": "train[:100]"}]  # type: ignore[dict-item]
    (run,) = run_ranks(run_ours, 1, "full", cfg, join=False)
    assert len(run) == 3


def my_collate(rows: list[Any], padding_idx: int, ignore_idx: int) -> dict[str, Any]:
    from torchtune.data import padded_collate_sft

    collated = padded_collate_sft(rows, padding_idx, ignore_idx)
    return {key: value[:, :60] for key, value in collated.items()}


def test_a_collate_function_of_the_users(tmp_path: Path) -> None:
    run = train("full", tmp_path, collate_fn="tests.recipe.test_features.my_collate")
    _, plain = undisturbed("full")
    assert losses(run) != losses(plain)


def test_the_profiler(tmp_path: Path) -> None:
    profiler = {
        "profiler.enabled": True,
        "profiler._component_": "torchtune.training.setup_torch_profiler",
        "profiler.output_dir": str(tmp_path / "profile"),
        "profiler.cpu": True,
        "profiler.cuda": False,
        "profiler.profile_memory": False,
        "profiler.with_stack": False,
        "profiler.record_shapes": False,
        "profiler.with_flops": False,
        "profiler.wait_steps": 1,
        "profiler.warmup_steps": 1,
        "profiler.active_steps": 1,
        "profiler.num_cycles": 1,
    }
    train("full", tmp_path, **profiler)
    assert list((tmp_path / "profile").rglob("*.json*"))


def test_torchtunes_disk_logger_and_log_every_n_steps(tmp_path: Path) -> None:
    train(
        "full",
        tmp_path,
        log_every_n_steps=2,
        max_steps_per_epoch=4,
        **{"metric_logger._component_": "torchtune.training.metric_logging.DiskLogger"},
    )
    (log,) = (tmp_path / "logs").iterdir()
    assert re.findall(r"Step (\d+) ", log.read_text()) == ["2", "4"]


def test_a_checkpoint_without_recipe_state_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import torch

    train("full", tmp_path, max_steps_per_epoch=1)
    state = tmp_path / "recipe_state" / "recipe_state.pt"
    optimizer = torch.load(state)["optimizer"]
    state.unlink()  # it leads into the checkpoint, which would be found to be damaged
    torch.save({"optimizer": optimizer}, state)
    named = {
        **named_checkpoint("full"),
        "checkpointer.recipe_checkpoint": "recipe_state/recipe_state.pt",
    }
    said = refused("CheckpointError", "full", tmp_path, epochs=2, **named)
    assert re.search(r"no 'epochs_run'.*checkpointer.recipe_checkpoint", said)


def test_an_optimizer_whose_state_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    changes = {"epochs": 2, "optimizer._component_": "torchao.optim.AdamW8bit"}
    said = refused("ConfigError", "full", tmp_path, 2, **changes)
    assert "torch cannot gather from several ranks" in said
