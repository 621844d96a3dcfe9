"""Losses over a whole batch, which is then not divided: a micro-batch is a batch as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_OF_A_BATCH = {
    "aot": "sorts the rows of a batch",
    "aot_unpaired": "sorts the rows of a batch",
    "sft": "is a mean over the tokens of a batch",
    "kto": "compares each row with the mean divergence of its batch",
    "bnpo": "is a mean over the tokens of a batch",
}
"""Losses of TRL's trainers over a whole batch."""
_OF_COMPLETIONS = {"grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}
"""Losses of completions that do not depend on how rows are split."""


def why_not_divided(trainer: Any, model: nn.Module) -> str:
    """Why batches of a trainer are not divided, by its settings; nothing if they may be."""
    return next(_reasons(trainer, trainer.accelerator.unwrap_model(model)), "")


def _reasons(trainer: Any, model: nn.Module) -> Iterator[str]:
    args = trainer.args
    held = [value for value in vars(trainer).values() if isinstance(value, dict)]
    if any(isinstance(each, nn.Module) for value in held for each in value.values()):
        yield "each dataset has a loss of its own"
    losses = getattr(args, "loss_type", None)
    for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
        if loss in _OF_A_BATCH:
            yield f"loss_type {loss} {_OF_A_BATCH[loss]}"
        elif trainer.of_rollouts and loss not in {*_OF_COMPLETIONS, None}:
            yield f"loss_type {loss} may compare the rows of a batch"
    if getattr(args, "entropy_coef", 0) or getattr(args, "use_adaptive_entropy", False):
        yield "the entropy bonus is a mean over the tokens of a batch"
    if getattr(args, "top_entropy_quantile", 1) < 1:
        yield "top_entropy_quantile is one of a batch"
    if balances_experts(trainer, model):
        yield "the auxiliary loss of experts is one of a batch"


def balances_experts(trainer: Any, model: nn.Module) -> bool:
    """Whether the loss has an auxiliary part that balances experts."""
    if hasattr(
        trainer, "aux_loss_enabled"
    ):  # of TRL, which sets the model's config by it, or need not
        return bool(trainer.aux_loss_enabled)
    config: Any = getattr(model, "config", None)
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(each, "output_router_logits", False) for each in (config, of_text))
