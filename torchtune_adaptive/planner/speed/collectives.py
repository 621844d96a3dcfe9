"""The time of a collective, done in that way of NCCL's which is the quickest.

NCCL chooses between algorithms and protocols by a model of what each takes: a time to begin, the hops that
follow each other, and a share of the bandwidth. Those used here are of its ``tuning.cc`` (2.23 to 2.27):

- a *ring*, for all: one hop after the other to every rank. Its protocol *LL128* has shorter hops, for 0.92 of
  the bandwidth; it needs NVLink within the nodes.
- a *tree*, for an all-reduce: a chain within each node, and between nodes as many hops as doublings of their
  number. It goes up and down again.
- *PAT* (since 2.23), for an all-gather of ranks that have a node each: fewer hops, for 0.75 of the bandwidth.
  It does reduce-scatters as well, but only those that add; FSDP's, which divide, go around a ring.

Left out are what needs other switches (SHARP) and the protocol LL, which is for some kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from torchtune_adaptive.planner.speed.devices import Speeds

KERNEL_START = 1.6e-6
"""Seconds from a launch to the first instruction of a collective's kernel."""
BEGIN, BEGIN_LL128, BEGIN_PAT = 8.4e-6, 14e-6, 8e-6
"""Seconds that a collective takes to begin."""
NVLINK_HOP, PCIE_HOP, NETWORK_HOP = 3.4e-6, 5.7e-6, 14e-6
"""Seconds from a rank to the next in a ring, by the simple protocol."""
NVLINK_HOP_LL128, NETWORK_HOP_LL128, ALONE_HOP_LL128 = 1.9e-6, 4e-6, 8.5e-6
"""The same by LL128; the last between ranks that have a node each, where nothing else hides it."""
TREE_HOP, TREE_HOP_LL128, TREE_NETWORK_HOP_LL128 = 4e-6, 1.25e-6, 8.5e-6
"""Seconds from a rank to the next in a tree: within a node by the simple protocol and by LL128, and between
nodes by LL128. By the simple one that is as in a ring."""
PAT_HOP, PAT_RANK = NETWORK_HOP / 3.5, 2.8e-6
"""Seconds of each doubling of the number of ranks in PAT, and of each rank, for which it still does work."""
OF_LL128, OF_TREE, OF_PAT = 0.92, 0.92, 0.75
"""Shares of the bandwidth."""
SHORT, OF_SHORT_TREE = 64e6, 0.6
"""Bytes up to which a tree is not full, and the share that it reaches of what it does otherwise. NCCL has a
table, with 0.5 to 0.8 from 32 kB to 64 MB."""


def seconds(name: str, nbytes: float, ranks: int, distance: int, speeds: Speeds) -> float:
    """The time of a collective of this name among so many ranks, each so far from the next."""
    if ranks == 1:
        return 0.0
    return KERNEL_START + min(_ways(name, nbytes, ranks, distance, speeds))


def _ways(name: str, nbytes: float, ranks: int, distance: int, speeds: Speeds) -> Iterator[float]:
    reduces_all = name.startswith(("allreduce", "all_reduce"))
    in_node = speeds.ranks_in_a_node(ranks, distance)
    nodes = -(-ranks // in_node)
    bandwidth = speeds.collective_bandwidth(ranks, distance)
    passes = 2 if reduces_all else 1
    around = passes * nbytes * (ranks - 1) / ranks / bandwidth

    def ring(within: float, between: float) -> float:
        return passes * ((ranks - nodes) * within + (nodes - 1) * between)

    def tree(within: float, between: float) -> float:
        return 2 * ((in_node - 1) * within + log2(nodes) * between)

    yield BEGIN + ring(NVLINK_HOP if speeds.has_nvlink else PCIE_HOP, NETWORK_HOP) + around
    if speeds.is_host:
        return
    has_ll128 = speeds.has_nvlink
    if has_ll128:
        between = NETWORK_HOP_LL128 if in_node > 1 else ALONE_HOP_LL128
        yield BEGIN_LL128 + ring(NVLINK_HOP_LL128, between) + around / OF_LL128
    if nodes == 1:
        return
    if reduces_all:
        up_and_down = 2 * nbytes / bandwidth / OF_TREE
        up_and_down /= OF_SHORT_TREE if nbytes < SHORT else 1.0
        yield BEGIN + tree(TREE_HOP, NETWORK_HOP) + up_and_down
        if has_ll128:
            hops = tree(TREE_HOP_LL128, TREE_NETWORK_HOP_LL128)
            yield BEGIN_LL128 + hops + up_and_down / OF_LL128
    elif in_node == 1 and name.startswith(("allgather", "_allgather", "all_gather")):
        yield BEGIN_PAT + log2(ranks) * PAT_HOP + ranks * PAT_RANK + around / OF_PAT
