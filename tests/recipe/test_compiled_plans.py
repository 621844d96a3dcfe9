"""Plans of compiled runs: one for every config of torchtune's, and the compiler as it was."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from omegaconf import DictConfig
from torchtune._recipe_registry import get_all_recipes
from torchtune.modules import TransformerDecoder

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner import Answer, Question, Worker, fake_device, planned_gpu, private
from torchtune_adaptive.planner.memory import gpus
from torchtune_adaptive.planner.memory.recorded_step import Label, MemoryEvent, RecordedStep
from torchtune_adaptive.planner.trace.compiled_regions import check_compiler
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.plan.background import PeakAnswers
from torchtune_adaptive.recipe.plan.predict import Prediction, predict
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing import self_check, tracer

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LARGEST = 8.5
"""Billions of parameters."""
LENGTH = 256
NOT_OURS = "ppo|early_exit"
DEVICE, _ = planned_gpu(gpus.gpu(gpus.DEFAULT), 1, 0.05, 8 << 30)
TWENTY_ROWS = Question(DEVICE, 20, 64)


def names_of_configs() -> list[str]:
    """Told by names, because each process that collects tests asks; those with images are all larger."""
    recipes = [recipe for recipe in get_all_recipes() if not re.search(NOT_OURS, recipe.name)]
    names = {config.name for recipe in recipes for config in recipe.configs}
    sizes = {name: re.search(r"/(?:([\d.]+)B|mini|[\d.]+_to)_", name) for name in names}
    return sorted(name for name, size in sizes.items() if size and float(size[1] or 4) <= LARGEST)


def plans(name: str, ranks: int) -> list[Prediction]:
    """Eager, and compiled if the recipe can be. Of the layers, which are alike, two are enough."""
    made = TransformerDecoder.__init__

    def of_two_layers(model: Any, *, layers: Any, **others: Any) -> None:
        made(model, layers=layers[:2], **others)

    TransformerDecoder.__init__ = of_two_layers  # type: ignore[method-assign]
    found = []
    for compiled in (False, True)[: 1 if "_qat_" in name else 2]:
        changes = [f"compile={compiled}", "adaptive_batching.cache=False"]
        cfg = with_overrides(load_config(name), changes)
        found.append(predict(plan_request(cfg, ranks, "h100-80gb", length=LENGTH).query()))
    return found


@pytest.mark.exhaustive
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", names_of_configs())
def test_every_config_has_a_plan_compiled_and_eager(name: str, ranks: int) -> None:
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        eager, *compiled = run(plans, name, ranks).result(timeout=900)
    for one in (eager, *compiled):
        assert one.configured.allocated > 0 and not one.as_written
    for one in compiled:
        if "qlora" not in name and "qdora" not in name:  # which keep dequantized weights
            assert one.configured.allocated < 1.01 * eager.configured.allocated


def on_a_gpu(compiled: bool) -> DictConfig:
    changes = (f"compile={compiled}", "device=cuda", "adaptive_batching.cache=False")
    changes += ("adaptive_batching.memory_limit=null", "adaptive_batching.search=predict")
    return with_overrides(load_config("tiny/full"), [*changes, "tokenizer.max_seq_len=64"])


class ElevenAndThirteen:
    """A tracer whose compiler is not followed."""

    set_up = RecordedStep([], {})
    uneven, layers, max_seq_len, as_written = False, 0, None, "another torch"

    def __init__(self, *_: Any) -> None:
        self.traced: set[int] = set()

    def take_step(self, rows: int, length: int, *_: Any) -> RecordedStep:
        self.traced.add(rows)
        events = [MemoryEvent(1, 4096 * rows * length, 0), MemoryEvent(1, -1, 0)]
        return RecordedStep(events, {1: Label("activations", "forward", "")})


def test_a_search_is_told_where_compiled_steps_are_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "check_method", lambda _: None)
    monkeypatch.setattr(tracer, "Tracer", lambda *_: fake)
    fake = ElevenAndThirteen()
    asked = Asked.of(on_a_gpu(True)).resolved()
    answer = PeakAnswers(asked, 1, before_ampere=False)(TWENTY_ROWS)
    assert answer.as_written == "another torch"
    assert {11, 13} <= fake.traced and 20 not in fake.traced


def predicted_for_a_search() -> tuple[Answer, list[str], int]:
    """A prediction for a compiled run that searches; and what reaches the process that trains."""
    asked = Asked.of(on_a_gpu(True)).resolved()
    worker = Worker(PeakAnswers, asked, 1, False)  # no GPU older than Ampere
    try:
        found = worker.ask(TWENTY_ROWS, 550.0)
    finally:
        worker.close()
    inductor = [name for name in sys.modules if name.startswith("torch._inductor.codegen")]
    return found, inductor, private._let_inductor_know.cache_info().misses


@pytest.mark.exhaustive
def test_a_search_of_a_compiled_run_is_predicted_by_the_compiler_in_another_process() -> None:
    [(found, inductor, changed)] = run_ranks(predicted_for_a_search, 1, timeout=590, join=False)
    assert found.peak.allocated > 0 and not found.as_written
    assert inductor == [] and changed == 0


def what_stays() -> list[bool]:
    from torch._inductor import config, scheduler
    from torch._inductor.graph import GraphLowering

    def parts() -> list[Any]:
        return [GraphLowering._compile_to_module, scheduler.has_triton, config.fx_graph_cache]

    before = parts()
    assert not check_compiler(fake_device.device(), "inductor")
    return [one is other for one, other in zip(before, parts(), strict=True)]


def test_the_compiler_is_changed_only_while_a_region_is_compiled() -> None:
    [same] = run_ranks(what_stays, 1, join=False)
    assert same == [True, True, True]
