"""Parameters that had no gradient when a checkpoint was saved, as of an encoder that has seen no image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    RESUME,
    Records,
    assert_same_end,
    assert_same_weights,
    stopped_after,
)
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

SAVES: dict[str, Any] = {"save_every_n_steps": 2, "max_steps_per_epoch": 5, **ALL_KEPT}
SHARDED = {"adaptive_batching.sharded_checkpoints": True}
IN_BACKWARD = {"optimizer_in_bwd": True}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "gathered": (1, {}),
    "sharded": (1, SHARDED),
    "gathered on two ranks": (2, {}),
    "sharded on two ranks": (2, SHARDED),
    "in backward": (1, IN_BACKWARD),
    "in backward, sharded": (1, {**IN_BACKWARD, **SHARDED}),
}


def run_with_a_scale_unused_until(step: int, kind: str, cfg: DictConfig) -> Records:
    """A run in which the scale of a norm has no gradient before a step."""

    def before_step(self: RecipeKind, model: nn.Module, number: int) -> None:
        norm: Any = model.get_submodule("layers.1.mlp_norm")
        norm.__dict__.pop("forward", None)
        if number < step:

            def without_gradient(x: Any) -> Any:
                scale = norm.scale.detach()
                return F.rms_norm(x.float(), norm.normalized_shape, scale.float(), norm.eps).to(x)

            norm.forward = without_gradient

    RecipeKind.before_step = before_step  # type: ignore[method-assign]
    return run_ours(kind, cfg)


@pytest.mark.rotating
@pytest.mark.parametrize(("ranks", "changes"), WAYS.values(), ids=WAYS)
def test_resuming_is_exact_where_a_parameter_had_no_gradient_yet(
    ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """It gets its first gradient, and its first step, two steps after the checkpoint; saving makes none."""

    def run(folder: Path, **more: Any) -> Records:
        cfg = tiny_config("full", folder, **{**SAVES, **changes, **more})
        arguments = (4, "full", cfg)
        records, *_ = run_ranks(run_with_a_scale_unused_until, ranks, *arguments, join=False)
        return records  # type: ignore[no-any-return]

    expected = run(tmp_path / "expected", save_every_n_steps=None)
    run(tmp_path / "whole")
    resumed = run(stopped_after(2, tmp_path / "whole", tmp_path / "resumed"), **RESUME)
    assert [record["step"] for record in resumed] == [3, 4, 5]
    assert_same_end(resumed, expected)
    assert_same_weights(tmp_path / "expected" / "epoch_0", tmp_path / "resumed" / "epoch_0")
