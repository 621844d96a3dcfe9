"""Which collectives have been launched when a failure comes in the middle of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import Alone
from torchtune_adaptive.core.ranks.collectives import Collectives, _Open


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
