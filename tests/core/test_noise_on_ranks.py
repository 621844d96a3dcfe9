"""Gradient noise, measured in a step, is what one backward pass per small batch would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.decoder import (
    adamw,
    batch,
    local_values,
    same_bits,
    step_in_backward,
    tiny_decoder,
    train_step,
)
from tests.helpers.faults import FailingMemory
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.sizes.noise import NoiseScale, NoiseSums
from torchtune_adaptive.core.step.exchange import StepOutcome
from torchtune_adaptive.core.step.train_step import TrainStep

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

Batch = dict[str, Any]


def masked(rows: int, length: int, seed: int) -> Batch:
    """Rows of different lengths, each with a different number of labels masked, possibly none."""
    generator = torch.Generator().manual_seed(seed)
    made = batch(rows, length + seed % 3, seed)
    for labels in made["labels"]:
        labels[: int(torch.randint(0, length - 1, (1,), generator=generator))] = -100
    return made


def tokens_of(one: Batch) -> int:
    """Those that are predicted, which the first of a row is not."""
    return int((one["labels"][:, 1:] != -100).sum())


def gradient(model: nn.Module, one: Batch) -> torch.Tensor:
    """The gradient of the sum of the token losses, on a model that is not sharded."""
    model.zero_grad()
    logits = torch.cat(model(one["tokens"]), dim=1)[:, :-1]
    labels = one["labels"][:, 1:]
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def brute_force(model: nn.Module, small: list[Batch]) -> dict[str, float]:
    gradients = [gradient(model, one) for one in small]
    tokens = [tokens_of(one) for one in small]
    return {
        "small": float(sum(g.square().sum() for g in gradients)),
        "small_tokens": sum(tokens),
        "small_tokens_squared": sum(n * n for n in tokens),
        "big": float(sum(gradients).square().sum()),  # type: ignore[union-attr]
        "tokens": sum(tokens),
        "tokens_squared": sum(tokens) ** 2,
        "rows": sum(len(one["tokens"]) for one in small),
    }


def take(step: TrainStep, batches: list[Batch]) -> StepOutcome:
    for one in batches:
        step.forward_backward(one)
    return step.apply()


def largest_errors(accumulation: int, survive: bool, kind: dict[str, Any]) -> dict[str, float]:
    """How far the sums of some steps are from brute force, relatively."""
    ranks = Ranks(timeout=200)
    reference = tiny_decoder(**{**kind, "sharded": False, "checkpointing": False})
    model = tiny_decoder(**kind)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    step = train_step(model, [still], ranks=ranks, survive=survive, measure_noise=True)
    errors: dict[str, float] = {}
    for number in range(4):
        all_ranks = [
            [
                masked(rows=2, length=9, seed=100 * number + 10 * k + rank)
                for k in range(accumulation)
            ]
            for rank in range(ranks.size)
        ]
        sums = take(step, all_ranks[ranks.rank]).noise
        assert sums is not None
        truth = brute_force(reference, [one for batches in all_ranks for one in batches])
        for name, value in truth.items():
            error = abs(getattr(sums, name) / value - 1)
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("survive", "kind"),
    [
        (True, {"layers": 2}),
        (False, {}),
        (True, {"checkpointing": True, "reshard": False}),
        (True, {"adapters": True, "output_apart": True}),
    ],
    ids=["survives", "does not", "checkpointed, not resharded", "adapters"],
)
def test_the_sums_are_those_of_one_backward_pass_per_small_batch(
    accumulation: int, survive: bool, kind: dict[str, Any]
) -> None:
    for errors in run_ranks(largest_errors, 2, accumulation, survive, kind):
        assert errors["small"] < 1e-5 and errors["big"] < 1e-5
        assert max(error for name, error in errors.items() if name not in ("small", "big")) == 0


def train(measure_noise: bool, settings: dict[str, Any]) -> list[torch.Tensor]:
    model = tiny_decoder(layers=2)
    rank = torch.distributed.get_rank()
    step = train_step(model, [adamw(model)], measure_noise=measure_noise, **settings)
    seen: list[torch.Tensor] = []
    for number in range(3):
        for k in range(2):
            step.forward_backward(masked(2, 9, seed=10 * number + 2 * k + rank))
        seen += [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
        outcome = step.apply()
        assert (outcome.noise is not None) == measure_noise
        assert (outcome.gradient_norm is not None) == ("clip_grad_norm" in settings)
        seen += local_values(model)
        seen.append(torch.tensor([outcome.loss, outcome.gradient_norm or 0.0]))
    return seen


def measuring_changes_nothing() -> list[bool]:
    """In steps of which nothing is special, in those that are clipped, and in those that cannot be lost."""
    settings: tuple[dict[str, Any], ...] = ({}, {"clip_grad_norm": 0.5}, {"survive": False})
    return [same_bits(train(False, each), train(True, each)) for each in settings]


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_measuring_changes_no_bit(ranks: int) -> None:
    assert run_ranks(measuring_changes_nothing, ranks) == [[True] * 3] * ranks


def lose_and_retake(accumulation: int) -> list[NoiseSums | None]:
    """The sums of a step that succeeds at once, and of the same step retried."""
    ranks, memory = Ranks(timeout=200), FailingMemory()
    model = tiny_decoder(layers=2)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    step = train_step(model, [still], ranks=ranks, memory=memory, measure_noise=True)
    batches = [masked(2, 9, seed=2 * k + ranks.rank) for k in range(accumulation)]
    sums = [take(step, batches).noise for _ in range(2)]  # and the collectives are recorded
    with memory.fail_at(0) as count:
        sums.append(take(step, batches).noise)
    for part in (0.3, 0.6, 0.9):
        victim = ranks.rank == ranks.size - 1
        with memory.fail_at(int(part * count.seen) if victim else None):
            assert take(step, batches).lost
        sums.append(take(step, batches).noise)
    return sums


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (2, 3), (1, 2)])
def test_a_retried_step_counts_once(ranks: int, accumulation: int) -> None:
    for sums in run_ranks(lose_and_retake, ranks, accumulation):
        assert sums[0] is not None and all(other == sums[0] for other in sums)


def on_one_rank(sharded: bool) -> dict[int, tuple[NoiseSums | None, dict[str, float]]]:
    reference, model = tiny_decoder(sharded=False), tiny_decoder(sharded=sharded)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    step = train_step(model, [still], measure_noise=True)
    found = {}
    for accumulation in (1, 2, 3):
        batches = [masked(2, 9, seed=k) for k in range(accumulation)]
        sums = take(step, batches).noise
        truth = brute_force(reference, batches)
        first = brute_force(reference, batches[:1])
        truth.update({name: first[name] for name in first if name.startswith("small")})
        found[accumulation] = (sums, truth)
    return found


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "not sharded"])
def test_on_one_rank_the_first_micro_batch_is_the_small_one(sharded: bool) -> None:
    (found,) = run_ranks(on_one_rank, 1, sharded)
    assert found[1][0] is None
    for accumulation in (2, 3):
        sums, truth = found[accumulation]
        assert vars(sums) == pytest.approx(truth, rel=1e-5)


def in_backward() -> Any:
    model = tiny_decoder()
    by_parameter = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
    step_in_backward(by_parameter)
    step = train_step(
        model, [*by_parameter.values()], optimizer_in_backward=True, measure_noise=True
    )
    return take(step, [batch()]).noise


def test_where_the_optimizer_steps_in_backward_there_is_nothing_to_measure() -> None:
    assert run_ranks(in_backward, 2) == [None, None]


# --- what all this is for ---------------------------------------------------------------------------------

ROWS, LENGTH = 64, 6
ACCUMULATION, ROWS_PER_MICRO_BATCH = 4, 2


def population() -> Batch:
    """Rows in which there is something to learn, so that there is a gradient besides the noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in labels:
        row[: int(torch.randint(1, LENGTH - 1, (1,), generator=generator))] = -100
    return {"tokens": tokens, "labels": labels}


def part(rows: Batch, chosen: Any) -> Batch:
    return {name: value[chosen] for name, value in rows.items()}


def drawn(rank: int, steps: int) -> list[list[Batch]]:
    """The micro-batches of each step: rows drawn with replacement, so that what is true is known."""
    generator, rows = torch.Generator().manual_seed(1 + rank), population()
    shape = (steps, ACCUMULATION, ROWS_PER_MICRO_BATCH)
    return [
        [part(rows, micro_batch) for micro_batch in step]
        for step in torch.randint(0, ROWS, shape, generator=generator)
    ]


def measured_scales(steps: int) -> tuple[float | None, float | None]:
    model, ranks = tiny_decoder(), Ranks(timeout=200)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    step = train_step(model, [still], ranks=ranks, survive=False, measure_noise=True)
    noise = NoiseScale(window=10**9)
    for batches in drawn(ranks.rank, steps):
        noise.update(take(step, batches).noise)
    assert noise.steps == steps
    return noise.scale_in_tokens, noise.scale_in_rows


def true_scale() -> float:
    """In tokens, of the rows that are drawn from, by one backward pass for each."""
    model, rows = tiny_decoder(sharded=False), population()
    singles = [part(rows, slice(i, i + 1)) for i in range(ROWS)]
    gradients = torch.stack([gradient(model, one) for one in singles])
    tokens = torch.tensor([tokens_of(one) for one in singles]).double()
    mean = gradients.sum(0) / tokens.sum()  # of a token
    spread = gradients - tokens[:, None] * mean
    return float(spread.square().sum() / tokens.sum() / mean.square().sum())


@pytest.mark.exhaustive
def test_over_many_steps_the_scale_is_the_true_one(exhaustive: bool) -> None:
    steps, tolerance = (500, 0.05) if exhaustive else (125, 0.1)  # halved by four times the steps
    truth = true_scale()
    tokens_per_row = tokens_of(population()) / ROWS
    first, second = run_ranks(measured_scales, 2, steps)
    assert first == second  # every rank decides on the same numbers
    assert first[0] == pytest.approx(truth, rel=tolerance)
    assert first[1] == pytest.approx(truth / tokens_per_row, rel=tolerance)
