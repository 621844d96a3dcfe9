"""Recipes from end to end on a real device, with what users combine. Without one they run on the CPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.nn.attention.flex_attention import flex_attention

from tests.helpers.in_memory import config
from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours
from tests.helpers.runs import ALL_KEPT, RESUME, Records, assert_same_weights
from torchtune_adaptive.core.ranks.collectives import Collectives
from torchtune_adaptive.core.ranks.recording import LaunchRecorder
from torchtune_adaptive.core.step.train_step import TrainStep

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.runs, pytest.mark.alternating]
CLOSE = 1e-3 if ON_GPU else 1e-5
"""Relative difference of losses whose micro-batches differ."""


class Run(NamedTuple):
    """A config, and what runs the recipe of its kind in a rank."""

    cfg: DictConfig
    function: Callable[[str, DictConfig], Records] = run_ours


def trained(kind: str, *runs: Run) -> list[Records]:
    """What runs have logged, one after the other; their losses are numbers."""
    [found] = run_ranks(one_after_the_other, 1, kind, runs, join=False, forked=not ON_GPU)
    for records in found:
        assert records and all(math.isfinite(record["loss"]) for record in records)
    return found  # type: ignore[no-any-return]


def one_after_the_other(kind: str, runs: Sequence[Run]) -> list[Records]:
    """In one process, because starting one takes longer than such a run."""
    found = []
    for run in runs:
        if dist.is_initialized():
            dist.destroy_process_group()
        found.append(run.function(kind, run.cfg))
    return found


def losses_of(records: Records) -> list[float]:
    return [record["loss"] for record in records]


def says_how_it_was_started(kind: str, cfg: DictConfig) -> Records:
    spawned = type(multiprocessing.current_process()).__name__ == "SpawnProcess"
    return [{"loss": 0.0, "spawned": float(spawned)}]


def test_a_run_that_uses_cuda_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses CUDA in a fork of a process that has it, as any that has imported torchtune."""
    monkeypatch.setitem(globals(), "ON_GPU", True)
    [[record]] = trained("full", Run(config("full", tmp_path, DEVICE), says_how_it_was_started))
    assert record["spawned"]


def test_a_search_and_training(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "use_maximum_batch_size": True,
        "adaptive_batching.memory_limit": None if ON_GPU else "40MiB",
        "adaptive_batching.ceiling": 16,
    }
    [records] = trained("full", Run(config("full", tmp_path, DEVICE, **changes)))
    assert records[0]["batch_size"] == 16


def recorded(kind: str, cfg: DictConfig) -> Records:
    """Run a recipe while launches are recorded, as they are where layers are split over ranks."""
    stages, begin_stage = set(), Collectives.begin_stage

    def begin(self: Collectives, stage: str) -> LaunchRecorder:
        begin_stage(self, stage)
        stages.add(stage)
        return LaunchRecorder(lambda launch: None)

    with patch.object(Collectives, "begin_stage", begin):
        records = run_ours(kind, cfg)
    assert stages >= {"forward", "backward"}
    return records


def test_packed_rows_also_while_launches_are_recorded(tmp_path: Path) -> None:
    """On a GPU their attention is flex attention, which is compiled."""
    packed = {"dataset.packed": True}
    plain, other = (config("full", tmp_path / name, DEVICE, **packed) for name in "ab")
    expected, found = trained("full", Run(plain), Run(other, recorded))
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=CLOSE)


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
    trained("full", Run(config("full", tmp_path, DEVICE, compile=True), compiled_elsewhere))


def fails_once_in_backward(kind: str, cfg: DictConfig) -> Records:
    """Run a recipe whose second backward pass fails when half of it is done."""
    plain, left = TrainStep._backward, [2]

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("injected")

    def backward(step: TrainStep, reduces: bool) -> None:
        left[0] -= 1
        if left[0]:
            plain(step, reduces)
            return
        hook = step._parameters[len(step._parameters) // 2].register_hook(fail)
        try:
            plain(step, reduces)
        finally:
            hook.remove()

    with patch.object(TrainStep, "_backward", backward):
        return run_ours(kind, cfg)


def test_a_step_that_fails_in_backward_with_offloading(tmp_path: Path) -> None:
    """A CPU has nothing to offload from."""
    offloading = {
        "enable_activation_checkpointing": ON_GPU,
        "enable_activation_offloading": ON_GPU,
    }
    configs = (config("full", tmp_path / name, DEVICE, **offloading) for name in "ab")
    undisturbed, disturbed = trained(
        "full", Run(next(configs)), Run(next(configs), fails_once_in_backward)
    )
    assert [undisturbed[-1]["retried_steps"], disturbed[-1]["retried_steps"]] == [0, 1]
    assert losses_of(disturbed) == pytest.approx(losses_of(undisturbed), rel=CLOSE)


def test_rollouts_in_deterministic_mode(tmp_path: Path) -> None:
    changes = {"cudnn_deterministic_mode": 2, "num_steps": 2}
    [records] = trained("grpo", Run(config("grpo", tmp_path, DEVICE, **changes)))
    assert len(records) == 2 and all(record["response_lengths"] > 0 for record in records)


def resumed_in_its_middle(kind: str, cfg: DictConfig) -> Records:
    """Go on from the first epoch of a run that is done; what it has saved since then is put aside."""
    output = Path(cfg.output_dir)
    shutil.move(output / "epoch_1", output.parent / "whole" / "epoch_1")
    return run_ours(kind, cfg)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    changes = {"epochs": 2, "max_steps_per_epoch": 2, "cudnn_deterministic_mode": 2, **ALL_KEPT}
    whole, rest = trained(
        "full",
        Run(config("full", tmp_path, DEVICE, **changes)),
        Run(config("full", tmp_path, DEVICE, **changes, **RESUME), resumed_in_its_middle),
    )
    assert [record["step"] for record in rest] == [3, 4]
    assert losses_of(rest) == losses_of(whole[2:])
    assert_same_weights(tmp_path / "whole" / "epoch_1", tmp_path / "output" / "epoch_1")
