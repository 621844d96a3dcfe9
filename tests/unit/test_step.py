"""The step on one rank: what it computes, and that out of memory on one rank is only its own matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.faults import FailingMemory
from tests.helpers.models import adamw, batch, local_values, same_bits, tiny_llama, train_step
from torchtune_adaptive.step.train_step import StepHalfApplied


class OneRank:
    rank, size = 0, 1

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, value: Any) -> list[Any]:
        return [value]


def step_of(model: nn.Module, optimizer: Any, **settings: Any) -> Any:
    return train_step(model, [optimizer], ranks=OneRank(), **settings)  # type: ignore[arg-type]


def plain_gradients(
    model: nn.Module, batches: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], float]:
    """Mean loss over all tokens that count, and its gradients, the straightforward way."""
    losses, tokens = torch.zeros(()), 0
    for one in batches:
        logits = torch.cat(model(one["tokens"]), dim=1)[:, :-1]
        labels = one["labels"][:, 1:]
        losses = losses + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != -100).sum())
    (losses / tokens).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients, float(losses.detach() / tokens)


class Kept(torch.optim.SGD):
    """Changes nothing and keeps the gradients that it was given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("lengths", [[8], [8, 5], [9, 4, 7]])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(lengths: list[int]) -> None:
    model = tiny_llama(sharded=False)
    batches = [batch(length=length, seed=length) for length in lengths]
    expected, loss = plain_gradients(model, batches)
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer)
    for one in batches:
        step.forward_backward(one)
    outcome = step.apply()
    assert outcome.tokens == sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches)
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    for seen, gradient in zip(optimizer.seen, expected, strict=True):
        torch.testing.assert_close(seen, gradient)


@pytest.mark.parametrize("clip", [0.01, 1e6, float("inf")])
def test_clipping_is_torchs(clip: float) -> None:
    model = tiny_llama(sharded=False)
    expected, _ = plain_gradients(model, [batch()])
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer, clip_grad_norm=clip)
    step.forward_backward(batch())
    outcome = step.apply()
    assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for seen, gradient in zip(optimizer.seen, clipped, strict=True):
        torch.testing.assert_close(seen, gradient)


def test_a_batch_with_nothing_to_learn_spoils_nothing() -> None:
    # Its mean loss is 0 / 0. In torchtune one such micro-batch makes the whole step NaN.
    model = tiny_llama(sharded=False)
    masked = {**batch(seed=1), "labels": torch.full((2, 8), -100)}
    expected, _ = plain_gradients(model, [batch()])
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer)
    for one in (masked, batch(), masked):
        step.forward_backward(one)
    step.apply()
    for seen, gradient in zip(optimizer.seen, expected, strict=True):
        torch.testing.assert_close(seen, gradient)
    step.forward_backward(masked)
    outcome = step.apply()
    assert (outcome.tokens, outcome.loss) == (0, 0.0)
    assert all(torch.isfinite(gradient).all() for gradient in optimizer.seen)


def test_the_batch_that_is_given_stays_as_it_is() -> None:
    model = tiny_llama(sharded=False)
    step = step_of(model, Kept(model.parameters(), lr=1.0))
    given = batch()
    step.forward_backward(given)
    assert set(given) == {"tokens", "labels"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_lost_step_changes_nothing(phase: str) -> None:
    model = tiny_llama(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory)
    before = local_values(model)
    with memory.fail_at(0) as count:
        step.forward_backward(batch())
    step.forget()
    with memory.fail_at(5 if phase == "forward" else count.seen - 5):
        step.forward_backward(batch())
    outcome = step.apply()
    assert outcome.lost and outcome.failures == (phase,)
    assert same_bits(before, local_values(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_half_an_optimizer_step_cannot_be_thrown_away() -> None:
    model = tiny_llama(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory)
    step.forward_backward(batch())
    with memory.fail_at(30), pytest.raises(StepHalfApplied, match="optimizer step"):
        step.apply()


def test_anything_else_is_raised_as_it_is_at_once() -> None:
    model = tiny_llama(sharded=False)
    step = step_of(model, adamw(model))
    with pytest.raises(IndexError, match="out of range"):
        step.forward_backward({**batch(), "tokens": torch.full((2, 8), 10**6)})
    step.forget()
    step.forward_backward(batch())
    assert not step.apply().lost


def test_where_nothing_is_to_survive_the_error_is_the_devices_own() -> None:
    model = tiny_llama(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory, survive=False)
    with memory.fail_at(5), pytest.raises(torch.OutOfMemoryError):
        step.forward_backward(batch())


def test_losses_with_and_without_chunks_agree() -> None:
    losses = []
    for loss_fn in (CEWithChunkedOutputLoss(2), nn.CrossEntropyLoss()):
        model = tiny_llama(sharded=False)
        if isinstance(loss_fn, nn.CrossEntropyLoss):
            model.set_num_output_chunks(0)  # type: ignore[operator]
        step = step_of(model, Kept(model.parameters(), lr=1.0))
        step.loss_fn = loss_fn
        step.forward_backward(batch())
        losses.append(step.apply().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
