"""Recipes from end to end on a real device, with what users combine. Without one they run on the CPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch.nn.attention.flex_attention import flex_attention

from tests.helpers import in_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours
from tests.helpers.runs import ALL_KEPT, RESUME, Records
from torchtune_adaptive.core.ranks.recording import LaunchRecorder
from torchtune_adaptive.core.step.train_step import TrainStep

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.runs, pytest.mark.alternating]
CLOSE = 1e-3 if ON_GPU else 1e-5
"""Relative difference of losses whose micro-batches differ."""


def trained(kind: str, folder: Path, run: Any = run_ours, **changes: Any) -> Records:
    """What a run has logged, whose losses are numbers."""
    cfg = in_memory.config(kind, folder, DEVICE, **changes)
    records: Records
    [records] = run_ranks(run, 1, kind, cfg, join=False, forked=not ON_GPU)
    assert records and all(math.isfinite(record["loss"]) for record in records)
    return records


def says_how_it_was_started(kind: str, cfg: DictConfig) -> Records:
    spawned = type(multiprocessing.current_process()).__name__ == "SpawnProcess"
    return [{"loss": 0.0, "spawned": float(spawned)}]


def test_a_run_that_uses_cuda_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses CUDA in a fork of a process that has it, as any that has imported torchtune."""
    monkeypatch.setitem(globals(), "ON_GPU", True)
    [record] = trained("full", tmp_path, says_how_it_was_started)
    assert record["spawned"]


def test_a_search_and_training(tmp_path: Path) -> None:
    limit = None if ON_GPU else "40MiB"
    records = trained(
        "full",
        tmp_path,
        use_maximum_batch_size=True,
        **{"adaptive_batching.memory_limit": limit, "adaptive_batching.ceiling": 16},
    )
    assert records[0]["batch_size"] == 16


def test_packed_rows(tmp_path: Path) -> None:
    """On a GPU their attention is flex attention, which is compiled."""
    trained("full", tmp_path, **{"dataset.packed": True})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU
def test_flex_attention_while_launches_are_recorded() -> None:
    torch.manual_seed(0)
    attend = torch.compile(flex_attention) if ON_GPU else flex_attention
    query, key, value = torch.randn(3, 1, 2, 128, 64, device=DEVICE)
    expected = attend(query, key, value)
    with LaunchRecorder(lambda launch: None):
        assert torch.equal(attend(query, key, value), expected)


def compiled_elsewhere(kind: str, cfg: DictConfig) -> Records:
    if not ON_GPU:  # where inductor would take minutes
        os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    return run_ours(kind, cfg)


def test_compiled_code(tmp_path: Path) -> None:
    trained("full", tmp_path, compiled_elsewhere, compile=True)


def fails_once_in_backward(kind: str, cfg: DictConfig) -> Records:
    """Run a recipe whose second backward pass fails when half of it is done."""
    plain, left = TrainStep._backward, [2]

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("injected")

    def backward(step: TrainStep) -> None:
        left[0] -= 1
        if left[0]:
            plain(step)
            return
        hook = step._parameters[len(step._parameters) // 2].register_hook(fail)
        try:
            plain(step)
        finally:
            hook.remove()

    TrainStep._backward = backward  # type: ignore[method-assign]  # of this process, which ends with it
    return run_ours(kind, cfg)


def test_a_step_that_fails_in_backward_with_offloading(tmp_path: Path) -> None:
    """A CPU has nothing to offload from."""
    offloading = {
        "enable_activation_checkpointing": ON_GPU,
        "enable_activation_offloading": ON_GPU,
    }
    undisturbed = trained("full", tmp_path / "undisturbed", **offloading)
    disturbed = trained("full", tmp_path / "disturbed", fails_once_in_backward, **offloading)
    assert [undisturbed[-1]["retried_steps"], disturbed[-1]["retried_steps"]] == [0, 1]
    losses = [record["loss"] for record in disturbed]
    assert losses == pytest.approx([record["loss"] for record in undisturbed], rel=CLOSE)


def test_rollouts_in_deterministic_mode(tmp_path: Path) -> None:
    records = trained("grpo", tmp_path, cudnn_deterministic_mode=2, num_steps=2)
    assert len(records) == 2 and all(record["response_lengths"] > 0 for record in records)


def test_a_resumed_run_continues_with_the_same_losses(tmp_path: Path) -> None:
    changes = {"epochs": 2, "max_steps_per_epoch": 2, "cudnn_deterministic_mode": 2, **ALL_KEPT}
    whole = trained("full", tmp_path, **changes)
    shutil.rmtree(tmp_path / "output" / "epoch_1")
    rest = trained("full", tmp_path, **changes, **RESUME)
    assert [record["step"] for record in rest] == [3, 4]
    assert [record["loss"] for record in rest] == [record["loss"] for record in whole[2:]]
