"""The step on one rank: what it computes, and what is left of it when memory runs out."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.decoder import (
    ChunkedCrossEntropy,
    adamw,
    batch,
    local_values,
    same_bits,
    tiny_decoder,
)
from tests.helpers.faults import FailingMemory
from tests.helpers.steps import Kept, plain_gradients, step_of
from torchtune_adaptive.common.errors import TrainingOutOfMemory
from torchtune_adaptive.core import private
from torchtune_adaptive.core.step import gradients
from torchtune_adaptive.core.step.exchange import StepLost
from torchtune_adaptive.core.step.failures import StepHalfApplied
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.retry import StepRunner


@pytest.mark.parametrize("lengths", [[8], [8, 5], [9, 4, 7]])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(lengths: list[int]) -> None:
    model = tiny_decoder(sharded=False)
    batches = [batch(length=length, seed=length) for length in lengths]
    expected, loss = plain_gradients(model, batches)
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer)
    for one in batches:
        step.forward_backward(one)
    outcome = step.apply()
    assert outcome.weight == sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches)
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    for seen, gradient in zip(optimizer.seen, expected, strict=True):
        torch.testing.assert_close(seen, gradient)


def test_nothing_follows_the_last_micro_batch() -> None:
    model = tiny_decoder(sharded=False)
    step = step_of(model, adamw(model))
    step.forward_backward(batch(), last=True)
    with pytest.raises(RuntimeError, match="follows the one that was given as the last"):
        step.forward_backward(batch())
    step.apply()
    step.forward_backward(batch(), last=True)
    assert not step.apply().lost


class InOnePlace(torch.autograd.Function):
    """A loss that is returned in the same memory each time, as by a CUDA graph that is replayed."""

    place = torch.zeros(())

    @staticmethod
    def forward(context: Any, loss: torch.Tensor) -> torch.Tensor:
        return InOnePlace.place.copy_(loss)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def test_a_loss_in_memory_that_is_written_again_is_summed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [batch(length=length, seed=length) for length in (8, 5, 9, 4)]

    def mean_loss() -> float:
        model = tiny_decoder(sharded=False)
        step = step_of(model, adamw(model))
        for one in batches:
            step.forward_backward(one)
        outcome = step.apply()
        assert not outcome.lost
        return outcome.loss

    expected, plain = mean_loss(), NextTokenPrediction.summed_loss
    monkeypatch.setattr(
        NextTokenPrediction, "summed_loss", lambda *given: InOnePlace.apply(plain(*given))
    )
    assert mean_loss() == expected


def test_the_host_waits_for_no_copy_of_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(sharded=False)
    step = step_of(model, adamw(model))
    step.device = torch.device("cuda")
    waited = {}

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        assert device == step.device
        waited[len(tensor)] = not non_blocking
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) == 2)
    step.to_device({"pinned": torch.zeros(2), "pageable": torch.zeros(3)})
    assert waited == {2: False, 3: True}


@pytest.mark.parametrize("clip", [0.01, 1e6, float("inf")])
def test_clipping_is_torchs(clip: float) -> None:
    model = tiny_decoder(sharded=False)
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


def test_gradients_on_the_host_are_scaled_by_the_factor_itself() -> None:
    """With CPU offload they are there, whatever device the run is on."""
    gradient = torch.arange(1, 200, dtype=torch.bfloat16)
    factor = 1 / 3331
    expected = gradient * factor
    gradients.scale([gradient], factor, run=lambda kernel, *arguments: kernel(*arguments))
    assert torch.equal(gradient, expected)


def test_gradients_of_one_dtype_are_scaled_by_one_kernel() -> None:
    pieces = [
        *(torch.ones(size, device="meta") for size in (2, 3)),
        *(torch.ones(size, device="meta", dtype=torch.bfloat16) for size in (2, 3, 4)),
        *(torch.ones(size) for size in (2, 3)),
    ]
    kernels: list[Any] = []
    gradients.scale(pieces[::-1], 0.5, run=lambda kernel, *given: kernels.append((kernel, given)))
    assert all(kernel is private.foreach_mul_ for kernel, _ in kernels)
    assert [len(given[0]) for _, given in kernels] == [2, 3, 2]


def test_a_norm_of_gradients_of_two_dtypes_is_that_of_all() -> None:
    of = torch.Generator().manual_seed(0)
    pieces = [torch.randn(9, generator=of) for _ in range(4)]
    pieces[1::2] = [piece.bfloat16() for piece in pieces[1::2]]
    expected = sum(float(piece.double().square().sum()) for piece in pieces)
    found = gradients.squared_norm(pieces, ranks=1, device=torch.device("cpu"))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_numbers_are_divided_as_float32_divides() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        tokens = chance.randint(0, 1 << chance.randint(1, 40))
        number = chance.uniform(-1, 1) * 2.0 ** chance.randint(-160, 140)
        expected = torch.tensor(max(tokens, 1), dtype=torch.float32).reciprocal() * number
        assert gradients.divide(number, tokens) == float(expected)
    assert math.isnan(gradients.divide(math.nan, 4)) and gradients.divide(math.inf, 4) == math.inf


def test_a_batch_with_nothing_to_learn_spoils_nothing() -> None:
    # Its mean loss is 0 / 0. In torchtune one such micro-batch makes the whole step NaN.
    model = tiny_decoder(sharded=False)
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
    assert (outcome.weight, outcome.loss) == (0, 0.0)
    assert all(torch.isfinite(gradient).all() for gradient in optimizer.seen)


def test_the_batch_that_is_given_stays_as_it_is() -> None:
    model = tiny_decoder(sharded=False)
    step = step_of(model, Kept(model.parameters(), lr=1.0))
    given = batch()
    step.forward_backward(given)
    assert set(given) == {"tokens", "labels"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_lost_step_changes_nothing(phase: str) -> None:
    model = tiny_decoder(sharded=False)
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


def test_where_memory_ran_out_is_said_once_for_all_ranks() -> None:
    assert StepLost((None, "forward")).trouble == "out of memory in forward on rank 1"
    lost = StepLost(("forward", "backward", "forward", None))
    assert lost.trouble == "out of memory in forward on ranks 0 and 2, in backward on rank 1"


def test_half_an_optimizer_step_cannot_be_discarded() -> None:
    model = tiny_decoder(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory)
    step.forward_backward(batch())
    with memory.fail_at(20), pytest.raises(StepHalfApplied, match="optimizer step"):
        step.apply()


def test_that_it_is_half_done_is_not_known_to_the_other_ranks() -> None:
    model = tiny_decoder(sharded=False)
    memory = FailingMemory()
    runner = StepRunner(step_of(model, adamw(model), memory=memory), advice=lambda: "Resume.")
    runner.begin(2, None)

    def micro_batches(size: int) -> Any:
        yield batch(rows=size)
        memory.arm(20)  # in the optimizer

    with pytest.raises(TrainingOutOfMemory, match="in the optimizer step of step 7") as raised:
        runner.run(micro_batches, 7)
    assert not raised.value.everywhere


def test_anything_else_is_raised_as_it_is_at_once() -> None:
    model = tiny_decoder(sharded=False)
    step = step_of(model, adamw(model))
    with pytest.raises(IndexError, match="out of range"):
        step.forward_backward({**batch(), "tokens": torch.full((2, 8), 10**6)})
    step.forget()
    step.forward_backward(batch())
    assert not step.apply().lost


def test_a_step_that_is_not_to_survive_raises_the_devices_own_error() -> None:
    model = tiny_decoder(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory, survive=False)
    with memory.fail_at(5), pytest.raises(torch.OutOfMemoryError):
        step.forward_backward(batch())


def test_where_no_step_is_retried_the_message_says_which_and_what_to_do() -> None:
    model = tiny_decoder(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory, survive=False)
    runner = StepRunner(step, advice=lambda: "Set what is to be set.")
    runner.begin(2, None)
    with memory.fail_at(5), pytest.raises(TrainingOutOfMemory) as raised:
        runner.run(lambda size: [batch(rows=size)], 7)
    said = "Step 7 in micro-batches of 2 rows: out of memory in forward on rank 0. Set what is to be set. ("
    assert str(raised.value).startswith(said) and not raised.value.everywhere


def test_losses_with_and_without_chunks_agree() -> None:
    losses = []
    for loss_fn in (ChunkedCrossEntropy(2), nn.CrossEntropyLoss()):
        model = tiny_decoder(sharded=False)
        if isinstance(loss_fn, nn.CrossEntropyLoss):
            model.chunks = 0
        objective = NextTokenPrediction(loss_fn)
        step = step_of(model, Kept(model.parameters(), lr=1.0), objective=objective)
        step.forward_backward(batch())
        losses.append(step.apply().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
