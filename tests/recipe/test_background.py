"""What a run asks the process that predicts for it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.planner import Question
from torchtune_adaptive.recipe.plan import background
from torchtune_adaptive.recipe.registry import load_config
from torchtune_adaptive.recipe.settings.asked import Asked

SMALL, LARGE = 8 * 1024 * 1024 + 128 * 1024, 32 * 1024 * 1024


class Told:
    """In place of the other process; it has no answers."""

    def __init__(self, answers: type, asked: Asked, ranks: int, before_ampere: bool) -> None:
        self.before_ampere = before_ampere
        self.questions: list[Question] = []

    def ask(self, question: Question, patience: float) -> None:
        self.questions.append(question)


@pytest.mark.parametrize(
    ("card", "workspace", "older"),
    [
        ("NVIDIA H200", LARGE, False),
        ("NVIDIA A100-SXM4-80GB", SMALL, False),
        ("Tesla T4", SMALL, True),
        ("NVIDIA Tomorrow 500GB", LARGE, False),
    ],
)
def test_the_card_is_the_one_of_the_machine(
    card: str, workspace: int, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "Worker", Told)
    cfg = OmegaConf.merge(
        load_config("llama3_2/1B_full"),
        {"use_maximum_batch_size": True, "adaptive_batching": {"cache": False}},
    )
    planner: Any = background.BackgroundPlanner.begin(Asked.of(cfg), 1, card)
    assert planner.largest(2048, 10 << 30) is None
    [question] = planner._worker.questions
    assert question.device.workspaces == (workspace, workspace)
    assert question.device.before_ampere == planner._worker.before_ampere == older
    assert question.device.usable_bytes == int((10 << 30) * 0.95)
