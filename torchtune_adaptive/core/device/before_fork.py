"""Imports in a process that others are forked from: CUDA does not survive a fork.

torchtune and torchao ask the first GPU what it can do as they are imported, which initializes CUDA. Here a
process of its own asks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from torchtune_adaptive.core import private

_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set to 1, torch asks the driver whether there are GPUs, and not CUDA, which no fork would survive."""
_MOMENT = 60.0
"""Seconds that the first GPU has to answer."""


class _Answer(NamedTuple):
    """What the first GPU can do."""

    capability: tuple[int, int]
    can_run_triton: bool


@contextmanager
def cuda_uninitialized() -> Iterator[None]:
    """A context for imports that leaves CUDA as it was before them, if the first GPU answers."""
    variable, asked = os.environ.get(_WITHOUT_CUDA), torch.cuda.get_device_capability
    os.environ[_WITHOUT_CUDA] = "1"
    try:
        answer = _answer() if torch.cuda.is_available() else None

        def capability(device: Any = None) -> tuple[int, int]:
            return asked(device) if device is not None or answer is None else answer.capability

        torch.cuda.get_device_capability = capability
        with ExitStack() as stack:
            if answer is not None:
                stack.enter_context(private.triton_known(answer.can_run_triton))
            yield
    finally:
        torch.cuda.get_device_capability = asked
        if variable is None:
            del os.environ[_WITHOUT_CUDA]
        else:
            os.environ[_WITHOUT_CUDA] = variable


def _answer() -> _Answer | None:
    """What the first GPU says; None if it says nothing."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    asking = context.Process(target=_send_answer, args=(sender,), daemon=True)
    asking.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_MOMENT) else None
    except EOFError:
        return None
    finally:
        asking.kill()
        asking.join(_MOMENT)


def _send_answer(sender: Connection) -> None:
    sender.send(_Answer(torch.cuda.get_device_capability(), private.can_run_triton()))


def require_accelerator() -> None:
    """Compute something on the first accelerator, if there is one.

    Raises:
        RuntimeError: it does not work; or a process that this one was forked from had initialized it.
    """
    if torch.accelerator.is_available():
        torch.ones(1, device=torch.accelerator.current_accelerator()).sum().item()
