"""Rollouts without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.core.rows.micro_batches import ByRows, MicroBatches
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.recipe.rewards import Rewards
from torchtune_adaptive.recipe.rollout.generate import Response
from torchtune_adaptive.recipe.rollout.judging import ByFunctions
from torchtune_adaptive.recipe.rollout.phases import Phases, RolloutSizes
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.train.events import Events
from torchtune_adaptive.recipe.train.rollouts import Rollouts


class Words:
    """A tokenizer whose tokens are letters."""

    pad_id = 0

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens)


def of(*functions: Any) -> Rewards:
    cfg = OmegaConf.create({"reward_functions": list(functions)})
    return Rewards(Asked.of(cfg, "grpo"), Words(), [1])


class Ranks(Alone):
    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(size)
        self.rank = rank


def rollouts(
    rank: int = 0,
    ranks: int = 1,
    prompts: int = 4,
    epochs: int = 1,
    mini_batch: int | None = None,
    began: int | None = None,
    begun: list[Any] | None = None,
    micro_batches: MicroBatches | None = None,
    **more: Any,
) -> Rollouts:
    """Rollouts of ten prompts, by default of a run that began with these ranks. Responses are made of a row's
    index; the rows of each step are added to ``begun``."""
    memory = SimpleNamespace(release=lambda: None)
    begin = lambda rows, total: None if begun is None else begun.append(rows)  # noqa: E731
    objective = SimpleNamespace(begin=begin)
    step = SimpleNamespace(ranks=Ranks(rank, ranks), memory=memory, objective=objective)

    def phase(name: str, work: Any) -> Any:
        return SimpleNamespace(
            name=name, size=2, step=step, of_rows=lambda rows, _=None: [*map(work, rows)]
        )

    response = lambda row: Response(torch.tensor([row.index % 7 + 2, 1]), True)  # noqa: E731
    shares = {"began": ranks if began is None else began, "ranks": ranks}
    sizes = RolloutSizes(prompts, 2, epochs, max_new=3, mini_batch=mini_batch, **shares)
    phases = Phases(
        phase("generation", response),
        SimpleNamespace(padding_id=0),  # type: ignore[arg-type]
        phase("scoring", lambda row: {"reference": torch.zeros(2)}),
        sizes,
        5,
    )
    dataset = [{"tokens": [2] * (n % 3 + 1), "answer": str(n)} for n in range(10)]
    given: dict[str, Any] = {
        "order": SampleOrder(10, sizes.began, shuffle=True),
        "limit": None,
        "seed": 1,
        "judge": ByFunctions(of(f"{__name__}.length"), samples=2),
        "watchdog": SimpleNamespace(enter=lambda phase, patience: None),
        "stop_requested": lambda: False,
    }
    return Rollouts(
        dataset=dataset,
        phases=phases,
        micro_batches=micro_batches or ByRows("power_of_two"),
        scoring=ByRows("power_of_two"),
        step_timeout=1.0,
        events=Events(None),
        **{**given, **more},
    )


def length(ids: torch.Tensor, texts: list[str], answers: list[Any]) -> list[int]:
    assert ids.shape == (len(texts), max(len(text) + 1 for text in texts))
    return [len(text) for text in texts]
