"""A permutation of any number of rows that takes no memory and no time to make.

It is a Feistel network. A number is two halves of as many bits, and each round adds to one half, bit by bit,
a hash of the other one. Whatever the hash is, a round can be undone, so no two numbers become the same. The
network permutes all numbers of an even number of bits. Those that are no rows pass through it again until
they are: a cycle of the network leads back to where it began, so rows remain a permutation. But for the
smallest data there are less than four times as many numbers as rows, so a row takes fewer than four passes on
average.

A place becomes the same row on every machine and with every version: nothing here draws from a generator of
random numbers, whose numbers may change with a library.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_FEWEST_BITS = 3  # of a half: with fewer, some orders of 4 rows are much more frequent than others
Numbers: TypeAlias = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of the numbers below ``size``, given by a key.

    Args:
        size: how many numbers there are, fewer than 2^62.
        key: numbers; with any other ones the permutation is another.
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 0 < size < 1 << 62:
            raise ValueError(f"size: {size} is not between 1 and 2^62")
        half = max(_FEWEST_BITS, -(-(size - 1).bit_length() // 2))
        self._size, self._half = np.uint64(size), np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        text = " ".join(map(str, (size, *key)))
        digest = blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, places: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The numbers at some places."""
        numbers = self._pass(np.atleast_1d(np.asarray(places, dtype=np.uint64)))
        (outside,) = np.nonzero(numbers >= self._size)
        while len(outside):
            numbers[outside] = again = self._pass(numbers[outside])
            outside = outside[again >= self._size]
        return numbers.astype(np.int64)

    def _pass(self, numbers: Numbers) -> Numbers:
        """Pass numbers through the network once."""
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right + key) & self._mask)
        return (left << self._half) | right


def mixed(numbers: Numbers) -> Numbers:
    """Numbers of which each bit depends on all bits of those given: the last steps of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
