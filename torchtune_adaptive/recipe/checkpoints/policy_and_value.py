"""Checkpoints of two models that are trained, each with a checkpointer of torchtune's.

A checkpoint is the policy's, and the value model's files are in its folder ``value``. So both are published
by one rename, and verified together. Where torchtune's recipe would have written the latter, there is a link.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune import training

from torchtune_adaptive.common import durable, not_essential
from torchtune_adaptive.recipe.checkpoints.checkpoints import FullCheckpoints
from torchtune_adaptive.recipe.checkpoints.resume_from import weights_in
from torchtune_adaptive.recipe.rollout.policy_and_value import POLICY, VALUE, joined, of_model


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


class PolicyAndValueCheckpoints(FullCheckpoints):
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
