"""Which micro-batch the next step uses: smaller after trouble, larger again after a calm stretch.

Every rank holds one of these and is told the same, so all ranks decide the same without asking.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Recovery:
    """The size of the micro-batch during training.

    Args:
        size: what training starts with, and never goes above.
        candidates: sizes that it may shrink to.
        calm_steps: steps without trouble after which a size that failed is tried again; never, if None.
    """

    def __init__(self, size: int, candidates: Iterable[int], calm_steps: int | None) -> None:
        self.size = size
        self._candidates = sorted(candidates)
        self._calm_steps = calm_steps
        self._wait = calm_steps
        self._given_up: list[int] = []  # the latest last
        self._calm = 0
        self._on_trial = False  # grown back, and not yet for a whole calm stretch
        self._retried = False  # in the last step
        self.waited = 0
        """Steps without trouble before the size last grew back."""

    def shrink(self) -> bool:
        """Memory ran out: go on with at most half. Each failure halves, so there are few in a row.

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
        """Told how often the allocator had to retry in a step: whether it is the second such in a row.

        One retry is the price of a row longer than those before. One in every step means that the device
        spends its time giving memory back and asking for it again.
        """
        thrashing = self._retried and retries > 0
        self._retried = retries > 0 and not thrashing
        return thrashing

    def grow_back(self) -> bool:
        """Called after each good step: whether the size that failed last is tried again from here on."""
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
        """Go on where ``state_dict`` was called, unless that was above what this run begins with."""
        if max([state["size"], *state["given_up"]]) != self.size:
            return
        self.size, self._given_up = state["size"], list(state["given_up"])
        self._calm, self._on_trial = state["calm"], state["on_trial"]
        self._retried = state["retried"]
        if self._wait is not None and state["wait"] is not None:
            self._wait = state["wait"]
