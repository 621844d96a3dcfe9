"""The step on one rank: what it computes, and what is left of it when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers.faults import FailingMemory
from tests.helpers.models import (
    adamw,
    batch,
    distillation,
    local_values,
    same_bits,
    tiny_llama,
    train_step,
)
from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import TrainingOutOfMemory
from torchtune_adaptive.core.step import gradients
from torchtune_adaptive.core.step.exchange import StepLost
from torchtune_adaptive.core.step.failures import StepHalfApplied
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.retry import StepRunner


def step_of(model: nn.Module, optimizer: Any, **settings: Any) -> Any:
    return train_step(model, [optimizer], ranks=Alone(), **settings)


def plain_gradients(
    model: nn.Module, batches: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], float]:
    """Mean loss over all tokens that count, and its gradients, the straightforward way."""
    losses, tokens = torch.zeros(()), 0
    for one in batches:
        inputs = {name: value for name, value in one.items() if name != "labels"}
        logits = torch.cat(model(**inputs), dim=1)[:, :-1]
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
    assert outcome.weight == sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches)
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    for seen, gradient in zip(optimizer.seen, expected, strict=True):
        torch.testing.assert_close(seen, gradient)


def of_lengths(lengths: list[int], masked: int) -> list[dict[str, Any]]:
    """Rows as a dataset gives them, with so many labels masked at the beginning of each."""
    numbers = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 16, (length,), generator=numbers).tolist() for length in lengths]
    return [{"tokens": row, "labels": [-100] * masked + row[masked:]} for row in rows]


def packs(documents: list[list[int]]) -> list[dict[str, Any]]:
    """Packed rows: the documents of each have these lengths, and every token is trained on."""
    rows = of_lengths([sum(lengths) for lengths in documents], masked=0)
    return [
        {
            **{name: torch.tensor(value) for name, value in row.items()},
            "input_pos": torch.cat([torch.arange(length) for length in lengths]),
            "seq_lens": torch.tensor(lengths),
        }
        for row, lengths in zip(rows, documents, strict=True)
    ]


LENGTHS = [12, 3, 9, 2, 5, 7]
KINDS_OF_ROWS: dict[str, tuple[list[dict[str, Any]], Callable[..., dict[str, Any]], bool]] = {
    # rows, what makes a batch of them, and whether torchtune's arithmetic is right for them
    "masked prompts": (of_lengths(LENGTHS, masked=1), padded_collate_sft, True),
    "text completion": (of_lengths(LENGTHS, masked=0), padded_collate_sft, False),
    "very short rows": (of_lengths([2, 1, 3, 1, 2, 4], masked=0), padded_collate_sft, False),
    "packed": (packs([[3, 9], [12], [1, 1, 10], [6, 6]]), padded_collate_packed, True),
}


def relative_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    left, right = (torch.cat([each.flatten() for each in side]) for side in (some, others))
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize(("rows", "collate", "_"), KINDS_OF_ROWS.values(), ids=list(KINDS_OF_ROWS))
def test_how_rows_are_split_does_not_matter(rows: list[Any], collate: Any, _: bool) -> None:
    model = tiny_llama(sharded=False)
    expected, loss = plain_gradients(model, [collate(rows)])
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer, clip_grad_norm=1e9)
    outcomes = []
    for ends in ([len(rows)], [1, 3, len(rows)], [2, len(rows)], list(range(1, len(rows) + 1))):
        for start, end in zip([0, *ends], ends, strict=False):
            step.forward_backward(collate(rows[start:end]))
        outcomes.append(step.apply())
        assert relative_difference(optimizer.seen, expected) < 1e-6
    assert len({outcome.weight for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(loss, rel=1e-6)
        assert outcome.gradient_norm == pytest.approx(outcomes[0].gradient_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "collate", "is_right"), KINDS_OF_ROWS.values(), ids=list(KINDS_OF_ROWS)
)
def test_where_torchtune_counts_differently(rows: list[Any], collate: Any, is_right: bool) -> None:
    """Its recipes weight each micro-batch's mean loss by all labels that are not masked, the first ones
    included, which are not part of that mean."""
    model = tiny_llama(sharded=False)
    expected, _ = plain_gradients(model, [collate(rows)])
    weights = []
    for micro_batch in (collate(rows[:2]), collate(rows[2:])):
        predicted = micro_batch["labels"][:, 1:]
        logits = torch.cat(model(micro_batch["tokens"], **inputs_beside_tokens(micro_batch)), dim=1)
        mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), predicted.flatten())
        weights.append(int((micro_batch["labels"] != -100).sum()))
        (mean * weights[-1]).backward()
    gradients = [p.grad / sum(weights) for p in model.parameters() if p.grad is not None]
    difference = relative_difference(gradients, expected)
    assert difference < 1e-6 if is_right else difference > 1e-3


def inputs_beside_tokens(micro_batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in micro_batch.items() if name not in ("tokens", "labels")}


def test_an_objective_may_need_a_second_model() -> None:
    model, teacher = tiny_llama(sharded=False), tiny_llama(sharded=False, seed=1, layers=2)
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer, objective=distillation(teacher, 0.25))
    batches = [batch(length=length) for length in (8, 5)]
    for one in batches:
        step.forward_backward(one)
    outcome = step.apply()
    model.zero_grad()
    total, tokens = torch.zeros(()), 0
    for one in batches:
        student, taught = (
            torch.cat(each(one["tokens"]), dim=1)[:, :-1] for each in (model, teacher)
        )
        counts = one["labels"][:, 1:] != -100
        for part, targets in (
            (0.25, taught[counts].softmax(-1)),
            (0.75, one["labels"][:, 1:][counts]),
        ):
            total = total + part * F.cross_entropy(student[counts], targets, reduction="sum")
        tokens += int(counts.sum())
    (total / tokens).backward()
    assert outcome.weight == tokens and outcome.loss == pytest.approx(
        float(total.detach()) / tokens
    )
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert relative_difference(optimizer.seen, expected) < 1e-6
    assert all(p.grad is None for p in teacher.parameters())


def test_without_a_token_that_counts_the_teacher_runs_and_nothing_is_learnt() -> None:
    model, teacher = tiny_llama(sharded=False), tiny_llama(sharded=False, seed=1)
    ran = []
    teacher.register_forward_hook(lambda *_: ran.append(True))
    optimizer = Kept(model.parameters(), lr=1.0)
    step = step_of(model, optimizer, objective=distillation(teacher))
    masked = batch()
    masked["labels"].fill_(-100)
    step.forward_backward(masked)
    outcome = step.apply()
    assert ran and outcome.weight == 0
    assert outcome.loss == outcome.metrics["kd_loss"] == outcome.metrics["class_loss"] == 0
    assert len(optimizer.seen) == len(list(model.parameters()))
    assert all((gradient == 0).all() for gradient in optimizer.seen)


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


def test_gradients_on_the_host_are_scaled_by_the_factor_itself() -> None:
    """With CPU offload they are there, whatever device the run is on."""
    gradient = torch.arange(1, 200, dtype=torch.bfloat16)
    factor = 1 / 3331
    expected = gradient * factor
    gradients.scale([gradient], factor, run=lambda kernel, *arguments: kernel(*arguments))
    assert torch.equal(gradient, expected)


def test_gradients_on_an_accelerator_are_scaled_by_one_kernel() -> None:
    pieces = [torch.ones(2, device="meta"), torch.ones(2), torch.ones(3, device="meta")]
    kernels: list[Any] = []
    gradients.scale(pieces, 0.5, run=lambda kernel, *arguments: kernels.append(arguments))
    assert [len(arguments[0]) for arguments in kernels if len(arguments) == 2] == [2]
    assert len(kernels) == 2


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
    assert (outcome.weight, outcome.loss) == (0, 0.0)
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


def test_where_memory_ran_out_is_said_once_for_all_ranks() -> None:
    assert StepLost((None, "forward")).trouble == "out of memory in forward on rank 1"
    lost = StepLost(("forward", "backward", "forward", None))
    assert lost.trouble == "out of memory in forward on ranks 0 and 2, in backward on rank 1"


def test_half_an_optimizer_step_cannot_be_discarded() -> None:
    model = tiny_llama(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory)
    step.forward_backward(batch())
    with memory.fail_at(20), pytest.raises(StepHalfApplied, match="optimizer step"):
        step.apply()


def test_that_it_is_half_done_is_not_known_to_the_other_ranks() -> None:
    model = tiny_llama(sharded=False)
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
    model = tiny_llama(sharded=False)
    step = step_of(model, adamw(model))
    with pytest.raises(IndexError, match="out of range"):
        step.forward_backward({**batch(), "tokens": torch.full((2, 8), 10**6)})
    step.forget()
    step.forward_backward(batch())
    assert not step.apply().lost


def test_a_step_that_is_not_to_survive_raises_the_devices_own_error() -> None:
    model = tiny_llama(sharded=False)
    memory = FailingMemory()
    step = step_of(model, adamw(model), memory=memory, survive=False)
    with memory.fail_at(5), pytest.raises(torch.OutOfMemoryError):
        step.forward_backward(batch())


def test_where_no_step_is_retried_the_message_says_which_and_what_to_do() -> None:
    model = tiny_llama(sharded=False)
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
    for loss_fn in (CEWithChunkedOutputLoss(2), nn.CrossEntropyLoss()):
        model = tiny_llama(sharded=False)
        if isinstance(loss_fn, nn.CrossEntropyLoss):
            model.set_num_output_chunks(0)  # type: ignore[operator]
        objective = NextTokenPrediction(loss_fn)
        step = step_of(model, Kept(model.parameters(), lr=1.0), objective=objective)
        step.forward_backward(batch())
        losses.append(step.apply().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
