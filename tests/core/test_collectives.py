"""Which collectives have been launched when a failure comes in the middle of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.counting import counted_launches, fail_in_backward
from torchtune_adaptive.core.ranks.collectives import _Open
from torchtune_adaptive.core.step.gradients import drop_unfinished


class Group:
    """A process group that has launched some collectives."""

    def __init__(self, launched: int) -> None:
        self.launched = launched

    def _get_sequence_number_for_group(self) -> int:
        return self.launched


class Uncounted:
    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("Backend staging does not yet support sequence numbers.")


@pytest.mark.parametrize("launched", [0, 1, 2])
def test_groups_tell_how_many_they_have_launched(launched: int) -> None:
    shards, replicas = groups = Group(7), Group(0)
    being_launched = _Open(2, groups)  # type: ignore[arg-type]
    shards.launched += launched >= 1
    replicas.launched += launched >= 2
    assert being_launched.launched() == launched


def test_without_a_count_what_raised_is_taken_to_have_waited() -> None:
    groups: Any = [Uncounted(), Uncounted()]
    being_launched = _Open(2, groups)
    assert being_launched.launched() == 1
    being_launched.returned = True
    assert being_launched.launched() == 2


def test_beyond_the_recorded_sequence_all_count() -> None:
    assert _Open(2).launched() == 2
    assert _Open().launched() == 0


def test_gloo_counts_each_collective_once() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert counted_launches("cpu") == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
    finally:
        dist.destroy_process_group()


def test_nothing_is_left_of_a_backward_pass_that_failed() -> None:
    alive = fail_in_backward("cpu")
    assert alive() > 0, "or there is nothing to show"
    drop_unfinished(torch.device("cpu"))
    assert alive() == 0
