"""Everything this package raises on purpose.

    AdaptiveBatchingError
    |-- ConfigError            a setting that cannot work, found before any model is built
    |-- UnsupportedVersion     a library version that this release was not made for
    |-- NothingFits            not even one row fits on the device
    |-- EmptyTrial             a trial that trained nothing, so its verdict would be worthless
    |-- BatchIncreaseError     the batch cannot grow as asked, or cannot be shared by the ranks
    |-- TrainingOutOfMemory    memory ran out in a training step, and it cannot be redone
    |-- OutOfMemoryElsewhere   memory ran out between steps: the batch size is not to blame
    |-- CheckpointError        a checkpoint that cannot be saved or resumed from
    |-- NoPrediction           a run whose memory cannot be told ahead, and why
    `-- RankLost               another rank died, hung, or stopped answering

Every message gives the value, the reason and the remedy.
"""

from __future__ import annotations


class AdaptiveBatchingError(Exception):
    """Base class: catch this to catch everything this package raises on purpose."""


class ConfigError(AdaptiveBatchingError, ValueError):
    """A setting that cannot work."""

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        self.key = key
        self.value = value
        end = "" if remedy.endswith("?") else "."
        super().__init__(f"{key}: {value!r} {reason}. {remedy}{end}")


class UnsupportedVersion(AdaptiveBatchingError):
    """A library version that this release was not made for."""


class NothingFits(AdaptiveBatchingError):
    """Not even one row fits on the device."""


class EmptyTrial(AdaptiveBatchingError):
    """A trial that trained nothing."""


class BatchIncreaseError(AdaptiveBatchingError):
    """The batch cannot grow as asked, or cannot be shared by the ranks."""


class TrainingOutOfMemory(AdaptiveBatchingError):
    """Memory ran out in a training step, and it cannot be redone."""


class OutOfMemoryElsewhere(AdaptiveBatchingError):
    """Memory ran out between training steps, as while saving."""


class CheckpointError(AdaptiveBatchingError):
    """A checkpoint that cannot be saved or resumed from."""


class NoPrediction(AdaptiveBatchingError):
    """A run whose memory cannot be told ahead."""


class RankLost(AdaptiveBatchingError):
    """Another rank died, hung, or stopped answering."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, by SIGTERM or Ctrl-C. No error, so no ``except Exception`` catches it.

    Args:
        message: for the user.
        status: to exit with.
        everywhere: whether all ranks say the same.
    """

    def __init__(self, message: str, status: int, everywhere: bool = False) -> None:
        self.status = status
        self.everywhere = everywhere
        super().__init__(message)
