"""How long ranks wait for each other, and what is said about one that does not answer."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.library import Trained, collate, rows_of
from tests.helpers.ranks import run_ranks
from torchtune_adaptive import RankLost
from torchtune_adaptive.core.ranks import agreement


@pytest.mark.parametrize(
    ("minutes", "compiled", "expected"), [(5, False, 5), (5, True, 60), (90, True, 90)]
)
def test_ranks_wait_as_long_as_the_process_group(
    minutes: int, compiled: bool, expected: int, tmp_path: Path
) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        timeout=timedelta(minutes=minutes),
        rank=0,
        world_size=1,
    )
    try:
        assert agreement._patience(compiled) == timedelta(minutes=expected)
    finally:
        dist.destroy_process_group()


def one_comes_late() -> tuple[timedelta, str]:
    """The time that ranks wait by default, and what is said where they wait for 3 seconds."""
    by_default = Trained("fsdp").step.ranks
    run = Trained("fsdp", timeout=3.0)
    dist.barrier()  # however long it takes to build the other's model
    run.step(rows_of(2), collate, 2)
    if not by_default.is_zero:
        time.sleep(5)
    with pytest.raises(RankLost) as lost:
        run.step(rows_of(2), collate, 2)
    return by_default._patience, str(lost.value)


@pytest.mark.ranks
def test_a_rank_that_comes_too_late_is_named_as_the_reason() -> None:
    [(patience, waiting), (_, late)] = run_ranks(one_comes_late, 2)
    assert patience >= timedelta(minutes=10)  # torch's own
    assert waiting.startswith("timeout: another rank has not answered for 3 s.")
    assert "this one came later than its timeout" in late
