"""Buckets besides the gradients, as DDP has its own: for plans of steps that it reduces itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.replicas import MODELS, ROWS, Run, rows, wrong_bits
from torchtune_adaptive.core import StepOptions
from torchtune_adaptive.core.ranks import reduction
from torchtune_adaptive.core.ranks.ddp_buckets import DdpBuckets


def wrong_bits_beside(names: list[str]) -> list[str]:
    """As ``wrong_bits``, with gradients beside the buckets."""
    with mock.patch.object(reduction, "Buckets", DdpBuckets):
        return wrong_bits(names)


@pytest.mark.ranks
def test_weights_are_those_of_ddp_to_the_bit() -> None:
    assert run_ranks(wrong_bits_beside, 2, [*MODELS]) == [[], []]


def places_and_launches() -> tuple[bool, int, list[int]]:
    """Whether no gradient lies in a bucket, in a step whose options say so; the number of buckets; how many
    are launched in each micro-batch, and after the last."""
    run = Run()
    options = StepOptions(gradients_in_buckets=False)
    step = replace(run.step.train_step, options=options)
    buckets = {each.untyped_storage().data_ptr() for each in step.buckets}
    launched, watch = [0], step.collectives.watch

    def counting(launch: Any) -> Any:
        launched[-1] += 1
        return watch(launch)

    step.collectives.watch = counting  # type: ignore[method-assign]
    apart = True
    for number, batch in enumerate(rows(), 1):
        step.forward_backward(torch.stack([batch]), last=number == ROWS)
        of_parameters = (p.grad for p in run.module.parameters() if p.grad is not None)
        apart &= buckets.isdisjoint(each.untyped_storage().data_ptr() for each in of_parameters)
        launched.append(0)
    step.apply()
    return apart, len(buckets), launched


@pytest.mark.ranks
def test_gradients_lie_beside_buckets_and_the_last_micro_batch_reduces_them() -> None:
    for apart, buckets, launched in run_ranks(places_and_launches, 2):
        assert apart and buckets > 1
        assert launched[:ROWS] == [0] * (ROWS - 1) + [buckets]
