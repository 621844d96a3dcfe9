"""Out-of-memory errors at a chosen operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.core.device.simulated import SimulatedMemory


class OutOfMemoryAt(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` at the n-th operation (never, if 0), and counts them all.

    A collective counts twice: memory may run out just before it is launched, or while waiting for it. Not so
    those by which ranks agree: they are of integers, on the host.
    """

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.operation = operation
        self.seen = 0
        self.failed: Any = None  # the operation that raised
        self.collectives: list[int] = []  # which operations they are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace != "c10d":
            self._count(func)
            return func(*args, **kwargs)
        if not _is_of_floats(args):
            return func(*args, **kwargs)
        self.collectives += [self.seen + 1, self.seen + 2]
        self._count(func)
        result = func(*args, **kwargs)
        self._count(func)
        return result

    def _count(self, func: Any) -> None:
        self.seen += 1
        if self.seen == self.operation:
            self.failed = func
            raise torch.OutOfMemoryError(f"injected at operation {self.seen}, {func}")


def _is_of_floats(arguments: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return any(tensor.is_floating_point() for tensor in tensors)


class FailingMemory(SimulatedMemory):
    """A device that runs out of memory once, at the operation given to ``fail_at``, and nowhere else.

    It does not count bytes, and looks at operations only until one has failed: tests take thousands of steps,
    and one that is looked at takes two or three times as long.
    """

    def __init__(self) -> None:
        super().__init__(limit=None)
        self.fault: OutOfMemoryAt | None = None
        self.retried = 0

    def retries(self) -> int:
        return self.retried

    def arm(self, operation: int | None) -> OutOfMemoryAt:
        """Fail at an operation from now on; 0: only count them; None: do not even look."""
        fault = OutOfMemoryAt(operation or 0)
        self.fault = None if operation is None else fault
        return fault

    @contextmanager
    def fail_at(self, operation: int | None) -> Iterator[OutOfMemoryAt]:
        try:
            yield self.arm(operation)
        finally:
            self.fault = None

    def capped(self, limit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def running(self) -> AbstractContextManager[object]:
        if self.fault is None or self.fault.failed is not None:
            return nullcontext()
        return self.fault
