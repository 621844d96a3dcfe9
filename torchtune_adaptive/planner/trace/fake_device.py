"""A fake device and fake ranks, on which one process can trace a run.

torch lets Python supply a device. The streams and events of this one do nothing but have an identity, so the
stream of each allocation is known, and with it the allocator's pool that it would come from.

What is registered here stays for the life of the process: never call it in a process that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from torchtune_adaptive.planner import private
from torchtune_adaptive.planner.speed.operations import HOST_WAIT, RECORD, WAIT

NAME = "fakegpu"
_BACKEND = "fake_ranks"


class Products(NamedTuple):
    """The matrix products that a kernel of attention computes."""

    flops: float
    dtype: str
    shape: tuple[float, ...]
    """Heads of all rows, queries, keys, and the numbers of each."""


class Listener(Protocol):
    """A listener to what streams and events do, and to copies and kernels that are only pretended."""

    times: float
    """How many times what is done now is done."""

    def synchronize(self, kind: str, stream: int, event: int) -> None: ...

    def copied(self, nbytes: int) -> None: ...

    def ran(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        besides: int,
        products: Products | None,
    ) -> None: ...


class FakeEvent:
    """An event that has always happened: nothing runs. Only the listener learns of it."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = 0

    def record(self, stream: FakeStream | None = None) -> None:
        FakeEvent.made += 1
        self.number = FakeEvent.made
        self._tell(RECORD, stream)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._tell(WAIT, stream)

    def synchronize(self) -> None:
        self._tell(HOST_WAIT, None)

    def _tell(self, kind: str, stream: FakeStream | None) -> None:
        if _here.listener is not None and self.number:
            _here.listener.synchronize(kind, (stream or current_stream()).number, self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds between two events; nothing takes time."""
        return 1.0


class FakeStream:
    """A stream with nothing but a number, by which the allocator tells its memory from other streams'."""

    numbers: ClassVar[Iterator[int]] = count()
    device_index = 0
    device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.stream_id = next(FakeStream.numbers)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if _here.listener is not None:
            _here.listener.synchronize(HOST_WAIT, self.number, 0)

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def __enter__(self) -> FakeStream:
        _here.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _here.streams.pop()


class _Here:
    """The program's place on the fake device, of which torch has one."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.streams = [FakeStream()]
        """The default stream, and those that were entered."""


_here = _Here()


@contextmanager
def numbering_streams(numbers: Iterator[int]) -> Iterator[None]:
    """A context in which new streams get these numbers, as those of another run have the same."""
    before, FakeStream.numbers = FakeStream.numbers, numbers
    try:
        yield
    finally:
        FakeStream.numbers = before


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """A context in which the listener is told what happens."""
    _here.listener = listener
    try:
        yield
    finally:
        _here.listener = None


def copied(nbytes: int) -> None:
    """Tell the listener of a copy that is only pretended."""
    if _here.listener is not None:
        _here.listener.copied(nbytes)


def ran(
    name: str,
    reads: Iterable[torch.Tensor] = (),
    writes: Iterable[torch.Tensor] = (),
    besides: int = 0,
    products: Products | None = None,
) -> None:
    """Tell the listener of a kernel that is only pretended: of the tensors that it reads and writes, and of
    bytes of others."""
    if _here.listener is not None:
        _here.listener.ran(name, reads, writes, besides, products)


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """A context in which what is done stands for so many times as much, which would take the same memory."""
    listener = _here.listener
    if listener is None:
        yield
        return
    before, listener.times = listener.times, listener.times * times
    try:
        yield
    finally:
        listener.times = before


def current_stream(device: Any = None) -> FakeStream:
    return _here.streams[-1]


def default_stream(device: Any = None) -> FakeStream:
    return _here.streams[0]


def in_stream(stream: FakeStream | None) -> AbstractContextManager[Any]:
    return stream if stream is not None else nullcontext()


class _DeviceModule:
    """The parts of a device's module, ``torch.<name>``, that torch and FSDP2 use."""

    Stream = FakeStream
    Event = FakeEvent
    current_stream = staticmethod(current_stream)
    stream = staticmethod(in_stream)
    default_stream = staticmethod(default_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_KERNELS_OF_GPUS = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operations that have a kernel on GPUs, and that torch takes apart on devices that have none."""
_kernels = torch.library.Library("aten", "IMPL")


def _kernel(*_: Any) -> Any:
    """Stands for a kernel. It is never called, as tensors on the fake device are fake."""
    raise NotImplementedError


def device() -> torch.device:
    """Register the fake device with torch, and return it."""
    if not hasattr(torch, NAME):
        private.register_device(NAME, backend_module=_DeviceModule())
        for operation in _KERNELS_OF_GPUS:
            _kernels.impl(operation, _kernel, "PrivateUse1")
    return torch.device(NAME, 0)


def init_fake_ranks(rank: int, ranks: int) -> None:
    """Join a fake process group, whose collectives return tensors of the right shapes, as a rank."""
    devices = ["cpu", NAME] if hasattr(torch, NAME) else ["cpu"]
    private.join_fake_group(_BACKEND, devices, rank, ranks)
