"""What differs between torchtune 0.6.1 and its main branch, on whichever is installed."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn
from torchtune import config

from tests.helpers.decoder import batch
from tests.helpers.models import tiny_llama
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.recipe import upstream
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.upstream import give_output_to_loss, labels_are_shifted


class LinearLoss(nn.Module):
    """As main's ``LinearCrossEntropyLoss``: takes hidden states, and has the output layer multiply them."""

    ignore_index = -100

    def set_model_output(self, model: nn.Module) -> None:
        self.output = [model.output]
        model.skip_output_layer = True  # type: ignore[assignment]

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        (output,) = self.output
        kept = labels != self.ignore_index
        return F.cross_entropy(output(hidden[kept]), labels[kept])


class SkipsItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.output = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.skip_output_layer = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(tokens)
        return hidden if self.skip_output_layer else self.output(hidden)


def test_labels_are_those_of_the_installed_datasets() -> None:
    cfg = OmegaConf.load(find_config("tiny/full"))
    dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
    row = dataset[0]
    tokens, labels = row["tokens"], row["labels"]
    shift = int(labels_are_shifted())
    learnt = [n for n, label in enumerate(labels) if label != -100]
    assert learnt and all(labels[n] == tokens[n + shift] for n in learnt)


def test_a_loss_is_known_by_its_class_also_where_a_function_wraps_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunked = upstream.CEWithChunkedOutputLoss()

    @wraps(upstream.CEWithChunkedOutputLoss)
    def deprecated(*arguments: Any) -> nn.Module:
        raise NotImplementedError

    for installed in (upstream.CEWithChunkedOutputLoss, deprecated):
        monkeypatch.setattr(upstream, "CEWithChunkedOutputLoss", installed)
        assert upstream.is_chunked_cross_entropy(chunked)
        assert not upstream.is_chunked_cross_entropy(nn.CrossEntropyLoss())


def test_shifted_labels_give_the_same_loss() -> None:
    one = batch()
    shifted = {**one, "labels": F.pad(one["labels"][:, 1:], (0, 1), value=-100)}
    model = SkipsItsOutput()
    loss_fn = nn.CrossEntropyLoss()
    by_recipe, by_dataset = (NextTokenPrediction(loss_fn, shifts) for shifts in (False, True))
    assert by_recipe.weight(one) == by_dataset.weight(shifted) > 0
    first, other = (
        objective.summed_loss(model, given, objective.weight(given))
        for objective, given in ((by_recipe, one), (by_dataset, shifted))
    )
    assert torch.equal(first, other)  # type: ignore[arg-type]


def test_a_loss_that_has_the_output_layer_itself() -> None:
    model, one = SkipsItsOutput(), batch()
    plain = NextTokenPrediction(nn.CrossEntropyLoss())
    expected = plain.summed_loss(model, one, plain.weight(one))
    linear = NextTokenPrediction(LinearLoss())
    give_output_to_loss(linear.loss_fn, model)
    assert torch.allclose(linear.summed_loss(model, one, linear.weight(one)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), LinearLoss()], ids=str)
def test_where_nothing_is_learnt_every_parameter_has_a_gradient_of_zero(loss_fn: nn.Module) -> None:
    """Or FSDP would reduce other gradients than it does on ranks that learn something."""
    model, one = SkipsItsOutput(), batch()
    give_output_to_loss(loss_fn, model)
    masked = {**one, "labels": torch.full_like(one["labels"], -100)}
    objective = NextTokenPrediction(loss_fn)
    loss = objective.summed_loss(model, masked, objective.weight(masked))
    assert isinstance(loss, torch.Tensor) and loss == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_logits_in_chunks() -> None:
    model = tiny_llama(sharded=False)
    loss_fn = nn.CrossEntropyLoss()
    loss_fn.num_output_chunks = 3  # type: ignore[assignment]
    give_output_to_loss(loss_fn, model)
    assert len(model(batch()["tokens"])) == 3
