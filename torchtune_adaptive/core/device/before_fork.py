"""Imports in a process that others are forked from: CUDA does not survive a fork.

torchtune's import asks the first GPU what it can do, which initializes CUDA. Here a process of its own asks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set to 1, torch asks the driver whether there are GPUs, and not CUDA, which no fork would survive."""
_MOMENT = 60.0
"""Seconds that the first GPU has to answer."""


@contextmanager
def cuda_uninitialized() -> Iterator[None]:
    """A context for imports that leaves CUDA as it was before them, if the first GPU answers."""
    variable, asked = os.environ.get(_WITHOUT_CUDA), torch.cuda.get_device_capability
    os.environ[_WITHOUT_CUDA] = "1"
    try:
        answer = _answer() if torch.cuda.is_available() else None

        def answered(device: Any = None) -> tuple[int, int]:
            return answer if device is None and answer is not None else asked(device)

        torch.cuda.get_device_capability = answered
        yield
    finally:
        torch.cuda.get_device_capability = asked
        if variable is None:
            del os.environ[_WITHOUT_CUDA]
        else:
            os.environ[_WITHOUT_CUDA] = variable


def _answer() -> tuple[int, int] | None:
    """What the first GPU can do; None if it does not say."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    asking = context.Process(target=_send_capability, args=(sender,), daemon=True)
    asking.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_MOMENT) else None
    except EOFError:
        return None
    finally:
        asking.kill()
        asking.join(_MOMENT)


def _send_capability(sender: Connection) -> None:
    sender.send(torch.cuda.get_device_capability())


def require_accelerator() -> None:
    """Compute something on the first accelerator, if there is one.

    Raises:
        RuntimeError: it does not work; or a process that this one was forked from had initialized it.
    """
    if torch.accelerator.is_available():
        torch.ones(1, device=torch.accelerator.current_accelerator()).sum().item()
