"""Which losses are over a whole batch; stand-ins for the trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from torchtune_adaptive.integrations.undivided import why_not_divided


def why(model: nn.Module | None = None, of_rollouts: bool = False, **args: Any) -> str:
    own = {key: args.pop(key) for key in ("aux_loss_enabled", "loss") if key in args}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**args),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        of_rollouts=of_rollouts,
        **own,
    )
    return why_not_divided(trainer, model or nn.Linear(1, 1))


CASES: dict[str, dict[str, Any]] = {
    "loss_type aot sorts the rows of a batch": {"loss_type": ["sigmoid", "aot"]},
    "loss_type kto compares each row with": {"loss_type": "kto"},
    "loss_type sft is a mean over the tokens": {"loss_type": ["sft"]},
    "loss_type bnpo is a mean over the tokens": {"loss_type": "bnpo", "of_rollouts": True},
    "loss_type new may compare": {"loss_type": "new", "of_rollouts": True},
    "the entropy bonus is a mean": {"entropy_coef": 0.1},
    "the entropy bonus": {"use_adaptive_entropy": True},
    "top_entropy_quantile is one of a batch": {"top_entropy_quantile": 0.2},
    "the auxiliary loss of experts": {"aux_loss_enabled": True},
    "each dataset has a loss of its own": {"loss": {"pairs": nn.MSELoss(), "texts": nn.L1Loss()}},
}


@pytest.mark.parametrize("said", CASES)
def test_a_setting(said: str) -> None:
    assert why(**CASES[said]).startswith(said)


def test_other_settings_divide() -> None:
    assert not why(loss_type=["sigmoid", "bco_pair"])
    assert not why(loss_type="new")  # of a trainer that does not generate: its loss is looked at
    assert not why(loss_type="dapo", of_rollouts=True, entropy_coef=0.0, top_entropy_quantile=1.0)
    assert not why(aux_loss_enabled=False) and not why(loss=nn.MSELoss())


def with_config(config: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    return model


def test_experts_are_found_in_every_config() -> None:
    balanced, off = (SimpleNamespace(output_router_logits=on) for on in (True, False))
    of_images = SimpleNamespace(get_text_config=lambda: balanced)
    assert why(with_config(balanced)) and why(with_config(of_images))
    assert not why(with_config(off)) and not why(with_config(None))
    assert not why(with_config(balanced), aux_loss_enabled=False)  # a trainer of TRL sets it
