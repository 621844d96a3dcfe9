"""transformers' trainer on a linear layer, and a hyperparameter search without a backend of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_utils import HPSearchBackend


class Rows(Dataset[Any]):
    def __init__(self, number: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(2, number, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[number], "labels": self.y[number, 0]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("one", torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x * self.one)[:, 0] - labels).pow(2).mean()}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "log_level": "error"}
    own = {"per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1}
    more = {"use_cpu": True, "learning_rate": 0.1, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **quiet | own | more | settings)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Trials:
    """A stand-in for a backend of hyperparameter search, which tries what it is given."""

    given: tuple[dict[str, Any], ...] = ()

    def ensure_available(self) -> None:
        pass

    def default_hp_space(self, trial: Any) -> Any:
        return trial

    def run(self, trainer: Any, n_trials: int, direction: str, **_: Any) -> list[list[float]]:
        found = []
        for trial in self.given[:n_trials]:
            trainer.train(trial=dict(trial))
            found.append(losses(trainer))
        return found


def searched(trainer: Any, *trials: dict[str, Any]) -> Any:
    """The losses of each trial of ``hyperparameter_search``."""
    backend = type("Backend", (Trials,), {"given": trials})
    wandb = SimpleNamespace(run=SimpleNamespace(id="run"))
    with (
        mock.patch.dict(ALL_HYPERPARAMETER_SEARCH_BACKENDS, {HPSearchBackend.WANDB: backend}),
        mock.patch.dict(sys.modules, {"wandb": wandb}),
        mock.patch("transformers.integrations.hp_params", lambda trial: trial),
    ):
        return trainer.hyperparameter_search(
            backend="wandb", n_trials=len(trials), compute_objective=lambda metrics: 0.0
        )
