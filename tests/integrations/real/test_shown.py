"""What a user sees of a trainer, without having configured logging: on the screen, and in its logs."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    Loss,
    Padding,
    llama,
    on_ranks,
    texts,
    tokens,
    trained,
)
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.lightning import adaptive

pl = pytest.importorskip("lightning.pytorch")
pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
NAMES = ("adaptive/micro_batch", "adaptive/retried_steps")
FOR_FOUR = Adaptive(memory_limit="12MiB", headroom=0.0)
"""In which four rows of a tiny Llama fit, and not eight."""
Seen = tuple[list[str], list[list[float]]]
"""The lines that a training shows, and what it logs under these names."""


def lines_of(function: Callable[[], Any]) -> tuple[list[str], Any]:
    """The lines of ours that a call shows on this rank, and what it returns."""
    ours = "torchtune_adaptive: "
    with redirect_stderr(io.StringIO()) as said:
        returned = function()
    lines = said.getvalue().splitlines()
    return [line.removeprefix(ours) for line in lines if line.startswith(ours)], returned


def of_a_trainer(kind: str, folder: str, *args: Any, **settings: Any) -> Seen:
    saved = {"save_strategy": "steps", "save_steps": 2, "folder": folder}
    lines, result = lines_of(lambda: trained(kind, *args, **saved | settings))
    assert all((NAMES[0] in entry) == ("loss" in entry) for entry in result.logs)
    return lines, result.column(*NAMES)


def of_trainers(folder: str) -> dict[str, Seen]:
    resumed = {"resume": f"{folder}/checkpoint-2"}
    evaluated = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": texts("text", count=8),
    }
    cases: dict[str, Any] = {
        "searched": (FOR_FOUR, evaluated),
        "resumed": (FOR_FOUR, resumed),
        "no limit": (Adaptive(), {}),
        "tokens": (Adaptive(search=False, token_budget=True), {}),
    }
    seen = {
        name: of_a_trainer("sft", folder, options, **settings)
        for name, (options, settings) in cases.items()
    }
    seen["lost"] = of_a_trainer("sft", folder, AS_CONFIGURED, Loss(1))
    seen["resumed after it"] = of_a_trainer("sft", folder, AS_CONFIGURED, **resumed)
    seen["grpo"] = of_a_trainer(
        "grpo", f"{folder}/grpo", AS_CONFIGURED, Loss(0, 0, 1, "generation")
    )
    return seen


def test_a_trainer_shows_what_it_does_and_logs_it(tmp_path: Path) -> None:
    [seen] = on_ranks(of_trainers, 1, str(tmp_path))
    lines = {name: each for name, (each, _) in seen.items()}
    *trials, end, of_evaluation = lines["searched"]
    assert [line[:14] for line in trials[:2]] == ["micro-batch 1:", "micro-batch 2:"], lines
    why = trials[-2].removeprefix("micro-batch 8: ").partition(",")[0]
    assert end == f"8 rows a step = 2 x micro-batch 4 (8 rows: {why})", lines
    assert of_evaluation.startswith("batch of evaluation 8 -> 4 (out of memory in evaluation"), (
        lines
    )
    assert lines["resumed"] == ["8 rows a step = 2 x micro-batch 4, from checkpoint-2"]
    no_search, end = lines["no limit"]
    assert no_search.startswith("no search: ") and 'Adaptive(memory_limit="16GiB")' in no_search
    assert end == "8 rows a step = 2 x micro-batch 4"
    begins, *retries = lines["lost"]
    assert begins == "8 rows a step = 2 x micro-batch 4 (search=False)"
    assert [line.partition(" (")[0] for line in retries] == [
        "activation checkpointing none -> all",
        "micro-batch 4 -> 2",
    ]
    after = "8 rows a step = 4 x micro-batch 2, from checkpoint-2; was 2 x 4"
    assert lines["resumed after it"] == [after]
    assert lines["tokens"][0].startswith("8 rows a step = micro-batches of at most "), lines
    assert lines["grpo"][0].startswith("micro-batch of generation 8 -> 4 (out of memory"), lines

    logged = {name: each for name, (_, each) in seen.items()}
    for name in ("searched", "resumed", "no limit", "grpo"):
        assert logged[name] == [[4, 0]] * 4, logged
    assert logged["lost"] == logged["resumed after it"] == [[4, 0], [2, 2], [2, 2], [2, 2]]
    assert logged["tokens"] == [[logged["tokens"][0][0], 0]] * 4


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_a_module(options: Adaptive, folder: str, epochs: int, resume: str | None) -> Seen:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = adaptive(Module, options)()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1)],
        **quiet,
    )
    loader = torch.utils.data.DataLoader(tokens(16), batch_size=4, collate_fn=Padding())
    lines, _ = lines_of(lambda: trainer.fit(module, loader, ckpt_path=resume))
    return lines, [[float(trainer.logged_metrics[name]) for name in NAMES]]


def of_modules(folder: str) -> list[Seen]:
    options = replace(FOR_FOUR, memory_limit="700KiB")  # with SGD, and short rows
    return [
        of_a_module(options, folder, 1, None),
        of_a_module(options, folder, 2, f"{folder}/step=2.ckpt"),
    ]


def test_a_module_of_lightning_shows_and_logs_the_same(tmp_path: Path) -> None:
    [[(searched, logged), (resumed, again)]] = on_ranks(of_modules, 1, str(tmp_path))
    assert searched[0].startswith("micro-batch 1: fits, "), searched
    assert searched[-1].startswith("8 rows a step = 2 x micro-batch 4 (8 rows: "), searched
    assert resumed == ["8 rows a step = 2 x micro-batch 4, from the checkpoint of step 2"]
    assert logged == again == [[4, 0]]


def on_this_rank(folder: str) -> Seen:
    return of_a_trainer("sft", folder, FOR_FOUR)


def test_only_the_first_process_shows_it(tmp_path: Path) -> None:
    (lines, logged), (others, _) = on_ranks(on_this_rank, 2, str(tmp_path))
    assert others == []
    assert len(lines) == len({*lines}) > 2, lines
    assert lines[-1].startswith("8 rows a step on each of 2 processes = "), lines
    assert lines[-1].endswith((")", "; was 2 x 4")) and "on rank " in lines[-1], lines
    assert logged == [[logged[0][0], 0]] * 4
