"""Context parallelism in the recipes: ranks have parts of the same rows, and all else stays as it is.

torch has it for the attention of GPUs; here it is given the CPU's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torchtune.models.gemma2._component_builders import gemma2
from torchtune.models.llama2 import llama2

from tests.helpers import recipes, runs
from tests.helpers.context_parallel import kernels_of_the_cpu
from tests.helpers.recipes import tiny_config
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_found_by_trying,
    assert_same_end,
    assert_same_records,
    assert_same_weights,
    losses,
    undisturbed,
)
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.data.split_rows import CollateParts, RowParts
from torchtune_adaptive.recipe.setup.context_parallel import (
    prepare_for_parts,
    shortest_piece,
)

on_ranks = pytest.mark.runs

TWO: dict[str, Any] = {"context_parallel_dim": 2}
DATA = {
    "_component_": "torchtune.datasets.instruct_dataset",
    "source": "json",
    "data_files": "${assets}/data.json",
    "split": "train[:11]",
}
VALIDATES = {"dataset_val": DATA, "run_val_every_n_steps": 2}
CLIPS = {"clip_grad_norm": 0.5, "shuffle": False}
PLAN = "torchtune.models.llama3.base_llama_tp_plan"
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "two parts": (2, TWO),
    "four parts": (4, {"context_parallel_dim": 4, "context_parallel_rotate_method": "alltoall"}),
    "with FSDP": (4, {**TWO, "batch_size": 2}),
    "with HSDP": (4, {**TWO, "batch_size": 2, "data_parallel_replicate_dim": 2}),
    "with tensor parallelism": (
        4,
        {
            **TWO,
            "tensor_parallel_dim": 2,
            "tensor_parallel_plan._component_": PLAN,
            "optimizer.foreach": False,
        },
    ),
    "with accumulation": (
        2,
        {**TWO, "batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    "with chunks computed again": (
        2,
        {
            **TWO,
            "enable_activation_checkpointing": True,
            "adaptive_batching.recompute_loss": True,
        },
    ),
    "with chunks of an output that is sharded apart": (
        2,
        {**TWO, "custom_sharded_layers": ["tok_embeddings", "output"]},
    ),
    "with a plain loss": (2, {**TWO, "loss._component_": "torch.nn.CrossEntropyLoss"}),
}


def run_split(kind: str, cfg: DictConfig) -> Records:
    with kernels_of_the_cpu():
        return recipes.run_ours(kind, cfg)


def train(kind: str, folder: Path, ranks: int, **changes: Any) -> Records:
    return runs.run_with(run_split, kind, tiny_config(kind, folder, **changes), ranks)


def assert_as_with_whole_rows(records: Records, expected: Records) -> None:
    assert [step["step"] for step in records] == [step["step"] for step in expected]
    for key in ("loss", "grad_norm", "val_loss", "global_batch_size"):
        whole = [step[key] for step in expected if key in step]
        assert [step[key] for step in records if key in step] == pytest.approx(whole, rel=1e-5)


@on_ranks
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("way", WAYS)
def test_trains_as_with_whole_rows(way: str, tmp_path: Path) -> None:
    ranks, changes = WAYS[way]
    _, whole = undisturbed("full", 1, **VALIDATES, **CLIPS)
    assert_as_with_whole_rows(
        train("full", tmp_path, ranks, **{**VALIDATES, **CLIPS, **changes}), whole
    )


@on_ranks
@pytest.mark.alternating
@pytest.mark.rotating
def test_a_step_that_runs_out_of_memory_is_retried(tmp_path: Path) -> None:
    changes = {**CLIPS, "batch_size": 32, "max_steps_per_epoch": 2}
    limit = {"adaptive_batching.memory_limit": "10MiB"}
    split = train("full", tmp_path, 2, **changes, **TWO, **limit)
    assert split[-1]["micro_batch_size"] == 16
    assert_as_with_whole_rows(split, undisturbed("full", 1, **changes)[1])


@on_ranks
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_search_a_resumed_run_and_growth(kind: str, tmp_path: Path) -> None:
    split = {**TWO, "keep_last_n_checkpoints": 9, **VALIDATES, "save_every_n_steps": 2}
    split |= {"max_steps_per_epoch": 4}
    limit = {"adaptive_batching.memory_limit": "14MiB" if kind == "full" else "8MiB"}
    folder = tmp_path / "found"
    found = train(kind, folder, 2, **split, **limit, use_maximum_batch_size=True)
    assert found[0]["micro_batch_size"] == {"full": 8, "lora": 4}[kind]
    for name in ("epoch_0", "epoch_0_step_4"):
        shutil.rmtree(folder / name)
    again = train(kind, folder, 2, **split, **limit, use_maximum_batch_size=True, **RESUME)
    assert_same_end(again, found)
    growing = {
        "batch_increase_function._component_": "torchtune_adaptive.schedule.Step",
        "batch_increase_function.at": {0: 8, 16: 16},
        "adaptive_batching.grow_past_memory": True,
        "max_steps_per_epoch": 12,
    }
    grown = train(kind, tmp_path / "grown", 2, **{**TWO, **limit, **growing})
    assert [step["global_batch_size"] for step in grown] == [8, 8, 16, 16]


@on_ranks
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("way", ["two parts", "with HSDP", "with tensor parallelism"])
def test_sharded_checkpoints(way: str, tmp_path: Path) -> None:
    """They continue as gathered ones do, and without parts of rows as well."""
    ranks, changes = WAYS[way]
    changes = {**CLIPS, **changes, "save_every_n_steps": 2, "keep_last_n_checkpoints": 9}
    sharded = {"adaptive_batching.sharded_checkpoints": True}
    whole, saved = tmp_path / "whole", "epoch_0_step_2"
    expected = train("full", whole, ranks, **changes)
    parts = train("full", tmp_path / "sharded", ranks, **changes, **sharded)
    assert_same_records(parts, expected)
    assert_same_weights(whole / "epoch_0", tmp_path / "sharded" / "epoch_0")
    for again in ("same", "other"):
        shutil.copytree(tmp_path / "sharded" / saved, tmp_path / again / saved)
    assert_same_end(
        train("full", tmp_path / "same", ranks, **changes, **sharded, **RESUME), expected
    )
    assert_same_weights(whole / "epoch_0", tmp_path / "same" / "epoch_0")
    rows = int(expected[0]["global_batch_size"])
    alone = {**CLIPS, "batch_size": rows, **sharded, **RESUME}
    [last] = runs.train("full", tmp_path / "other", 1, **alone)
    assert last["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)


@on_ranks
@pytest.mark.exhaustive
def test_ranks_that_do_not_divide_the_batch_change_no_step(tmp_path: Path) -> None:
    changes = {**TWO, **CLIPS, "save_every_n_steps": 1, "keep_last_n_checkpoints": 9}
    changes |= {"batch_size": 1, "gradient_accumulation_steps": 2}
    expected = train("full", tmp_path / "whole", 4, **changes)
    stopped = runs.stopped_after(1, tmp_path / "whole", tmp_path / "stopped")
    uneven = train("full", stopped, 6, **changes, **RESUME)
    runs.assert_same_steps(uneven, runs.after(1, expected))


@on_ranks
@pytest.mark.exhaustive
def test_searches_find_what_trying_every_size_finds(tmp_path: Path) -> None:
    """Four ranks, of which two have parts of the same rows."""
    assert_found_by_trying(train, tmp_path, ("extrapolate", "bisect", "halve", "predict"), **TWO)


@on_ranks
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("choice", "ranks"), [("adaptive_batching.token_budget", 2), ("use_fastest_configuration", 4)]
)
def test_the_same_rows_in_other_micro_batches(choice: str, ranks: int, tmp_path: Path) -> None:
    changes = {**CLIPS, "max_steps_per_epoch": 2, "adaptive_batching.memory_limit": "14MiB"}
    rows = 64 // ranks
    chosen = train("full", tmp_path, ranks, **{choice: True}, **TWO, **changes, batch_size=rows)
    del changes["adaptive_batching.memory_limit"]
    assert_as_with_whole_rows(chosen, undisturbed("full", 1, **changes, batch_size=32)[1])
    assert losses(chosen) and all(0 <= step.get("padding_share", 0) < 0.1 for step in chosen)


@on_ranks
@pytest.mark.alternating
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "device: 'cpu' has no attention that torch can split by context_parallel_dim"),
        ({"context_parallel_dim": 3}, "context_parallel_dim: 3 does not divide the 2 ranks"),
    ],
)
def test_what_ranks_refuse(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Without the CPU's attention, which only tests have."""
    assert said in runs.refused("ConfigError", "full", tmp_path, 2, **{**TWO, **changes})


# --- rows -----------------------------------------------------------------------------------------


PARTS = RowParts(2, (0, 3), 4)


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("shifted", [False, True])
def test_the_parts_of_rows_are_the_rows(shifted: bool) -> None:
    tokens = torch.arange(20).reshape(2, 10) + 1
    labels = torch.where(tokens % 4 == 0, -100, tokens)
    following = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    given = following if shifted else labels
    rows = [
        {"tokens": t.tolist(), "labels": n.tolist()} for t, n in zip(tokens, given, strict=True)
    ]
    parts = [
        CollateParts(collate, RowParts(2, pieces, 4), 0, -100, shifted)(rows)
        for pieces in ((0, 3), (1, 2))
    ]
    assert all(part["tokens"].shape == (2, 6) for part in parts)
    places = torch.cat([part["input_pos"] for part in parts], 1)
    order = places.argsort(1)
    whole = {
        name: torch.cat([part[name] for part in parts], 1).gather(1, order)
        for name in ("tokens", "labels", "input_pos")
    }
    assert torch.equal(whole["input_pos"], torch.arange(12).repeat(2, 1))
    assert torch.equal(whole["tokens"][:, :10], tokens) and not whole["tokens"][:, 10:].any()
    assert torch.equal(whole["labels"][:, :10], following)
    assert (whole["labels"][:, 10:] == -100).all()


def test_what_else_a_batch_has_cannot_be_split() -> None:
    parts = CollateParts(collate, PARTS, 0, -100, False)
    with pytest.raises(ConfigError, match=r"collate_fn: .* makes mask, and context parallelism"):
        parts([{"tokens": [1], "labels": [1], "mask": [1]}])


def test_pieces_of_rows_are_as_long_as_the_kernels_of_a_gpu_want_them() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert shortest_piece(gpu, torch.float32) == 32
    assert {shortest_piece(gpu, torch.bfloat16), shortest_piece(cpu, torch.float32)} == {1}
    assert RowParts(2, (0, 3), 2 * 2 * 32).padded(129) == 256


# --- models ---------------------------------------------------------------------------------------

SIZES = {"vocab_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 8}


def llama(**more: Any) -> nn.Module:
    return llama2(**SIZES, intermediate_dim=8, max_seq_len=32, **more)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: llama(attn_dropout=0.1), "layer 0 has attention with dropout"),
        (
            lambda: gemma2(**SIZES, head_dim=4, intermediate_dim=8, max_seq_len=32),
            "layer 0 has Gemma2Attention, which attends in a way of its own",
        ),
        (lambda: nn.Linear(1, 1), "splits rows of text, and the model is a Linear"),
    ],
)
def test_models_that_see_other_tokens_elsewhere_are_refused(model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"context_parallel_dim: 2 .*{said}"):
        prepare_for_parts(model(), PARTS)


def test_rows_that_are_longer_than_the_model_takes_are_refused() -> None:
    model = llama()
    prepare_for_parts(model, PARTS)
    positions = torch.arange(16).repeat(1, 1)
    model(tokens=torch.zeros(1, 16, dtype=torch.int64), input_pos=positions)
    with pytest.raises(
        ConfigError,
        match=r"2 pads rows to 34 tokens, and the model takes 32\. Set .* to 32 or",
    ):
        model(torch.zeros(1, 17, dtype=torch.int64))
