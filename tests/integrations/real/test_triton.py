"""Plans of compiled runs where Triton is installed and no GPU is seen, as in the process of a prediction.

torch's compiler asks in many places whether there is Triton, and Triton may then look for a GPU. What is
planned must not depend on either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from torchtune_adaptive.planner import Question, Worker, planned_gpu
from torchtune_adaptive.planner.memory import gpus
from torchtune_adaptive.planner.memory.recorded_step import MemoryEvent
from torchtune_adaptive.recipe.plan.background import PeakAnswers
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.tracer import Tracer

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]

DEVICE, _ = planned_gpu(gpus.gpu(gpus.DEFAULT), 1, 0.05, 8 << 30)
TWENTY_ROWS = Question(DEVICE, 20, 64)
QUANTIZED = ("model.quantize_base=True", "model.embed_dim=256", "model.intermediate_dim=256")
"""The blocks of quantized weights come out even at these sizes."""


class Reporting:
    """What answers questions, with what its process sees of GPUs and of Triton."""

    def __init__(self, made: Callable[[Asked, int], Any], asked: Asked, ranks: int) -> None:
        self._answer = made(asked, ranks)

    def __call__(self, question: Any) -> tuple[Any, int, str]:
        return self._answer(question), torch.cuda.device_count(), said_by_triton()


def said_by_triton() -> str:
    """What comes of asking Triton for the GPU that it would compile for."""
    try:
        from triton.runtime import driver

        return f"compiles for {driver.active.get_current_target()}"
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Steps:
    """Traces the second step of a size: its events as compiled and as written, and why it is not followed."""

    def __init__(self, asked: Asked, ranks: int) -> None:
        self._tracer = Tracer(asked, ranks)

    def __call__(self, size: tuple[int, int]) -> tuple[list[MemoryEvent], list[MemoryEvent], str]:
        self._tracer.take_step(*size)
        compiled, written = (
            self._tracer.take_step(*size, as_written=how).renumbered().events
            for how in (False, True)
        )
        return compiled, written, self._tracer.as_written


@pytest.fixture
def with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that asks a process where Triton is, and one where it is not; gives both answers."""

    def ask(
        made: Callable[[Asked, int], Any], cfg: DictConfig, ranks: int, question: Any
    ) -> tuple[Any, Any]:
        found, gpus_seen, said = answered(made, cfg, ranks, question)
        assert gpus_seen == 0 and said.startswith("RuntimeError: 0 active drivers")
        (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(name='triton')")
        monkeypatch.syspath_prepend(tmp_path)  # the process that answers takes it over
        without, gpus_seen, said = answered(made, cfg, ranks, question)
        assert gpus_seen == 0 and said.startswith("ModuleNotFoundError")
        return found, without

    return ask


def answered(
    made: Callable[[Asked, int], Any], cfg: DictConfig, ranks: int, question: Any
) -> tuple[Any, int, str]:
    worker = Worker(Reporting, made, Asked.of(cfg).resolved(), ranks)
    try:
        found: tuple[Any, int, str] = worker.ask(question, 550.0)
    finally:
        worker.close()
    return found


def compiled_on_a_gpu(name: str, *changes: str) -> DictConfig:
    for_a_gpu = ("compile=True", "device=cuda", "dtype=bf16", "tokenizer.max_seq_len=64")
    not_for_this_machine = ("adaptive_batching.cache=False", "adaptive_batching.memory_limit=null")
    return with_overrides(load_config(name), [*for_a_gpu, *not_for_this_machine, *changes])


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("tiny/full", 2, ()),
        ("tiny/lora", 1, QUANTIZED),
        ("tiny/kd", 1, ()),
    ],
)
def test_a_compiled_step_is_the_same_with_triton_and_without(
    name: str, ranks: int, changes: tuple[str, ...], with_and_without: Callable[..., Any]
) -> None:
    cfg = compiled_on_a_gpu(name, *changes)
    found, without = with_and_without(Steps, cfg, ranks, (2, 64))
    compiled, written, reason = found
    assert not reason and compiled != written
    assert found == without


def test_a_compiled_plan_is_the_same_with_triton_and_without(
    with_and_without: Callable[..., Any],
) -> None:
    cfg = compiled_on_a_gpu("tiny/full")
    made = partial(PeakAnswers, before_ampere=False)
    found, without = with_and_without(made, cfg, 1, TWENTY_ROWS)
    assert found.peak.allocated > 0 and not found.as_written
    assert found == without
