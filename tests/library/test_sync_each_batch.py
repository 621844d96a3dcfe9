"""FSDP's gradients, reduced with the last micro-batch of a step only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.library import Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from torchtune_adaptive import UsageError, find_batch_size

ROWS, STEPS = 8, 5
FAILURES = ({0: 1, 4: 0}, {1: 0, 4: 1})
"""The steps in which memory runs out, and the ranks: while collectives are recorded, and afterward."""


class Scatters(TorchDispatchMode):
    """Counts reduce-scatters."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += "reduce_scatter" in str(func)
        return func(*args, **kwargs or {})


def plain_steps(way: str, compute_in: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """The weights after a loop by hand, and the reduce-scatters of its last step."""
    run = Trained(way, compute_in=compute_in)
    rank = run.step.ranks.rank
    for number in range(STEPS):
        rows = rows_of(ROWS, 10 * number + rank)
        with Scatters() as launched:
            for row in rows:
                run.model.set_requires_gradient_sync(row is rows[-1])  # type: ignore[operator]
                loss, _ = run.forward(collate([row]))
                loss.backward()
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            terms = ROWS * run.step.ranks.size * rows[0][1].numel()
            parameter.grad.mul_(run.step.ranks.size / terms)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return local_values(run.model), launched.number


def steps(
    way: str, compute_in: torch.dtype | None, operation: int | None, size: int = 1
) -> tuple[list[torch.Tensor], int, int]:
    """The weights after steps of ours, the reduce-scatters of the last one, and the retried steps."""
    settings: dict[str, Any] = {"sync_each_batch": False, "optimizer_steps": False}
    run, memory = failing(way, compute_in=compute_in, **settings)
    rank, retried = run.step.ranks.rank, 0
    for number in range(STEPS):
        fails = operation if operation and FAILURES[operation % 2].get(number) == rank else None
        with Scatters() as launched, memory.fail_at(fails):
            outcome = run.step(rows_of(ROWS, 10 * number + rank), collate, size)
        run.optimizer.step()  # where memory that runs out cannot be survived
        retried += outcome.retried
    return local_values(run.model), launched.number, retried


def beside_a_plain_loop(way: str, compute_in: torch.dtype | None) -> bool:
    plain, launched = plain_steps(way, compute_in)
    ours, of_ours, _ = steps(way, compute_in, None)
    assert launched == of_ours == 2  # one for each layer
    return same_bits(ours, plain)


@pytest.mark.ranks
@pytest.mark.parametrize("compute_in", [None, torch.bfloat16])
def test_the_same_as_a_loop_that_syncs_in_the_last(compute_in: torch.dtype | None) -> None:
    assert run_ranks(beside_a_plain_loop, 2, "fsdp", compute_in) == [True, True]


def at_each_operation(way: str, operations: list[int], compute_in: torch.dtype | None) -> int:
    """Steps that are retried end as they do undisturbed; the number of operations at which memory ran out."""
    undisturbed, _, _ = steps(way, compute_in, None, size=4)
    hit = 0
    for operation in operations:
        found, _, retried = steps(way, compute_in, operation, size=4)
        hit += retried == 2
        for one, other in zip(found, undisturbed, strict=True):
            # With bf16, gradients of halves of a micro-batch are rounded.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-2 if compute_in else 1e-5)
    return hit


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "count", "compute_in"),
    [
        ("fsdp", 2, None),
        pytest.param("parts", 2, None, marks=pytest.mark.exhaustive),
        pytest.param("fsdp", 2, torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param("hsdp", 4, None, marks=pytest.mark.exhaustive),
    ],
)
def test_no_rank_waits(
    way: str, count: int, compute_in: torch.dtype | None, exhaustive: bool
) -> None:
    """Memory lost in the micro-batch before the last, in that, and between; what waits is dropped."""
    operations = [*range(1, 80, 3 if exhaustive and count == 2 else 13)]
    for hit in run_ranks(at_each_operation, count, way, operations, compute_in, timeout=400):
        assert hit > len(operations) // 2


def peaks(sync: bool) -> tuple[int, int]:
    run = Trained("fsdp", layers=8, width=64, memory_limit="4MiB", sync_each_batch=sync)
    rows = lambda count: collate(rows_of(count, width=64))  # noqa: E731
    found = find_batch_size(run.step, rows, ceiling=4, accumulation=2)
    return int(found), max(each.peak_bytes for trial in found.trials for each in trial.reports)


@pytest.mark.ranks
def test_a_search_counts_the_gradients_that_wait() -> None:
    """Half of them are on each rank otherwise."""
    [(_, each), _] = run_ranks(peaks, 2, True)
    [(_, last), _] = run_ranks(peaks, 2, False)
    gradients = 8 * (64 * 64 + 64) * 4
    assert last - each >= gradients * 0.4


def refused() -> list[str]:
    said = []
    for way in ("fsdp", "ddp"):
        try:
            Trained(way, sync_each_batch=False, measure_noise=True)
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
def test_noise_is_measured_of_each_micro_batch() -> None:
    """With FSDP; replicas do not care."""
    for [said] in run_ranks(refused, 2):
        assert said.startswith("sync_each_batch: False does not go with measure_noise")


def without_a_last() -> Any:
    run = Trained("fsdp", sync_each_batch=False)
    run.step.train_step.forward_backward(collate(rows_of(1)))
    with pytest.raises(RuntimeError, match="No micro-batch was given as the last"):
        run.step.train_step.apply()


@pytest.mark.ranks
def test_a_step_without_a_last_micro_batch_is_a_mistake() -> None:
    run_ranks(without_a_last, 2)
