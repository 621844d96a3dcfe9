"""Two models that are trained together, the policy and the value model: as one, and in checkpoints.

Each has a checkpointer of torchtune's. A checkpoint is the policy's, and the value model's files are in its
folder ``value``. So both are published by one rename, and verified together. Where torchtune's recipe would
have written the latter, there is a link.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training

from torchtune_adaptive.common import durable, not_essential
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.checkpoints.resume_from import weights_in

POLICY, VALUE = "policy", "value"
"""The names of the two, with which those of their weights begin."""


class PolicyAndValue(nn.Module):
    """Both models as one: for the step, its snapshot, the optimizer and the checkpoint.

    On several ranks each is sharded by itself.
    """

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(tokens), self.value(tokens)


def joined(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The weights of both models, by the names that they have together."""
    return {f"{model}.{name}": w for model, some in weights.items() for name, w in some.items()}


def of_model(model: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of one of the two, by the names that they have in it."""
    prefix = f"{model}."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class _Both:
    """Two checkpointers of torchtune's as one."""

    policy: Any
    value: Any
    staging: Path
    """The folder that the policy's writes to; the other's is in it."""

    def load_checkpoint(self) -> dict[str, Any]:
        loaded = {POLICY: self.policy.load_checkpoint(), VALUE: self.value.load_checkpoint()}
        weights = {name: each[training.MODEL_KEY] for name, each in loaded.items()}
        return {**loaded[POLICY], training.MODEL_KEY: joined(weights)}

    def save_checkpoint(self, state: dict[str, Any], epoch: str, **how: Any) -> None:
        weights = state[training.MODEL_KEY]
        of_policy = {**state, training.MODEL_KEY: of_model(POLICY, weights)}
        name, beside = f"epoch_{epoch}", self.staging / VALUE
        inside = self.staging / name / VALUE
        try:
            self.policy.save_checkpoint(of_policy, epoch=epoch, **how)
            self.value.save_checkpoint({training.MODEL_KEY: of_model(VALUE, weights)}, epoch=epoch)
            shutil.rmtree(inside, ignore_errors=True)  # torchtune copies it from where it starts
            (beside / name).rename(inside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # or a full disk would stay full


class PolicyAndValueCheckpoints(Checkpoints):
    """Checkpoints of a policy and a value model."""

    def build_checkpointer(self) -> Any:
        files, source = None, self._source
        if source is not None and source.weights:
            # Of a checkpoint that torchtune has saved, they are those that the config names.
            files = weights_in(Path(source.weights[0]).resolve().parent / VALUE) or None
        staging = self._folder.staging
        value = self._built(self._asked.cfg.value_checkpointer, staging / VALUE, files)
        # The policy's last: it removes the folder that torchtune has made around the other's.
        return _Both(super().build_checkpointer(), value, staging)

    def write_files(
        self, name: str, parts: dict[str, Any], state: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        super().write_files(name, parts, state, facts)
        links = Path(self._asked.cfg.value_checkpointer.output_dir)
        with not_essential(f"{links / f'epoch_{name}'}, a link for torchtune,"):
            durable.link(links / f"epoch_{name}", self._output_dir / f"epoch_{name}" / VALUE)
            for old in links.glob("epoch_*"):
                if old.is_symlink() and not old.exists():
                    old.unlink()
