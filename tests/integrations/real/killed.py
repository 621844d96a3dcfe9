"""A trainer that is killed, and started again by the same command, for ``ckpt-chaos``.

    python -m tests.integrations.real.killed FOLDER trainer adaptive

It resumes if there is a checkpoint, and says at which step it begins. Beside its folder each process writes
what it ends with: losses, norms of gradients and weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager

from tests.integrations.real.trainers import AS_CONFIGURED, make
from torchtune_adaptive.integrations import Adaptive

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


class Says(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print("begins at step", state.global_step, flush=True)


def main(folder: str, kind: str, way: str, *more: str) -> None:
    options: dict[str, Adaptive | None] = {"plain": None, "adaptive": AS_CONFIGURED}
    settings: dict[str, Any] = {"enable_jit_checkpoint": "on signal" in more, "ddp_timeout": 30}
    settings |= {"callbacks": [Says()], "config": {"attention_dropout": 0.1}}
    if "on signal" in more:  # at once: in the 3 seconds that it waits, all steps are done
        CheckpointManager.__init__.__defaults__ = (0,)
    trainer = make(kind, options[way], folder, **STEPS, **SMALL, **settings)
    found = any(Path(folder).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=found)
    if trainer.state.global_step < trainer.args.max_steps:  # ended by a signal
        sys.exit(143)
    weights = [value.sum().item() for value in trainer.model.state_dict().values()]
    logs = [
        [e[name] for name in ("loss", "grad_norm")]
        for e in trainer.state.log_history
        if "loss" in e
    ]
    place = os.environ.get("RANK", "0")
    Path(f"{folder}.{place}").write_text(f"{weights}\n{logs}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
