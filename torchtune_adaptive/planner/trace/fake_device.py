"""A fake device and fake ranks, on which one process can trace a run.

torch lets Python supply a device. The streams and events of this one do nothing but have an identity, so the
stream of each allocation is known, and with it the allocator's pool that it would come from.

What is registered here stays for the life of the process: never call it in a process that trains.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torchtune_adaptive.planner.speed.operations import HOST_WAIT, RECORD, WAIT

NAME = "fakegpu"
_BACKEND = "fake_ranks"


class Listener(Protocol):
    """Is told what streams and events do, and of copies that are only pretended."""

    def synchronise(self, kind: str, stream: int, event: int) -> None: ...

    def copied(self, nbytes: int) -> None: ...


listener: Listener | None = None
_events = count(1)


class FakeEvent:
    """An event that has always happened: nothing runs. Only the listener learns of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.number = next(_events)
        self._tell(RECORD, stream)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._tell(WAIT, stream)

    def synchronize(self) -> None:
        self._tell(HOST_WAIT, None)

    def _tell(self, kind: str, stream: FakeStream | None) -> None:
        if listener is not None and self.number:
            listener.synchronise(kind, (stream or current_stream()).number, self.number)

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream with nothing but a number, by which the allocator tells its memory from other streams'."""

    made = 0
    device_index = 0
    device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.stream_id = FakeStream.made
        FakeStream.made += 1

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if listener is not None:
            listener.synchronise(HOST_WAIT, self.number, 0)

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def __enter__(self) -> FakeStream:
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.pop()


_main = FakeStream()
_entered = [_main]


def current_stream(device: Any = None) -> FakeStream:
    return _entered[-1]


def default_stream(device: Any = None) -> FakeStream:
    return _main


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


def device() -> torch.device:
    """Register the fake device with torch, and return it.

    Private API, and the only way to have a device without building torch (checked on torch 2.11, 2.13 and
    2.15).
    """
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
    return torch.device(NAME, 0)


def init_fake_ranks(rank: int, ranks: int) -> None:
    """Join a fake process group, whose collectives return tensors of the right shapes, as a rank."""
    from torch.testing._internal.distributed import fake_pg

    if _BACKEND not in dist.Backend.backend_list:
        devices = ["cpu", NAME] if hasattr(torch, NAME) else ["cpu"]
        dist.Backend.register_backend(
            _BACKEND, fake_pg._create_fake_pg, extended_api=True, devices=devices
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(_BACKEND, rank=rank, world_size=ranks, store=fake_pg.FakeStore())
