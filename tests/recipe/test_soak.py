"""A run that is disturbed at random learns what it would have learned; see ``tests.helpers.soak``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.soak import soak

pytestmark = pytest.mark.runs


def test_a_run_that_is_disturbed_learns_the_same(
    tmp_path: Path, exhaustive: bool, shard: int
) -> None:
    """Once or twice, in other ways with each shard, which is the seed."""
    compared = soak(shard, tmp_path, epochs=1, disturbances=2 if exhaustive else 1)
    assert compared.loss < 5e-6 and compared.weight < 1e-5, compared


@pytest.mark.exhaustive
def test_a_run_that_is_disturbed_at_random_learns_the_same(tmp_path: Path) -> None:
    compared = soak(random.randrange(10**6), tmp_path, epochs=2)
    assert compared.loss < 5e-6 and compared.weight < 1e-5, compared
