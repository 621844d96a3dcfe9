"""Callers that change FSDP, or catch errors: a rank that fails still launches what the others do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.helpers.library import Trained, collate, failing, rows_of, tiny_model
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks import fsdp

pytestmark = pytest.mark.ranks


def operators(factor: float | None, forced: bool) -> list[str]:
    """The operators of FSDP's all-reduces on this rank, in a step that rank 0 fails."""
    model, launched = tiny_model("hsdp"), list[str]()
    replicas = fsdp.replicas(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(forced)
    all_reduce = dist.all_reduce

    def noted(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any
    ) -> Any:
        if group in replicas:
            launched.append(str(op))
        return all_reduce(tensor, op, group, **more)

    noted.__name__ = all_reduce.__name__
    with mock.patch.object(dist, "all_reduce", noted):
        run, memory = failing("hsdp", model=model)
        for _ in range(3):  # the first two are recorded
            run.step(rows_of(2), collate, 2)
        launched.clear()
        with memory.fail_at(4 if dist.get_rank() == 0 else None):
            outcome = run.step(rows_of(2), collate, 2)
    assert outcome.retried == 1
    return launched


@pytest.mark.parametrize("forced", [False, True], ids=["", "forced sums"])
@pytest.mark.parametrize("factor", [None, 2.0])  # gloo can divide by the ranks of a shard only
def test_a_rank_that_fails_all_reduces_with_the_operator_of_fsdp(
    factor: float | None, forced: bool
) -> None:
    failed, *others = run_ranks(operators, 4, factor, forced)
    assert len(failed) > 3 and all(each == failed for each in others)


class Careless(nn.Sequential):
    """Layers whose caller goes on whatever they raise."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self:
            try:
                rows = layer(rows)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                rows = rows * 1.0
        return rows


def careless_of(model: nn.Module) -> nn.Module:
    return Careless(*model.children())


def careless() -> list[int]:
    """How often steps of such a model are retried, of which rank 1 fails the first and the last."""
    run, memory = failing("fsdp", Trained, layers=4, wrap=careless_of, timeout=20.0)
    retried = []
    for number in range(4):
        fails = number in (0, 3) and dist.get_rank() == 1
        with memory.fail_at(12 if fails else None):
            retried.append(run.step(rows_of(4, seed=dist.get_rank()), collate, 4).retried)
    return retried


def test_a_forward_that_catches_errors_does_not_catch_that_another_rank_failed() -> None:
    assert run_ranks(careless, 2, timeout=120.0) == [[1, 0, 0, 1]] * 2
