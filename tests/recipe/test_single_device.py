"""Without a launcher, our recipes train like torchtune's for a single device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes_single_device, tiny_config
from tests.helpers.runs import losses

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

# All settings of a kind at once; --exhaustive takes them one by one, so that a failure names its setting.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {
        "accumulation": {"batch_size": 2, "gradient_accumulation_steps": 2},
        "checkpointing": {"enable_activation_checkpointing": True},
        "bf16": {"dtype": "bf16"},
    },
    "lora": {
        "adapters": {},
        "dropout": {"model.lora_dropout": 0.2},
        "dora": {"model.use_dora": True},
        "bf16": {"dtype": "bf16"},
    },
}
CASES = [pytest.param(kind, tuple(settings), id=kind) for kind, settings in SETTINGS.items()]
CASES += [
    pytest.param(kind, (one,), id=f"{kind} {one}", marks=pytest.mark.exhaustive)
    for kind, settings in SETTINGS.items()
    for one in settings
]


def both(folder: Path, kind: str, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    ours = run_ours(kind, tiny_config(kind, folder / "ours", **changes))
    theirs = run_torchtunes_single_device(kind, tiny_config(kind, folder / "theirs", **changes))
    return losses(ours), losses(theirs)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_losses_are_torchtunes(tmp_path: Path, kind: str, settings: tuple[str, ...]) -> None:
    changes: dict[str, Any] = {}
    for name in settings:
        changes |= SETTINGS[kind][name]
    [(ours, theirs)] = run_ranks(both, 1, tmp_path, kind, changes, join=False)
    assert ours == theirs and len(ours) == 3


@pytest.mark.exhaustive
def test_clipping_differs_in_rounding_only(tmp_path: Path) -> None:
    changes = {"clip_grad_norm": 0.5}
    [(ours, theirs)] = run_ranks(both, 1, tmp_path, "full", changes, join=False)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_with_the_optimizer_in_backward_gradients_are_means(tmp_path: Path) -> None:
    """torchtune's single-device recipe sums them over a micro-batch's tokens, its distributed one does not.

    Adam divides by the size of gradients, so the losses stay close; with another optimizer they would not.
    """
    changes = {"optimizer_in_bwd": True, "optimizer.eps": 1e-20}
    [(ours, theirs)] = run_ranks(both, 1, tmp_path, "full", changes, join=False)
    assert ours[0] == theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-2)
