"""Which GPUs each attempt of an elastic run is started on: those that work and do not fail repeatedly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtune_adaptive.common import ConfigError

FAILURES = 2
"""So many times in a row a GPU's rank is the first to fail or to be lost until the GPU is left out."""


@dataclass
class Devices:
    """The GPUs of a run, in order; or, on the CPU, the places of its ranks."""

    names: Sequence[str]
    least: int
    """The fewest that a run may be started on."""
    _last: str | None = None
    _in_a_row: int = 0
    _left_out: set[str] = field(default_factory=set)

    def chosen(self, working: Iterable[str]) -> list[str]:
        """Those to start on, of those that work.

        A GPU that works and has failed is only under suspicion: it is taken if there would be too few.

        Raises:
            ConfigError: too few work.
        """
        works = set(working)
        found = [name for name in self.names if name in works]
        if len(found) < self.least:
            raise ConfigError(
                "--nproc_per_node",
                f"{self.least}:{len(self.names)}",
                f"asks for {self.least} GPUs or more, and {len(found)} work",
                "Lower the first number, or see what nvidia-smi says of the others",
            )
        trusted = [name for name in found if name not in self._left_out]
        return trusted if len(trusted) >= self.least else found

    def failed(self, name: str) -> bool:
        """Count that the rank of this one was the first to fail, or lost; whether it is left out now."""
        self._in_a_row = self._in_a_row + 1 if name == self._last else 1
        self._last = name
        if self._in_a_row < FAILURES or name in self._left_out:
            return False
        self._left_out.add(name)
        return True


def bounds(given: str) -> tuple[int, str]:
    """The fewest ranks and the most, of ``MIN:MAX`` or of ``MAX`` alone, which may be a word.

    Raises:
        ConfigError: the fewest are not a number, or none.
    """
    least, colon, most = given.rpartition(":")
    if not colon:
        return 1, most
    if not least.isdecimal() or int(least) < 1 or not most:
        raise ConfigError(
            "--nproc_per_node", given, "is not MIN:MAX", "Write two numbers, as in 2:8"
        )
    return int(least), most
