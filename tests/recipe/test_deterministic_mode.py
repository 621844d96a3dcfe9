"""Every kind runs in deterministic mode: torch refuses none of its operations on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.helpers.deterministic import REFUSED, RefusedOnCuda
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import Records, run_with
from torchtune_adaptive.recipe.settings.kind_table import KINDS

SHORT = {"max_steps_per_epoch": 1, "epochs": 1}
OF_ROLLOUTS = {"ppo": {"ppo_batch_size": 4, "num_steps": 4}}


def on_a_cpu_like_cuda(kind: str, cfg: DictConfig) -> Records:
    with RefusedOnCuda() as refused:
        records = run_ours(kind, cfg)
    assert refused.passed > 1000
    assert torch.are_deterministic_algorithms_enabled()
    return records


@pytest.mark.runs
@pytest.mark.rotating
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_run_calls_nothing_that_torch_refuses(kind: str, tmp_path: Any) -> None:
    changes = {**SHORT, **OF_ROLLOUTS.get(kind, {}), "use_maximum_batch_size": True}
    cfg = tiny_config(kind, tmp_path, **changes, cudnn_deterministic_mode=2)
    assert run_with(on_a_cpu_like_cuda, kind, cfg, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_torchs(name: str) -> None:
    documented, _ = REFUSED[name]
    assert documented in (torch.use_deterministic_algorithms.__doc__ or "")
    packet, _, overload = name.partition(".")
    assert (overload or "default") in getattr(torch.ops.aten, packet).overloads()


def test_a_sum_of_floats_is_refused_and_one_of_whole_numbers_is_not() -> None:
    with RefusedOnCuda():
        torch.arange(3).cumsum(0)
        with pytest.raises(RuntimeError, match=r"cumsum has no deterministic .*torch\.cumsum"):
            torch.ones(3).cumsum(0)
