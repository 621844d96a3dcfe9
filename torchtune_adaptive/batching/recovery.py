"""The micro-batch of the next step: smaller after running out of memory, larger again after a while without.

Every rank has its own copy and gives it the same input, so all ranks decide the same without communicating.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Recovery:
    """The size of the micro-batch during training.

    Args:
        size: the initial size, and the largest.
        candidates: sizes that it may shrink to.
        calm_steps: steps without trouble after which a size that failed is tried again; None: never.
    """

    def __init__(self, size: int, candidates: Iterable[int], calm_steps: int | None) -> None:
        self.size = size
        self._candidates = sorted(candidates)
        self._calm_steps = calm_steps
        self._wait = calm_steps
        self._given_up: list[int] = []  # the latest last
        self._calm = 0
        self._on_trial = False  # grown back, but not yet for the whole wait
        self._retried = False  # in the last step
        self.waited = 0
        """Steps without trouble before the size last grew back."""

    def shrink(self) -> bool:
        """Shrink to at most half the size. Since each failure halves, there are few in a row.

        Returns:
            False if there is no smaller size.
        """
        smaller = [size for size in self._candidates if 2 * size <= self.size]
        if not smaller:
            return False
        if self._on_trial and self._wait is not None:
            self._wait *= 2
        self._given_up.append(self.size)
        self.size = smaller[-1]
        self._calm, self._on_trial = 0, False
        return True

    def is_thrashing(self, retries: int) -> bool:
        """Whether this is the second step in a row with allocation retries.

        One retry is the price of a row longer than those before. Retries in every step mean that the device
        spends its time freeing memory and allocating it again.
        """
        thrashing = self._retried and retries > 0
        self._retried = retries > 0 and not thrashing
        return thrashing

    def grow_back(self) -> bool:
        """Count a good step; return whether the size that failed last is tried again from now on."""
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
        self.size = self._given_up.pop()
        self._calm, self._on_trial = 0, True
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "given_up": list(self._given_up),
            "wait": self._wait,
            "calm": self._calm,
            "on_trial": self._on_trial,
            "retried": self._retried,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, unless the sizes in it are not those of this run."""
        if max([state["size"], *state["given_up"]]) != self.size:
            return
        self.size, self._given_up = state["size"], list(state["given_up"])
        self._calm, self._on_trial = state["calm"], state["on_trial"]
        self._retried = state["retried"]
        if self._wait is not None and state["wait"] is not None:
            self._wait = state["wait"]
