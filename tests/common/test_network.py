"""The network that gloo uses is the one that NCCL was told to use."""

from __future__ import annotations

import os

import pytest

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.common.network import gloo_interface
from torchtune_adaptive.core.ranks.agreement import Ranks

INTERFACES = ["lo", "docker0", "eth0", "eth1", "ib0"]


@pytest.mark.parametrize(
    ("nccl", "gloo"),
    [
        ("eth", "eth0"),
        ("eth1", "eth1"),
        ("ib,eth", "eth0"),
        ("=eth1", "eth1"),
        ("=eth", None),
        ("^docker", "eth0"),
        ("^docker,eth", "ib0"),
        ("^=docker0,eth0", "eth1"),
        ("wlan", None),
        ("lo", "lo"),
    ],
)
def test_gloo_takes_the_first_interface_that_nccl_may_use(nccl: str, gloo: str | None) -> None:
    assert gloo_interface(nccl, INTERFACES) == gloo


def agree_beside_nccl() -> tuple[str | None, list[int]]:
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    ranks = Ranks(timeout=200)
    return os.environ.get("GLOO_SOCKET_IFNAME"), ranks.gather(ranks.rank)


@pytest.mark.ranks
def test_ranks_agree_over_the_interface_of_nccl() -> None:
    assert run_ranks(agree_beside_nccl, 2) == [("lo", [0, 1])] * 2
