"""Kill a process at the file operation of your choice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtune.training.checkpointing import _checkpointer

_OPERATIONS = frozenset(
    ["os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"]
)


class KillAt:
    """Kills this process just before the n-th operation on files (never, if 0), and counts them all.

    What Python does is seen by what it reports to audit hooks, which cannot be removed again. What is written
    by torch and safetensors counts twice: before it is written, and when half of it has been.
    """

    def __init__(self, number: int, act: Callable[[], object] | None = None) -> None:
        self._number = number
        self._act = act or (lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.seen = 0
        fsync = os.fsync

        def flush(descriptor: int) -> None:
            self._next()
            fsync(descriptor)

        os.fsync = flush
        torch.save = self._in_halves(torch.save)
        _checkpointer.save_file = self._in_halves(_checkpointer.save_file)
        sys.addaudithook(self._hook)

    def _in_halves(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_and_truncate(content: Any, path: Path, **settings: Any) -> None:
            self._next()
            save(content, path, **settings)
            if self.seen + 1 == self._number:
                os.truncate(path, os.path.getsize(path) // 2)
            self._next()

        return save_and_truncate

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if writes or event in _OPERATIONS:
            self._next()

    def _next(self) -> None:
        self.seen += 1
        if self.seen == self._number:
            self._act()


def in_child(work: Callable[[], object]) -> int:
    """Call ``work`` in a forked process; how that ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
