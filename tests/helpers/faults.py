"""Out-of-memory errors at a chosen operation, or at one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.core.device.memory import Usage
from torchtune_adaptive.core.device.simulated import SimulatedMemory, _follow_resizing
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.collectives import Collectives
from torchtune_adaptive.core.ranks.recording import _is_launch
from torchtune_adaptive.core.step.train_step import TrainStep


class OutOfMemoryAt(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` at the n-th operation (never, if 0), and counts them all.

    Only operations that allocate count, as memory runs out nowhere else: a view, an operation in place or the
    value of a scalar needs none. Enlarging a storage, as FSDP does, counts as well, and a collective twice:
    memory may run out just before it is launched, or while waiting for it. Not so those by which ranks agree:
    they are of integers, on the host.

    Args:
        operation: the one that raises.
        everywhere: whether all operations count, and raise before they have done anything.
    """

    def __init__(self, operation: int, everywhere: bool = False) -> None:
        super().__init__()
        self.operation = operation
        self.everywhere = everywhere
        self.seen = 0
        self.failed: Any = None  # the operation that raised
        self.collectives: list[int] = []  # which operations they are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a sharded tensor's shape is being worked out
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        if _is_launch(func):
            return self._communicate(func, args, kwargs)
        if self.everywhere:
            self.count(func)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _allocates(result, args, kwargs):
            self.count(func)
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(tensor.is_floating_point() for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self.collectives += [self.seen + 1, self.seen + 2]
        self.count(func)
        result = func(*args, **kwargs)
        self.count(func)
        return result

    def count(self, func: Any) -> None:
        self.seen += 1
        if self.seen == self.operation:
            self.failed = func
            raise torch.OutOfMemoryError(f"injected at operation {self.seen}, {func}")


def _allocates(result: Any, *arguments: Any) -> bool:
    """Whether the result has memory that no argument has."""
    made = {storage._cdata for storage in _storages(result) if storage.nbytes()}
    return bool(made) and not made <= {storage._cdata for storage in _storages(arguments)}


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in _tensors(tree))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class FailingMemory(SimulatedMemory):
    """A device that runs out of memory once, at the operation given to ``fail_at``, and nowhere else.

    It does not count bytes, and looks at operations only until one has failed: tests take thousands of steps,
    and one that is looked at takes two or three times as long.
    """

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__(limit=None)
        self.everywhere = everywhere
        self.fault: OutOfMemoryAt | None = None
        self.retried = 0

    def statistics(self) -> Usage:
        return replace(super().statistics(), retries=self.retried)

    def arm(self, operation: int | None) -> OutOfMemoryAt:
        """Fail at an operation from now on; 0: only count them; None: do not even look."""
        fault = OutOfMemoryAt(operation or 0, self.everywhere)
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

    @contextmanager
    def running(self) -> Iterator[None]:
        if self.fault is None or self.fault.failed is not None:
            yield
            return
        with _follow_resizing(self), self.fault:
            yield

    def check(self, extra: int = 0) -> None:
        if extra > 0 and self.fault is not None:
            self.fault.count(torch.UntypedStorage.resize_)

    def count(self, storage: torch.UntypedStorage) -> None: ...


class Failing(Protocol):
    """What can fail at a chosen operation."""

    def fail_at(self, operation: int | None) -> AbstractContextManager[Any]: ...


def fail_at_each(
    operations: Iterable[int], memory: Failing, ranks: Ranks, everyone: bool = False
) -> Iterator[tuple[int, int, AbstractContextManager[Any]]]:
    """Operations, the rank that fails at each (strides are primes, so ranks take turns), and the failure.

    Every rank goes through the same ones, ``with failure`` around what shall fail. With ``everyone``, all
    ranks fail.
    """
    # With uneven shards some ranks have fewer operations; all count those of the one with the fewest.
    agreed = min(ranks.gather(list(operations)), key=lambda numbers: numbers[-1:])
    for operation in agreed:
        victim = operation % ranks.size
        here = everyone or victim == ranks.rank
        yield operation, victim, memory.fail_at(operation if here else None)


def survivable(
    memory: FailingMemory, step: TrainStep, take: Callable[[], Any]
) -> tuple[int, list[int]]:
    """How many operations of a step can run out of memory and be survived; which of them are collectives."""
    seen: list[int] = []
    scale_gradients = step._scale_gradients

    def scale_and_count(factor: float) -> None:
        scale_gradients(factor)
        seen.append(fault.seen)

    step._scale_gradients = scale_and_count  # type: ignore[method-assign]
    with memory.fail_at(0) as fault:
        take()
    del step._scale_gradients
    return seen[0], fault.collectives


def record_anew(collectives: Collectives, *, of_any_shape: bool = True) -> None:
    """Forget the launches that are recorded for each shape of micro-batches and, unless told otherwise, for
    any. All ranks do it together."""
    collectives._sequences.clear()
    if of_any_shape:
        collectives._wide_sequences.clear()
