"""Out-of-memory errors at a chosen operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.device.simulated import SimulatedMemory


class OutOfMemoryAt(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` at the n-th operation (never, if 0), and counts them all.

    Collectives are not counted: their buffers exist before, and what allocates those is counted.
    """

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.operation = operation
        self.seen = 0
        self.failed: Any = None  # the operation that raised

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        if func.namespace != "c10d":
            self.seen += 1
            if self.seen == self.operation:
                self.failed = func
                raise torch.OutOfMemoryError(f"injected at operation {self.seen}, {func}")
        return func(*args, **(kwargs or {}))


class FailingMemory(SimulatedMemory):
    """A device that runs out of memory at the operation given to ``fail_at``, and nowhere else.

    It does not count bytes, which makes a step twice as fast; tests take thousands of them.
    """

    def __init__(self) -> None:
        super().__init__(limit=None)
        self.fault: OutOfMemoryAt | None = None
        self.retried = 0

    def retries(self) -> int:
        return self.retried

    def arm(self, operation: int) -> OutOfMemoryAt:
        self.fault = OutOfMemoryAt(operation)
        return self.fault

    @contextmanager
    def fail_at(self, operation: int) -> Iterator[OutOfMemoryAt]:
        try:
            yield self.arm(operation)
        finally:
            self.fault = None

    def capped(self, limit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def running(self) -> AbstractContextManager[object]:
        return self.fault or nullcontext()
