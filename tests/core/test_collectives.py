"""Which collectives have been launched: when a failure comes between several, and besides those of FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.counting import counted_launches, fail_in_backward
from tests.helpers.ranks import Alone
from torchtune_adaptive import UsageError
from torchtune_adaptive.core.ranks.collectives import Collectives, _Open
from torchtune_adaptive.core.ranks.fsdp import Collective
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


def test_each_variant_of_the_models_has_its_own_sequence() -> None:
    collectives = Collectives([], Alone(2), torch.device("cpu"))  # type: ignore[arg-type]

    def recording(variant: str) -> bool:
        collectives.variant = variant
        collectives.begin_pass()
        recording = collectives.recording
        collectives.end_pass()
        return recording

    assert [recording(one) for one in "aabba"] == [True, True, True, True, False]


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


class Recorded:
    """A pass of two phases, in which groups launch what FSDP announces and what the model does besides."""

    def __init__(self) -> None:
        self.collectives = Collectives([nn.Identity()], Alone(2), torch.device("cpu"))
        self.shards, self.replicas = self.groups = Group(7), Group(3)
        self.collectives._unseen._groups = {*self.groups}  # type: ignore[arg-type]

    def of_fsdp(self, group: Group, *then: Group) -> None:
        def launch() -> None:
            group.launched += 1

        called = [
            Collective(print, 1, 1, torch.float32, each)  # type: ignore[arg-type]
            for each in (group, *then)
        ]
        self.collectives._watch(launch, called)
        for each in then:
            each.launched += 1

    def run(self, before: int = 0, after: int = 0, between: int = 0) -> bool:
        """The pass, with launches of the model's own before and after those of FSDP, and between phases."""
        self.collectives.begin_pass()
        self.collectives.begin_phase("forward")
        self.shards.launched += before
        self.of_fsdp(self.shards)
        self.of_fsdp(self.shards, self.replicas)
        self.replicas.launched += after
        self.collectives.end_phase()
        self.shards.launched += between
        self.collectives.begin_phase("backward")
        self.collectives.end_phase()
        return self.collectives.end_pass()


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_only_the_groups_have_seen_is_refused_while_recording(place: str) -> None:
    recorded = Recorded()
    assert recorded.run()
    with pytest.raises(UsageError, match="launches collectives of its own"):
        recorded.run(**{place: 1})


def test_what_the_step_launches_between_phases_is_its_own() -> None:
    recorded = Recorded()
    assert recorded.run(between=1) and recorded.run(between=1)
    assert not recorded.collectives.recording


def test_once_the_sequence_is_certain_nobody_looks() -> None:
    recorded = Recorded()
    assert recorded.run() and recorded.run()
    recorded.collectives._unseen._groups = None  # type: ignore[assignment]
    recorded.collectives._unseen._expected = None  # type: ignore[assignment]
    assert recorded.run()


def test_where_groups_do_not_count_nothing_is_refused() -> None:
    recorded = Recorded()
    recorded.collectives._unseen._groups = {Uncounted()}  # type: ignore[arg-type]
    assert recorded.run(before=1, after=1)


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
