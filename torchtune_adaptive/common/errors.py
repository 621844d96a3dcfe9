"""Everything this package raises on purpose.

    AdaptiveBatchingError
    |-- ConfigError            a setting that cannot work, found before any model is built
    |-- UsageError             a model, optimizer or function that the library interface cannot work with
    |-- UnsupportedVersion     a library version that this release does not support
    |-- NothingFits            not even one row fits on the device
    |-- EmptyTrial             a trial in which no token was trained on, so it shows nothing
    |-- NothingToLearn         no row of the data has a label that is trained on
    |-- BatchIncreaseError     the batch cannot grow as asked, or cannot be shared by the ranks
    |-- TrainingOutOfMemory    a training step ran out of memory and cannot be retried
    |-- OutOfMemoryElsewhere   memory ran out between steps, so not because of the batch size
    |-- CheckpointError        a checkpoint that cannot be saved or resumed from
    |-- NoPrediction           a run whose memory cannot be predicted, and why
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


class UsageError(AdaptiveBatchingError, ValueError):
    """A model, optimizer or function that the library interface cannot work with."""


class UnsupportedVersion(AdaptiveBatchingError):
    """A library version that this release does not support."""


class NothingFits(AdaptiveBatchingError):
    """Not even one sample fits on the device."""


class EmptyTrial(AdaptiveBatchingError):
    """A trial in which no token was trained on."""


class NothingToLearn(AdaptiveBatchingError):
    """No sample of the data has a label that is trained on."""


class BatchIncreaseError(AdaptiveBatchingError):
    """The batch cannot grow as asked, or cannot be shared by the ranks."""


class TrainingOutOfMemory(AdaptiveBatchingError):
    """A training step ran out of memory and cannot be retried."""


class OutOfMemoryElsewhere(AdaptiveBatchingError):
    """Memory ran out between training steps, e.g. while saving."""


class CheckpointError(AdaptiveBatchingError):
    """A checkpoint that cannot be saved or resumed from."""


class NoPrediction(AdaptiveBatchingError):
    """A run whose memory cannot be predicted."""


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
