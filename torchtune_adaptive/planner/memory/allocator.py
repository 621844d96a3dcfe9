"""A model of torch's CUDA caching allocator: how much memory a sequence of allocations reserves.

The allocator keeps the memory that it has got from the device and hands out blocks of it. So what runs out is
not what tensors hold (*allocated*) but what the allocator holds (*reserved*), and the two can be gigabytes
apart. The rules are those of torch 2.13 with default settings:

- A size is rounded up to 512 bytes. Up to 1 MiB it is *small*. Small and large blocks come from separate
  pools, and each stream has its own: memory freed on one stream is never reused on another.
- The smallest free block that is large enough is taken; among equals, the one at the lowest address. The
  remainder becomes a free block if it is large enough: at least 512 bytes of a small block, more than 1 MiB
  of a large one. So a large tensor may occupy up to 1 MiB more than requested, which counts as allocated.
- If there is no such block, a segment is requested from the device: 2 MiB for small blocks, 20 MiB for large
  blocks below 10 MiB, and the size itself in units of 2 MiB from there on.
- A freed block merges with its free neighbors in the segment.
- With *expandable segments* each pool is one segment that grows at its end by pages of 2 MiB or 20 MiB, and
  every remainder is split off. The free block at its end is taken only if no other is large enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB

OWN_SEGMENT = 10 * MIB
"""Bytes from which on a block gets its own segment."""
BESIDE = -1
"""The stream of what another library gets from the device by itself, beside the allocator."""
Pool = tuple[int, bool]  # stream, whether small


class MemoryBlock:
    """A piece of a segment, in use or free, between its neighbors."""

    __slots__ = ("address", "before", "behind", "free", "pool", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free = False
        self.before: MemoryBlock | None = None
        self.behind: MemoryBlock | None = None


class Allocator:
    """The caching allocator of one device, in numbers. It gets all that it asks for: how much that is tells
    whether a sequence fits."""

    def __init__(self, expandable: bool = False) -> None:
        self._expandable = expandable
        # Sorted: in the order in which free blocks are taken. Addresses differ, so blocks are never compared.
        self._free: dict[Pool, list[tuple[int, int, MemoryBlock]]] = {}
        self._last: dict[Pool, MemoryBlock] = {}  # of each expandable segment
        self._next_address = 0
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0

    def allocate(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """A block of at least ``nbytes``."""
        size = max(UNIT, -(-nbytes // UNIT) * UNIT)
        pool = (stream, size <= LARGEST_SMALL)
        block = self._take(pool, size) or self._reserve(pool, size)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Release a block."""
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            self._forget(block.before)
            block = self._merge(block.before, block)
        if block.behind is not None and block.behind.free:
            self._forget(block.behind)
            block = self._merge(block, block.behind)
        self._remember(block)

    def release(self) -> None:
        """Return segments without a block in use to the device (``empty_cache``)."""
        for blocks in self._free.values():
            for _, _, block in list(blocks):
                if self._expandable:
                    self._shrink(block)
                elif block.before is None and block.behind is None:
                    self._forget(block)
                    self.reserved -= block.size

    def watch(self) -> None:
        """Reset the peaks."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _take(self, pool: Pool, size: int) -> MemoryBlock | None:
        blocks = self._free.get(pool)
        if not blocks:
            return None
        at = bisect_left(blocks, (size,))
        if at + 1 < len(blocks) and blocks[at][2] is self._last.get(pool):
            at += 1  # the end of an expandable segment is left to what fits nowhere else
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _reserve(self, pool: Pool, size: int) -> MemoryBlock:
        _, small = pool
        last = self._last.get(pool)
        at_hand = last.size if last is not None and last.free else 0
        if self._expandable:
            page = SMALL_SEGMENT if small else LARGE_SEGMENT
            extra = -(-(size - at_hand) // page) * page
        elif small:
            extra = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            extra = LARGE_SEGMENT
        else:
            extra = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.request(extra)
        if not self._expandable:
            self._next_address += extra
            return MemoryBlock(pool, self._next_address - extra, extra)
        return self._grow(pool, last, extra)

    def request(self, nbytes: int) -> None:
        """Get memory from the device."""
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _grow(self, pool: Pool, last: MemoryBlock | None, extra: int) -> MemoryBlock:
        """Add pages at the end of an expandable segment; a free block there grows with it."""
        if last is not None and last.free:
            self._forget(last)
            last.size += extra
            return last
        block = MemoryBlock(pool, last.address + last.size if last is not None else 0, extra)
        self._link(last, block)
        self._last[pool] = block
        return block

    def _shrink(self, block: MemoryBlock) -> None:
        """Return whole pages at the end of an expandable segment. torch also returns those in its middle, so
        after that this model overestimates."""
        if block is not self._last.get(block.pool):
            return
        page = SMALL_SEGMENT if block.pool[1] else LARGE_SEGMENT
        kept = -block.address % page
        if block.size < kept:
            return
        self._forget(block)
        self.reserved -= block.size - kept
        block.size = kept
        if kept:
            self._remember(block)
        elif block.before is not None:
            self._last[block.pool] = block.before
            block.before.behind = None
        else:
            del self._last[block.pool]

    def _split(self, block: MemoryBlock, size: int) -> None:
        left = block.size - size
        if not (left >= UNIT if block.pool[1] or self._expandable else left > LARGEST_SMALL):
            return
        rest = MemoryBlock(block.pool, block.address + size, left)
        block.size = size
        self._link(rest, block.behind)
        self._link(block, rest)
        if self._last.get(block.pool) is block:
            self._last[block.pool] = rest
        self._remember(rest)

    def _merge(self, left: MemoryBlock, right: MemoryBlock) -> MemoryBlock:
        left.size += right.size
        left.behind = right.behind
        if right.behind is not None:
            right.behind.before = left
        if self._last.get(left.pool) is right:
            self._last[left.pool] = left
        return left

    @staticmethod
    def _link(left: MemoryBlock | None, right: MemoryBlock | None) -> None:
        if left is not None:
            left.behind = right
        if right is not None:
            right.before = left

    def _remember(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))

    def _forget(self, block: MemoryBlock) -> None:
        blocks = self._free[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.address))]


class OutOfMemory(Exception):
    """There is no block, and no room for another, even after cached segments are returned."""


class LimitedAllocator(Allocator):
    """One whose device runs out: then it returns all segments without a block in use, as torch's does, and
    asks once more (an *allocation retry*, which costs time)."""

    def __init__(self, capacity: int, expandable: bool = False) -> None:
        super().__init__(expandable)
        self.capacity = capacity
        self.retries = 0

    def allocate(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        try:
            return super().allocate(nbytes, stream)
        except OutOfMemory:
            self.retries += 1
            self.release()
        return super().allocate(nbytes, stream)

    def watch(self) -> None:
        super().watch()
        self.retries = 0

    def request(self, nbytes: int) -> None:
        if self.reserved + nbytes > self.capacity:
            held = f"{self.reserved:,} of {self.capacity:,} reserved"
            raise OutOfMemory(f"{nbytes:,} bytes, with {held}")
        super().request(nbytes)
