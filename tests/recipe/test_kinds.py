"""Kinds of recipe: each is complete, and those for preferences do what they say about pairs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torchtune.rlhf.loss import DPOLoss

from tests.helpers.decoder import adamw, batch
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import ConfigError, NothingToLearn
from torchtune_adaptive.recipe.data.dataset import Data
from torchtune_adaptive.recipe.data.split_rows import RowParts
from torchtune_adaptive.recipe.kinds.by_name import RECIPE_KINDS
from torchtune_adaptive.recipe.kinds.preference import Pairs, Preference
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.registry import find_config, our_configs
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import CONTEXT, COPIES, SHARDS, TENSORS
from torchtune_adaptive.recipe.settings.kind_table import KINDS, kind_of
from torchtune_adaptive.recipe.setup.environment import Context, Environment
from torchtune_adaptive.recipe.setup.model import AS_IT_IS, full_model
from torchtune_adaptive.recipe.train.learnable import require_something_to_learn

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_a_class_a_short_recipe_and_a_tiny_config(name: str) -> None:
    kind = KINDS[name]
    assert issubclass(RECIPE_KINDS[name], RecipeKind)
    recipe = (RECIPES / f"{kind.recipe}.py").read_text()
    assert f'kind = "{name}"' in recipe and len(recipe.splitlines()) < 100
    assert f"tiny/{name}" in our_configs()
    assert kind_of(OmegaConf.load(find_config(f"tiny/{name}"))) is kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (3, {COPIES: 2}, f"{COPIES}: 2 does not divide the 3 ranks"),
        (
            6,
            {COPIES: 2, TENSORS: 2},
            f"{COPIES}: 2 does not divide the 6 ranks of this run by {TENSORS}, 2",
        ),
        (3, {TENSORS: 2}, f"{TENSORS}: 2 does not divide"),
        (
            8,
            {COPIES: 4, TENSORS: 2, CONTEXT: 2},
            f"{COPIES}: 4 does not divide the 8 ranks of this run by {TENSORS}, 2 and {CONTEXT}, 2",
        ),
        (2, {COPIES: 2}, f"{COPIES}: 2 leaves one rank for each copy"),
        (8, {COPIES: 2, SHARDS: 2}, f"{SHARDS}: 2 does not fit 8 ranks, which leave 4"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(
    ranks: int, changes: dict[str, int], said: str
) -> None:
    parts = changes.get(CONTEXT, 1)
    context = Context(RowParts(parts, (0,), 1), None) if parts > 1 else None  # type: ignore[arg-type]
    environment = Environment(torch.device("cpu"), torch.float32, Alone(ranks), context=context)
    with pytest.raises(ConfigError, match=said):
        full_model(
            Asked.of(OmegaConf.create(changes), "full"), environment, lambda model: model, AS_IT_IS
        )


NOTHING = Asked.of(OmegaConf.create({}), "full_dpo")


def pair(chosen: int, rejected: int) -> dict[str, list[int]]:
    return {
        "chosen_input_ids": list(range(chosen)),
        "chosen_labels": [-100] * chosen,
        "rejected_input_ids": list(range(rejected)),
        "rejected_labels": [-100] * rejected,
    }


class Tokenizer:
    pad_id = 0


def test_the_worst_pair_is_long_on_both_sides() -> None:
    rows = Pairs()
    assert rows.length(pair(3, 9)) == rows.length(pair(9, 3)) == 9
    worst = rows.stretched(pair(3, 5), 9)
    assert worst["chosen_input_ids"] == worst["chosen_labels"] == [0, 1, 2] * 3
    assert worst["rejected_input_ids"] == worst["rejected_labels"] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    objective = Preference(DPOLoss(), lambda tokens: tokens)
    collated = rows.collate(NOTHING, Tokenizer(), objective)([worst, pair(2, 9)])
    assert objective.rows(collated) == objective.weight(collated) == 2
    assert (collated["labels"][0] != -100).all() and (collated["labels"][1] == -100).all()
    imagined = rows.imagined(2, 9, simulated=True)
    assert {name: value.shape for name, value in imagined.items()} == {
        name: value.shape for name, value in collated.items()
    }


def test_metrics_are_means_over_all_pairs_of_a_step() -> None:
    model, reference = (tiny_llama(sharded=False, seed=seed) for seed in (0, 1))
    for each in (model, reference):
        each.set_num_output_chunks(0)  # type: ignore[operator]
    objective = Preference(DPOLoss(), reference, [reference.requires_grad_(False)])
    outcomes = []
    whole = batch(rows=6, length=8)
    for pairs in ([[0, 1, 2]], [[0], [1, 2]]):
        ranks = Alone()
        step = train_step(model, [adamw(model, lr=0.0)], objective=objective, ranks=ranks)
        for some in pairs:
            both = torch.tensor(some + [number + 3 for number in some])
            step.forward_backward({name: value[both] for name, value in whole.items()})
        outcomes.append(step.apply())
    one, split = outcomes
    assert one.weight == split.weight == 3
    assert list(one.metrics) == list(objective.metrics)
    assert one.loss == pytest.approx(split.loss)
    assert dict(one.metrics) == pytest.approx(dict(split.metrics), rel=1e-5)
    margin = one.metrics["rewards/chosen"] - one.metrics["rewards/rejected"]
    assert one.metrics["rewards/margins"] == pytest.approx(margin, rel=1e-4)
    assert one.metrics["rewards/accuracies"] in (
        0.0,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        1.0,
    )


def test_pairs_of_which_only_prompts_are_left_stop_the_run() -> None:
    objective = Preference(DPOLoss(), lambda tokens: tokens)
    collate = Pairs().collate(NOTHING, Tokenizer(), objective)
    step = SimpleNamespace(ranks=Alone(), device=torch.device("cpu"), objective=objective)
    answered = pair(4, 4) | {"rejected_labels": [-100, -100, -100, 3]}
    for rows, learnable in (([pair(4, 4)], False), ([answered], True)):
        data = Data(rows, Tokenizer(), collate, rows=Pairs())
        with nullcontext() if learnable else pytest.raises(NothingToLearn):
            require_something_to_learn(data, step)  # type: ignore[arg-type]
