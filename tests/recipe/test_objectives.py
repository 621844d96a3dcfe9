"""What a step of a recipe minimizes: the loss of torchtune's rows, however split, or of two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchtune.data import padded_collate_packed, padded_collate_sft

from tests.helpers.decoder import batch
from tests.helpers.models import distillation, tiny_llama, train_step
from tests.helpers.ranks import Alone
from tests.helpers.steps import Kept, plain_gradients


def step_of(model: Any, optimizer: Any, **settings: Any) -> Any:
    return train_step(model, [optimizer], ranks=Alone(), **settings)


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
