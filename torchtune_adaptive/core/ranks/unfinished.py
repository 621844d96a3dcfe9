"""Functional collectives that a failure has left between launch and wait."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from torchtune_adaptive.core.private import (
    AsyncCollectiveTensor,
    tree_leaves,
    unfinished_works,
    without_modes,
)


@torch.no_grad()
def settle(error: BaseException) -> None:
    """Wait for what has been launched and not been waited for, while the error's frames still hold it.

    torch keeps the work of such a collective, and with it the memory of its result, until somebody waits.
    What only an expression held, such as the results so far of a list comprehension, is gone by now.
    """
    if not unfinished_works():
        return
    with without_modes():
        for tensor in _held_by_frames(error):
            _wait(tensor)
        for each in gc.get_objects():
            if type(each) is AsyncCollectiveTensor and not each.completed:
                _wait(each)


def _held_by_frames(error: BaseException) -> Iterator[torch.Tensor]:
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        held = frame.f_locals
        values = [*held.values()]
        if isinstance(held, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            held.clear()  # a copy, until Python 3.12, that the frame would keep, and with it the error
        for value in values:
            if isinstance(value, (torch.Tensor, list, tuple, dict)):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _wait(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        return _wait(tensor.to_local())
    if type(tensor) is AsyncCollectiveTensor:
        tensor = tensor.elem
    if type(tensor) is torch.Tensor:
        torch.ops._c10d_functional.wait_tensor(tensor)
