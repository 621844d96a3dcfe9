"""The cells of ``docs/results/tasks.md``: each task with the plain trainer and ours, in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.integrations.real import sentences
from tests.integrations.real.beside_plain import far, in_words
from tests.integrations.real.tasks import TASKS
from tests.integrations.real.trainers import LOGGED, Loss, Result, lose_memory, make, result
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive

WAYS: dict[str, tuple[Adaptive, int]] = {
    "as it is": (Adaptive(search=False), 0),
    "search": (Adaptive(memory_limit="1GiB", ceiling=2), 0),
    "memory lost": (Adaptive(search=False), 2),
}
"""The options of ours, and how often memory is lost, in the forward pass of the third step."""


def trained(task: str, options: Adaptive | None, times: int = 0) -> tuple[Result, Any]:
    """The result of a training, and its trainer."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        if task in TASKS:
            settings = {"remove_unused_columns": False, "max_steps": 5} | TASKS[task]()
            trainer = make("trainer", options, folder, **settings)
        else:
            trainer = sentences.trainer(task, options, folder)
        left = lose_memory(trainer, Loss(2, 0, times, "loss"))
        trainer.train()
        assert not left()
        found = result(trainer)
        found.more["seen"] = None if task in TASKS else trainer.evaluate()["eval_loss"]
        return found, trainer


def outcome(task: str) -> dict[str, str]:
    """What the cells of a task say; by which line it is refused, or not divided."""
    plain, _ = trained(task, None)
    said = {"divided": "yes", "why": ""}
    for way, (options, times) in WAYS.items():
        try:
            ours, trainer = trained(task, options, times)
        except UsageError as refused:
            return {**said, **dict.fromkeys(WAYS, "refused"), "divided": "-", "why": str(refused)}
        steps = trainer._adaptive_step
        if steps._undivided is not None:
            said |= {"divided": "no", "why": steps._undivided}
        elif steps.slices:
            said["divided"] = "parts"
        said[way] = in_words(far(ours, plain, *(() if way == "as it is" else LOGGED)))
    return said
