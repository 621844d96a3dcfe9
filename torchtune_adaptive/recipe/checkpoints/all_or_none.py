"""Reading and writing files on many ranks: if one of them cannot, none continues, and the reason is given."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchtune_adaptive.common import AdaptiveBatchingError, CheckpointError
from torchtune_adaptive.core import Ranks

T = TypeVar("T")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_SAVE = 24 * 3600.0
"""Seconds that ranks wait for one that writes to a slow disk; a rank that dies is noticed at once."""
_LONGEST_UNDO = 60.0  # seconds to delete the files of a checkpoint


class AllOrNone:
    """What ranks do with files, so that an error on one of them ends all, in the same place.

    They wait for each other as long as a save may take.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def decide(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on every rank; its error as well."""
        decided: T | None = None
        problem: Exception | None = None
        if self.ranks.is_zero:
            try:
                decided = decide()
            except Exception as error:
                problem = error
        expected = isinstance(problem, (AdaptiveBatchingError, OSError))
        said = str(problem) if expected else "Rank 0 failed, and says how."
        with self.ranks.waiting(LONGEST_SAVE):
            failed, said, decided = self.ranks.from_rank_zero((problem is not None, said, decided))
        if not failed:
            return decided  # type: ignore[return-value]
        if problem is not None and not expected:
            raise problem
        raise CheckpointError(said) from problem

    def read(self, read: Callable[[], T], checkpointer: str = "checkpointer") -> T:
        """What every rank reads for itself, with the checkpointer of that key."""
        with self.together(partial(_unreadable, checkpointer), Exception):
            return read()

    @contextmanager
    def together(
        self,
        describe: Callable[[BaseException], str],
        kinds: type[BaseException] | tuple[type[BaseException], ...] = OSError,
    ) -> Iterator[None]:
        """A context in which each rank does its part. At its end, an error of one is raised on all.

        Args:
            describe: gives the text of an error, for all ranks.
            kinds: the errors that a rank may have.

        Raises:
            CheckpointError: with the description of the first.
        """
        problem: BaseException | None = None
        try:
            yield
        except kinds as error:
            problem = error
        self.raise_if_any(problem, describe)

    def raise_if_any(
        self, problem: BaseException | None, describe: Callable[[BaseException], str]
    ) -> None:
        """Raise on all ranks if one of them has a problem.

        Raises:
            CheckpointError: with the description of the first.
        """
        said = self.gather(None if problem is None else describe(problem))
        reasons = [one for one in said if one is not None]
        if reasons:
            raise CheckpointError(reasons[0]) from problem

    @contextmanager
    def undone_by(self, undo: Callable[[], object]) -> Iterator[None]:
        """A context whose work is undone if it fails.

        A ``CheckpointError``, which all ranks have, is raised once that is done on all of them: as soon as
        one ends by it, a launcher ends the others.
        """
        try:
            yield
        except BaseException as error:
            undo()
            if isinstance(error, CheckpointError):
                with suppress(AdaptiveBatchingError), self.ranks.waiting(_LONGEST_UNDO):
                    self.ranks.gather(None)
            raise

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        with self.ranks.waiting(LONGEST_SAVE):
            return self.ranks.gather(value)


def read_file(path: str) -> Any:
    """The tensors of a file, and what else may be in one without being a program.

    The file is mapped, as only rank 0 needs what all ranks read. Copy a tensor before you keep it: it keeps
    the whole file mapped. The mapping is private: what is written to a tensor does not reach the file.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # saved in torch's older format, or on a filesystem without mappings
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: cannot be read ({reason(error)}). Resume from another checkpoint."
        ) from error


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))  # of one rank
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {place}" if (place := _place(error)) else error.strerror
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('. ') if text else 'no message'}"


def _place(error: OSError) -> str:
    """Where it went wrong. Of a copy, it is the destination that has no room, and names come source first."""
    names = [str(one) for one in (error.filename, error.filename2) if one]
    return names[-1] if names and error.errno in _NO_ROOM else " -> ".join(names)


def _unreadable(checkpointer: str, error: BaseException) -> str:
    if isinstance(error, AdaptiveBatchingError):
        return str(error)
    cause = f" ({reason(error.__cause__)})" if error.__cause__ is not None else ""
    return (
        f"The checkpoint to start from cannot be read: {reason(error)}{cause}. Look at "
        f"{checkpointer}.checkpoint_dir and {checkpointer}.checkpoint_files, and download the files again if "
        "they are damaged."
    )
