"""The replay of the caching allocator: sequences that were worked out by hand, one for each rule."""

from __future__ import annotations

import itertools
import random

import pytest

from torchtune_adaptive.planner.memory.allocator import (
    KIB,
    MIB,
    Allocator,
    LimitedAllocator,
    OutOfMemory,
)

BOTH = pytest.mark.parametrize("expandable", [False, True])


@BOTH
def test_sizes_are_rounded_up_to_512_bytes(expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    for nbytes, size in ((0, 512), (1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)):
        assert allocator.allocate(nbytes).size == size


@BOTH
def test_small_blocks_share_a_segment_of_2_mib(expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    for _ in range(2):
        allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_small_and_large_blocks_never_share() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved == 32 * MIB


def test_large_blocks_below_10_mib_share_a_segment_of_20_mib() -> None:
    allocator = Allocator()
    allocator.allocate(MIB + 1)
    assert (allocator.allocated, allocator.reserved) == (MIB + 512, 20 * MIB)
    allocator.allocate(10 * MIB - 512)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(9 * MIB + 1)  # 9 MiB are left
    assert allocator.reserved == 40 * MIB


def test_from_10_mib_on_a_block_has_a_segment_in_units_of_2_mib() -> None:
    allocator = Allocator()
    allocator.allocate(10 * MIB)
    assert allocator.reserved == 10 * MIB
    allocator.allocate(10 * MIB + 1)
    assert allocator.reserved == 22 * MIB


def test_a_remainder_of_up_to_1_mib_stays_with_its_large_block() -> None:
    allocator = Allocator()
    assert allocator.allocate(11 * MIB + 1).size == 12 * MIB
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    assert allocator.allocate(11 * MIB - 512).size == 11 * MIB - 512  # 1 MiB and a unit: split off


def test_expandable_segments_split_every_remainder() -> None:
    allocator = Allocator(expandable=True)
    assert allocator.allocate(11 * MIB + 1).size == 11 * MIB + 512
    assert allocator.reserved == 20 * MIB


@BOTH
def test_streams_never_share(expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    allocator.free(allocator.allocate(20 * MIB, stream=1))
    allocator.allocate(20 * MIB, stream=2)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(25 * MIB).address == small.address
    assert allocator.allocate(25 * MIB).address == large.address
    assert allocator.reserved == 70 * MIB


def test_among_blocks_of_one_size_the_lowest_address_is_taken() -> None:
    allocator = Allocator()
    low, high = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(high)
    allocator.free(low)
    assert allocator.allocate(30 * MIB) is low


@BOTH
def test_freed_neighbours_become_one_block(expandable: bool) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        allocator = Allocator(expandable=expandable)
        blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
        assert allocator.reserved == 20 * MIB
        for index in order:
            allocator.free(blocks[index])
        assert allocator.allocated == 0
        allocator.allocate(20 * MIB)
        assert allocator.reserved == 20 * MIB


def test_a_hole_is_too_small_for_a_larger_block() -> None:
    """Fragmentation: 20 MiB are free, and not in one piece."""
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(8 * MIB)
    assert (allocator.allocated, allocator.reserved) == (28 * MIB, 60 * MIB)


def test_an_expandable_segment_grows_the_free_block_at_its_end() -> None:
    allocator = Allocator(expandable=True)
    first = allocator.allocate(11 * MIB)  # 9 MiB are left of 20
    allocator.allocate(30 * MIB)  # 21 MiB more: two pages
    assert allocator.reserved == 60 * MIB
    allocator.free(first)
    assert allocator.allocate(5 * MIB).address == 0
    assert allocator.reserved == 60 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = Allocator(expandable=True)
    hole = allocator.allocate(12 * MIB)
    allocator.allocate(2 * MIB)  # 6 MiB are left at the end
    allocator.free(hole)
    assert allocator.allocate(5 * MIB).address == 0  # of the 12 MiB
    assert allocator.allocate(7 * MIB).address == 5 * MIB
    assert allocator.allocate(5 * MIB).address == 14 * MIB
    assert allocator.reserved == 20 * MIB


def test_cached_segments_are_given_back_before_memory_is_out() -> None:
    allocator = LimitedAllocator(50 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 40 * MIB)
    with pytest.raises(OutOfMemory, match=r"20,971,520 bytes, with 41,943,040 of 52,428,800"):
        allocator.allocate(20 * MIB)


def test_expandable_pages_are_given_back_before_memory_is_out() -> None:
    allocator = LimitedAllocator(60 * MIB, expandable=True)
    kept = allocator.allocate(5 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    assert allocator.reserved == 40 * MIB
    allocator.allocate(30 * MIB, stream=1)  # two pages, and one can be given back
    assert (allocator.retries, allocator.reserved) == (1, 60 * MIB)
    allocator.free(kept)
    assert allocator.allocate(20 * MIB).address == 0


def test_a_segment_with_a_block_in_use_is_kept() -> None:
    allocator = Allocator()
    kept, freed = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.free(freed)
    allocator.release()
    assert allocator.reserved == 20 * MIB
    allocator.free(kept)
    allocator.release()
    assert allocator.reserved == 0


def test_watching_starts_peaks_anew() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MIB, 30 * MIB)
    allocator.release()
    allocator.watch()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (0, 0)


@BOTH
def test_nothing_is_lost_in_ten_thousand_random_steps(expandable: bool) -> None:
    choose = random.Random(0)
    allocator, live = Allocator(expandable=expandable), []
    for _ in range(10_000):
        if live and choose.random() < 0.5:
            allocator.free(live.pop(choose.randrange(len(live))))
        else:
            nbytes = int(2 ** choose.uniform(6, 26))
            live.append(allocator.allocate(nbytes, stream=choose.randrange(3)))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
        if choose.random() < 0.01:
            allocator.release()
    spans = sorted((b.pool if expandable else 0, b.address, b.size) for b in live)
    for (pool, address, size), (other, following, _) in itertools.pairwise(spans):
        assert pool != other or address + size <= following
    for block in live:
        allocator.free(block)
    allocator.release()
    assert allocator.allocated == allocator.reserved == 0
    assert allocator.peak_reserved > 100 * KIB
