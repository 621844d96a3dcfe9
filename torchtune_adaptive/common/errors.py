"""Everything this package raises on purpose. Every message gives the value, the reason and the remedy.

    AdaptiveBatchingError
        ConfigError
        UsageError
            BadReward
        UnsupportedVersion
        NothingFits
        EmptyTrial
        NothingToLearn
        BatchIncreaseError
        TrainingOutOfMemory
        OutOfMemoryElsewhere
        CheckpointError
        NoProgress
        NoPrediction
            ProgramFailed
            NotRemembered
        RankLost
    Stopped

``Stopped`` is a ``KeyboardInterrupt`` and no error. What only this package catches is none of these.
"""

from __future__ import annotations


class AdaptiveBatchingError(Exception):
    """Base class: catch this to catch everything this package raises on purpose."""

    everywhere = True
    """Whether all ranks raise it, for the same reason."""
    repeats = False
    """Whether the same command would raise it again, so that a restart is in vain."""


class ConfigError(AdaptiveBatchingError, ValueError):
    """A setting that cannot work, found before any model is built."""

    repeats = True

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        self.key = key
        self.value = value
        end = "" if remedy.endswith("?") else "."
        super().__init__(f"{key}: {value!r} {reason}. {remedy}{end}")


class UsageError(AdaptiveBatchingError, ValueError):
    """A model, optimizer or function that the library interface cannot work with."""

    repeats = True


class UnsupportedVersion(AdaptiveBatchingError):
    """A library version that this release does not support."""

    repeats = True


class NothingFits(AdaptiveBatchingError):
    """Not even one row fits on the device."""


class EmptyTrial(AdaptiveBatchingError):
    """A trial in which no token was trained on, so it shows nothing."""

    repeats = True


class NothingToLearn(AdaptiveBatchingError):
    """No row of the data has a label that is trained on."""

    repeats = True


class BatchIncreaseError(AdaptiveBatchingError):
    """The batch cannot grow as asked."""

    repeats = True


class TrainingOutOfMemory(AdaptiveBatchingError):
    """A training step ran out of memory and cannot be retried.

    Args:
        message: the reason and the remedy.
        everywhere: whether all ranks know, or only the one that ran out of memory.
    """

    def __init__(self, message: str, everywhere: bool = True) -> None:
        self.everywhere = everywhere
        super().__init__(message)


class OutOfMemoryElsewhere(AdaptiveBatchingError):
    """Memory ran out between training steps, e.g. while saving, so not because of the batch size."""

    everywhere = False


class CheckpointError(AdaptiveBatchingError):
    """A checkpoint that cannot be saved or resumed from."""


class NoProgress(AdaptiveBatchingError):
    """A run that was started again and again, and came no further."""

    repeats = True


class NoPrediction(AdaptiveBatchingError):
    """A run whose memory cannot be predicted, and why."""


class RankLost(AdaptiveBatchingError, RuntimeError):
    """Another rank died, hung, or stopped answering."""

    everywhere = False


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, by SIGTERM or Ctrl-C. No error, so no ``except Exception`` catches it.

    ``everywhere`` is whether all ranks say the same.
    """

    def __init__(self, message: str, status: int, everywhere: bool = False) -> None:
        self.status = status
        self.everywhere = everywhere
        super().__init__(message)
