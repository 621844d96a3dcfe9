"""Recovery: after running out of memory, steps take less of it; after a while without, as much as before.

Every rank has its own copy and gives it the same input, so all ranks decide the same without communicating.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def next_wait(waited: float, most: float) -> float:
    """Seconds to wait for memory, after so many, and at most so many in all: as long as all before it."""
    return min(max(1.0, waited), most - waited)


class Recovery:
    """The size of the micro-batch during training, and how much more of a step is computed again in backward.

    Args:
        size: the initial size, and the largest.
        candidates: the sizes that it may shrink to.
        calm_steps: steps without trouble after which what failed is tried again; None: never.
        reliefs: the number of ways to take less memory at the same size, each on top of those before.
    """

    def __init__(
        self, size: int, candidates: Iterable[int], calm_steps: int | None, reliefs: int = 0
    ) -> None:
        self.size = size
        self.relief = 0
        """The number of reliefs in use."""
        self._reliefs = reliefs
        self._candidates = sorted(candidates)
        self._calm_steps = calm_steps
        self._wait = calm_steps
        self._given_up: list[tuple[int, int]] = []  # sizes and reliefs, the latest last
        self._calm = 0
        self._on_trial = False  # grown back, but not yet for the whole wait
        self._retried = False  # in the last step
        self.waited = 0
        """Steps without trouble before what failed was last tried again."""

    def relieve(self) -> bool:
        """Take less memory at the same size, with the same bits; False if every relief is in use."""
        if self.relief == self._reliefs:
            return False
        self._give_up()
        self.relief += 1
        return True

    def shrink(self) -> bool:
        """Shrink to at most half the size, so that few failures can follow each other; False if there is no
        smaller size."""
        smaller = [size for size in self._candidates if 2 * size <= self.size]
        if not smaller:
            return False
        self._give_up()
        self.size = smaller[-1]
        return True

    def drop_reliefs(self) -> bool:
        """Do without reliefs for good, at a size that has not failed without; False if there is none."""
        self._reliefs = self.relief = 0
        without = [(size, relief) for size, relief in self._given_up if not relief]
        self._given_up = [each for each in without if each[0] > self.size]
        return len(self._given_up) == len(without) or self.shrink()

    def _give_up(self) -> None:
        if self._on_trial and self._wait is not None:
            self._wait *= 2
        self._given_up.append((self.size, self.relief))
        self._calm, self._on_trial = 0, False

    def is_thrashing(self, retries: int) -> bool:
        """Whether this is the second step in a row with allocation retries.

        One retry is the price of a row longer than those before. Retries in every step mean that the device
        spends its time freeing memory and allocating it again.
        """
        thrashing = self._retried and retries > 0
        self._retried = retries > 0 and not thrashing
        return thrashing

    def grow_back(self) -> bool:
        """Count a good step; return whether what failed last is tried again from now on."""
        if self._wait is None:
            return False
        self._calm += 1
        if self._calm < self._wait:
            return False
        self.waited = self._wait
        if self._on_trial:  # it held
            self._wait, self._on_trial = self._calm_steps, False
        if not self._given_up:
            return False
        self.size, self.relief = self._given_up.pop()
        self._calm, self._on_trial = 0, True
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "relief": self.relief,
            "given_up": [list(each) for each in self._given_up],
            "wait": self._wait,
            "calm": self._calm,
            "on_trial": self._on_trial,
            "retried": self._retried,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, unless what is in it is not of this run."""
        given_up = [(size, relief) for size, relief in state["given_up"]]
        now = (state["size"], state["relief"])
        if max(size for size, _ in (now, *given_up)) != self.size:
            return
        if max(relief for _, relief in (now, *given_up)) > self._reliefs:
            return
        (self.size, self.relief), self._given_up = now, given_up
        self._calm, self._on_trial = state["calm"], state["on_trial"]
        self._retried = state["retried"]
        if self._wait is not None and state["wait"] is not None:
            self._wait = state["wait"]
