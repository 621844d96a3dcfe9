"""A torch version on which tracing does not work is noticed, and there is no prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.common.errors import NoPrediction
from torchtune_adaptive.planner.memory.recorded_step import Bilinear
from torchtune_adaptive.planner.trace import recorder
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.self_check import SMALL_RUN, check_method
from torchtune_adaptive.recipe.tracing.tracer import Tracer

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


def check(fault: str, cache: bool | str) -> str:
    """What is said with something of torch not as it was."""
    if fault == "gradients are always added out of place":
        recorder._is_accumulation = lambda *_: False
    elif fault == "storages are resized elsewhere":
        recorder.Recorder.knows = lambda self, storage: False
    try:
        check_method(cache)
    except NoPrediction as error:
        return str(error)
    return ""


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("gradients are always added out of place", "took 6 allocations instead of 4"),
        ("storages are resized elsewhere", "the memory of a step cannot be predicted"),
    ],
)
def test_a_torch_that_works_otherwise_is_refused(fault: str, reason: str) -> None:
    [said] = run_ranks(check, 1, fault, False, join=False)
    assert said.startswith("With torch ")
    assert reason in said


def test_what_has_passed_is_remembered(tmp_path: Path) -> None:
    assert run_ranks(check, 1, "", str(tmp_path), join=False) == [""]
    fault = "storages are resized elsewhere"  # would be noticed, if it were looked at again
    assert run_ranks(check, 1, fault, str(tmp_path), join=False) == [""]


def traced_as_on_a_gpu() -> tuple[bool, set[str]]:
    """Whether steps on the fake device are bilinear, and what FSDP has on its own streams."""
    changes = {"device": "cuda", "dtype": "bf16", "optimizer": {"fused": True}}
    tracer = Tracer(Asked.of(OmegaConf.merge(SMALL_RUN, changes), "full"), ranks=2)
    tracer.take_step(2, 32)
    corners = [(2, 32), (3, 32), (2, 64), (3, 64)]
    between = Bilinear({size: tracer.take_step(*size) for size in corners})
    held_out = tracer.take_step(5, 128).renumbered()
    return between.step(5, 128).events == held_out.events, set(tracer.stream_categories().values())


def test_fsdp_and_a_fused_optimizer_run_on_the_fake_device() -> None:
    [(bilinear, on_streams)] = run_ranks(traced_as_on_a_gpu, 1, join=False)
    assert bilinear
    assert on_streams == {"gathered parameters", "gradients"}
