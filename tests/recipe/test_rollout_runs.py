"""Runs whose rows are generated: sizes found, memory run out in each phase, resumed, ended by a reward."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch._dynamo.utils import counters
from torchtune import config, training

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import quantised, run_ours, tiny_config
from tests.helpers.rollout_runs import of_training, run_short_of_memory
from tests.helpers.runs import (
    RESUME,
    Records,
    assert_same_weights,
    losses,
    refused,
    train,
)
from torchtune_adaptive.recipe.kinds.grpo import LoRAGRPO
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.rollout.score import OfTokens
from torchtune_adaptive.recipe.train.history import MarkKind

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

SHORT: dict[str, Any] = {
    "batch_size": 2,
    "grpo_samples": 4,
    "max_generated_tokens": 8,
    "num_steps": 4,
    "lr_scheduler.num_warmup_steps": 0,
}
KINDS = ["grpo", "grpo_lora"]


def assert_phases_are_drawn(folder: Path) -> None:
    assert (folder / "batch_size_search.png").stat().st_size > 10_000
    report = (folder / "report.html").read_text()
    for phase in ("Generation", "Scoring", "Training"):
        assert f"{phase}: micro-batches of " in report


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
def test_three_sizes_are_found_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Each was tried, and the next one failed, or there are no more rows."""
    more = {**SHORT, **(quantised(tmp_path) if name == "qlora" else {}), "batch_size": 4}
    limit = "12MiB" if name == "qlora" else "6MiB"
    found = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": limit}
    kind = "grpo" if name == "full" else "grpo_lora"
    records = train(kind, tmp_path, 2, draws=True, **{**more, **found, "num_steps": 1})
    assert len(losses(records)) == 1 and records[0]["kl_loss"] == 0.0
    report = json.loads((tmp_path / "batch_size_search.json").read_text())
    sizes = {phase: report[f"{phase}_batch_size"] for phase in report["trials"]}
    assert set(sizes) == {"generation", "scoring", "training"}
    for phase, trials in report["trials"].items():
        fits = {trial["size"]: trial["fits"] for trial in trials}
        assert fits[sizes[phase]] and (fits.get(2 * sizes[phase]) is False or sizes[phase] == 16)
    assert sizes["training"] < 16
    assert_phases_are_drawn(tmp_path)
    assert f"adaptive_batching.generation_batch_size={sizes['generation']}" in report["overrides"]
    assert records[0]["micro_batch_size"] == sizes["training"]
    assert records[0]["global_batch_size"] == 32 and records[0]["batch_size"] == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_after_a_search_is_the_run_without_one(kind: str, ranks: int, tmp_path: Path) -> None:
    limit = {"adaptive_batching.memory_limit": "9MiB", "clip_grad_norm": 1.0}
    searching, plain = (tmp_path / name for name in ("searching", "plain"))
    more = {**SHORT, **limit, "grpo_samples": 16, "ppo_epochs": 2}
    found = train(kind, searching, ranks, **more, use_maximum_batch_size=True)
    report = json.loads((searching / "batch_size_search.json").read_text())
    sizes = {
        "gradient_accumulation_steps": report["gradient_accumulation_steps"],
        "adaptive_batching.generation_batch_size": report["generation_batch_size"],
        "adaptive_batching.scoring_batch_size": report["scoring_batch_size"],
    }
    expected = train(kind, plain, ranks, **more, **sizes)
    assert of_training(found) == of_training(expected) and len(losses(found)) == 8
    assert_same_weights(searching, plain)


RESUMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tokens": ("grpo", "GRPOLoss", {}),
    "rows": ("grpo", "GRPOSimpleLoss", {}),
    "lora": ("grpo_lora", "GRPOLoss", {}),
    "adapters only, dora": (
        "grpo_lora",
        "GRPOSimpleLoss",
        {"save_adapter_weights_only": True, "model.use_dora": True},
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "loss", "more"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_has_the_same_responses_and_losses(
    kind: str, loss: str, more: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    changes = {
        **SHORT,
        **more,
        **{"ppo_epochs": 2, "save_every_n_steps": 3, "keep_last_n_checkpoints": 9},
        "loss._component_": f"torchtune_adaptive.recipe.kinds.grpo.{loss}",
    }
    expected = train(kind, whole, ranks, **changes)
    assert len(losses(expected)) == 8
    shutil.copytree(whole, resumed, symlinks=True)
    # Step 3 is in the middle of a rollout, which is not left before it has been trained on.
    saved = sorted(path.name for path in whole.glob("epoch_*"))
    assert saved == ["epoch_0_step_4", "epoch_0_step_6", "epoch_0_step_8"]
    for name in saved[1:]:
        shutil.rmtree(resumed / name)
    rest = train(kind, resumed, ranks, **changes, **RESUME)
    assert of_training(rest) == of_training(expected)[4:]
    assert_same_weights(whole / saved[-1], resumed / saved[-1])
    finished = train(kind, resumed, ranks, **changes, **RESUME)
    assert losses(finished) == []


STOPS: dict[str, Any] = {**SHORT, "grpo_samples": 8, "stop_token_ids": [*range(60)]}
"""Responses of very different lengths."""
BUDGETS = "adaptive_batching.token_budget", "adaptive_batching.scoring_token_budget"


def test_token_budgets_are_found_for_scoring_and_training(tmp_path: Path) -> None:
    """Each was tried, one row more failed; what is learned is what is learned in rows."""
    limit = {"adaptive_batching.memory_limit": "6MiB", "max_generated_tokens": 16, "num_steps": 1}
    changes = {**STOPS, **limit, "clip_grad_norm": 1.0}
    sizes = {"use_maximum_batch_size": True, BUDGETS[0]: True}
    found = train("grpo", tmp_path / "found", 2, draws=True, **changes, **sizes)
    report = json.loads((tmp_path / "found" / "batch_size_search.json").read_text())
    for phase in ("scoring", "training"):
        fits = {(t["length"], t["size"]): t["fits"] for t in report["trials"][phase]}
        longest, most = max((int(n), rows) for n, rows in report["rows_by_length"][phase].items())
        assert report[f"{phase}_token_budget"] == longest * most
        assert fits[longest, most] and (most == 16 or not fits[longest, most + 1])
    assert report["training_token_budget"] < report["scoring_token_budget"]
    assert_phases_are_drawn(tmp_path / "found")
    assert all(
        f"{key}={report[name]}" in report["overrides"]
        for key, name in zip(
            BUDGETS, ("training_token_budget", "scoring_token_budget"), strict=True
        )
    )
    rows = {"gradient_accumulation_steps": 8, "adaptive_batching.scoring_batch_size": 3}
    expected = train("grpo", tmp_path / "rows", 2, **changes, **rows)
    for one, other in zip(found, expected, strict=True):
        for key in ("rewards", "response_lengths", "num_stop_tokens"):
            assert one[key] == other[key]
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-7)
        assert one["padding_share"] < 0.3


@pytest.mark.parametrize("key", BUDGETS)
def test_a_budget_below_the_longest_row_is_refused(key: str, tmp_path: Path) -> None:
    said = refused("ConfigError", "grpo", tmp_path, **SHORT, **{key: 20})
    assert f"{key}: 20 is less than the longest row may have" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_whose_budgets_are_pasted_or_resumed_is_the_run_that_found_them(
    epochs: int, tmp_path: Path
) -> None:
    whole, pasted, resumed = (tmp_path / name for name in ("found", "pasted", "resumed"))
    changes = {
        **{**STOPS, "ppo_epochs": epochs, "adaptive_batching.memory_limit": "9MiB"},
        **{"save_every_n_steps": 2 * epochs, "keep_last_n_checkpoints": 9},
    }
    found = {"use_maximum_batch_size": True, BUDGETS[0]: True}
    expected = train("grpo", whole, 2, **changes, **found)
    report = json.loads((whole / "batch_size_search.json").read_text())
    said = dict(each.split("=") for each in report["overrides"].split())
    sizes = {key: int(value) for key, value in said.items() if value.isdecimal()}
    assert len(sizes) == 3 and len(losses(expected)) == 4 * epochs
    assert of_training(train("grpo", pasted, 2, **changes, **sizes)) == of_training(expected)
    assert_same_weights(whole, pasted)
    shutil.copytree(whole, resumed, symlinks=True)
    shutil.rmtree(resumed / f"epoch_0_step_{4 * epochs}")
    rest = train("grpo", resumed, 2, **changes, **found, **RESUME)
    assert of_training(rest) == of_training(expected)[2 * epochs :]
    again = json.loads((resumed / "batch_size_search.json").read_text())
    assert [len(again["trials"][phase]) for phase in ("scoring", "training")] == [1, 1]
    assert_same_weights(whole, resumed)


@pytest.mark.exhaustive
def test_a_budget_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    changes = {**STOPS, "grpo_samples": 16, "num_steps": 2}
    expected = train("grpo", tmp_path / "plain", 2, **changes)
    large = {BUDGETS[0]: 1900, BUDGETS[1]: 400, "adaptive_batching.memory_limit": "6MiB"}
    found = train("grpo", tmp_path / "halved", 2, **changes, **large)
    for one, other in zip(found, expected, strict=True):
        assert one["response_lengths"] == other["response_lengths"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-7)
    events = (tmp_path / "halved" / "batch_size_events.jsonl").read_text()
    assert '"token_budget": [1890, 945]' in events


MANY = {"batch_size": 4, "grpo_samples": 8, "num_steps": 3, "gradient_accumulation_steps": 16}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("phase", "factor", "sizes", "said"),
    [
        ("_generate", 0.22, MANY, '"generation_batch": [32, 16]'),
        ("_score", 0.22, MANY, '"scoring_batch": [32, 16]'),
        (
            "_score",
            0.22,
            {**MANY, "adaptive_batching.scoring_token_budget": 54 * 400},
            '"scoring_token_budget": [21600, 10800]',
        ),
        ("_generate", 0.14, {"gradient_accumulation_steps": 4}, "parameters stay sharded"),
    ],
    ids=["generation", "scoring", "scoring in tokens", "gathering"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_runs_out_on_one_rank_changes_no_response(
    kind: str, phase: str, factor: float, sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    changes = {**SHORT, **sizes, "adaptive_batching.memory_limit": "9MiB"}
    made = []
    for name, which in (("plain", None), ("short", phase)):
        cfg = tiny_config(kind, tmp_path / name, **changes)
        records, *_ = run_ranks(run_short_of_memory, 2, kind, cfg, which, factor, join=False)
        made.append(records)
    plain, short = made
    for one, other in zip(plain, short, strict=True):
        for key in ("rewards", "response_lengths", "num_stop_tokens"):
            assert one[key] == other[key]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    events = (tmp_path / "short" / "batch_size_events.jsonl").read_text()
    assert said in events and "on rank 1" in events
    report = (tmp_path / "short" / "report.html").read_text()
    is_marked = re.search(rf">rollout 2: scoring |>{MarkKind.CHANGED} \(\d times\)", report)
    assert bool(is_marked) == (said != "parameters stay sharded")


def fails_on_one_rank(ids: Any, texts: list[str], answers: list[str]) -> list[float]:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("no such answer")
    return [0.0] * len(texts)


@pytest.mark.exhaustive
def test_a_reward_that_raises_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    said = refused(
        "KeyError", "grpo", tmp_path, 2, **SHORT, reward_functions=[f"{__name__}.fails_on_one_rank"]
    )
    assert "no such answer" in said and "fails_on_one_rank" in said


def test_groups_of_one_sample_and_responses_of_one_token_train(tmp_path: Path) -> None:
    more = {**SHORT, "grpo_samples": 1, "max_generated_tokens": 1, "num_steps": 2}
    records = train("grpo", tmp_path, **more)
    assert [record["response_lengths"] for record in records] == [1.0, 1.0]
    assert all(abs(record["policy_loss"]) == 0.0 for record in records)


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_the_sizes_that_it_found(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    changes = {
        **SHORT,
        **{"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "9MiB"},
        **{"save_every_n_steps": 2, "keep_last_n_checkpoints": 9, "grpo_samples": 8},
    }
    expected = train("grpo", whole, **changes)
    shutil.copytree(whole, resumed, symlinks=True)
    shutil.rmtree(resumed / "epoch_0_step_4")
    rest = train("grpo", resumed, **changes, **RESUME)
    assert of_training(rest) == of_training(expected)[2:]
    report = json.loads((resumed / "batch_size_search.json").read_text())
    assert "an earlier run found it" in report["reasons"]["generation"]
    said = refused("CheckpointError", "grpo", resumed, **{**changes, "batch_size": 4}, **RESUME)
    assert "rollouts have 16 rows, and the config's 32" in said


def test_the_last_rollout_is_saved_wherever_it_ends(tmp_path: Path) -> None:
    few = {**SHORT, "max_generated_tokens": 2, "dataset.split": "train[:4]", "epochs": 9}
    records = train("grpo", tmp_path, **few, save_every_n_epochs=4)
    # Two rollouts make an epoch, so the fourth ends one that is not saved.
    assert [path.name for path in tmp_path.glob("epoch_*")] == ["epoch_2_step_4"]
    report = (tmp_path / "report.html").read_text()
    for name in ("reward", "response length", "KL", "time by phase"):
        assert f"<th>{name}</th>" in report
    assert all(record["training_seconds"] > 0 for record in records)


def run_with_a_second_model(kind: str, cfg: DictConfig) -> Records:
    """Run with the reference as a model of its own: the one that adapters are added to."""

    def reference(self: LoRAGRPO, model: nn.Module, frozen: Any) -> OfTokens:
        with training.set_default_dtype(self.environment.dtype):
            full = config.instantiate(OmegaConf.load(find_config("tiny/grpo")).model)
        checkpoint = config.instantiate(cfg.checkpointer, should_load_recipe_state=False)
        full.load_state_dict(checkpoint.load_checkpoint()["model"])
        return self.log_probs(full.eval())

    usual, LoRAGRPO.reference = LoRAGRPO.reference, reference  # type: ignore[method-assign]
    try:
        return run_ours(kind, cfg)
    finally:
        LoRAGRPO.reference = usual  # type: ignore[method-assign]


ADAPTED: dict[str, dict[str, Any]] = {
    "checkpointed": {"enable_activation_checkpointing": True},
    "bf16": {"dtype": "bf16"},
    "kept gathered": {"fsdp_reshard_after_forward": False},
    "output sharded apart": {"custom_sharded_layers": ["tok_embeddings", "output"]},
    "dora, dropout": {"model.use_dora": True, "model.lora_dropout": 0.3},
}


@pytest.mark.rotating
@pytest.mark.parametrize("changes", ADAPTED.values(), ids=ADAPTED)
def test_adapters_train_as_with_a_second_model_as_the_reference(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**SHORT, **changes, "ppo_epochs": 2, "loss.kl_coeff": 0.5}
    cfg = tiny_config("grpo_lora", tmp_path / "second", **changes)
    expected = run_ranks(run_with_a_second_model, 2, "grpo_lora", cfg, join=False)[0]
    found = train("grpo_lora", tmp_path / "found", 2, **changes)
    assert found[0]["kl_loss"] == 0.0 < found[-1]["kl_loss"]
    for one, other in zip(found, expected, strict=True):
        for key in ("loss", "kl_loss", "rewards"):
            assert one[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6)


def run_compiled(kind: str, cfg: DictConfig) -> tuple[Records, int]:
    """What a run has logged, and the graphs that it has compiled; on one simulated device it runs eager."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # inductor takes long here
    records = run_ours(kind, cfg)
    return records, sum(counters["frames"].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "ranks", "budget"),
    [("grpo", 2, False), ("grpo", 2, 400), ("grpo_lora", 2, False), ("ppo", 1, False)],
)
def test_a_compiled_run_is_that_of_its_layers(
    kind: str, ranks: int, budget: bool | int, tmp_path: Path
) -> None:
    changes = {**SHORT, "adaptive_batching.memory_limit": None, "ppo_epochs": 2}
    if budget:
        changes |= {**STOPS, **dict.fromkeys(BUDGETS, budget)}
    if kind == "ppo":
        changes = {"batch_size": 4, "ppo_batch_size": 4, "num_steps": 12, "max_generated_tokens": 8}
        changes |= {"adaptive_batching.memory_limit": None}
    plain = train(kind, tmp_path / "plain", ranks, **changes)
    cfg = tiny_config(kind, tmp_path / "compiled", compile=True, **changes)
    compiled, graphs = run_ranks(run_compiled, ranks, kind, cfg, join=False)[0]
    assert graphs > 0
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    lengths = [[step["response_lengths"] for step in run] for run in (plain, compiled)]
    assert lengths[0] == lengths[1]
