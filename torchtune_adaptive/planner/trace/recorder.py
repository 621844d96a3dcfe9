"""Records what is allocated and freed on a traced device, operation by operation.

A storage is recorded when an operation creates it, with what it is for, and when the last reference to it is
gone. Operations that fake tensors cannot run, or would run differently from a GPU, are replaced here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import DeviceMemory, SimulatedMemory
from torchtune_adaptive.planner.memory.recorded_step import Label, MemoryEvent, RecordedStep
from torchtune_adaptive.planner.private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    in_backward,
    references,
    tree_leaves,
    without_dispatch,
)
from torchtune_adaptive.planner.trace import fake_device, kernels
from torchtune_adaptive.planner.trace.known_results import KnownResults
from torchtune_adaptive.planner.trace.operation_log import OperationLog

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_RECORD_STREAM = _aten.record_stream.default
_SCALAR = _aten._local_scalar_dense.default
_EQUALS = _aten.eq.Scalar
_PIN = _aten._pin_memory.default
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_PROFILING = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


class Recorder:
    """The memory events of one device."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    GATHERED = "gathered parameters"
    LOSS = "logits and loss"
    INPUTS = "inputs"
    STEPPING = "temporaries of the optimizer step"
    WORKSPACES = "workspaces"
    CACHES = "caches of keys and values"
    """Categories: what blocks are for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[MemoryEvent] = []
        self.labels: dict[int, Label] = {}
        self.phase: Callable[[], str] = lambda: "set-up"
        self.category = self.PARAMETERS
        self.in_use = 0
        self.peak = 0
        # A simulated device sees only steps. It counts with a dispatch mode, under which autograd accumulates
        # gradients out of place.
        self.simulated = device.type == "cpu"
        self.listening = not self.simulated
        self.log: OperationLog | None = None
        """Log of what operations compute and move, where that is noted."""
        self._blocks: dict[int, tuple[Any, int, int]] = {}  # by storage: reference, block, bytes
        self._last_block = 0

    def see(self, storage: torch.UntypedStorage, operation: str, category: str = "") -> None:
        """Record ``storage`` as it is now, and when it will be freed."""
        nbytes = storage.nbytes()
        if known := self._blocks.get(id(storage)):
            _, block, before = known
            if nbytes == before:
                return
            self.free(block, before)
        self.adopt(storage, self.allocate(nbytes, operation, category))

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._blocks

    def block_of(self, storage: torch.UntypedStorage) -> int:
        """The number of the block that a storage lies in; 0 if it is not on the device."""
        known = self._blocks.get(id(storage))
        return known[1] if known else 0

    def relabel(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Correct the category of tensors, where it is only known later."""
        for tensor in tensors:
            for plain in DeviceMemory.plain_tensors(tensor):
                known = self._blocks.get(id(plain.untyped_storage()))
                if known and known[1] in self.labels:
                    self.labels[known[1]] = self.labels[known[1]]._replace(category=category)

    def hand_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """``new`` takes the block of ``old``, which is no longer used."""
        reference, block, _ = self._blocks[id(old)]
        self._blocks[id(old)] = (reference, 0, 0)
        self.adopt(new, block)

    def workspace(self, sizes: Iterable[int], operation: str) -> None:
        """Record memory that an operation allocates and frees inside."""
        held = [(self.allocate(nbytes, operation, self.WORKSPACES), nbytes) for nbytes in sizes]
        for block, nbytes in held:
            self.free(block, nbytes)

    def allocate(self, nbytes: int, operation: str, category: str = "") -> int:
        """Record an allocation; the number of its block."""
        if not nbytes:
            return 0
        self._last_block += 1
        stream = fake_device.current_stream().number
        self.events.append(MemoryEvent(self._last_block, nbytes, stream))
        self.labels[self._last_block] = Label(category or self.category, self.phase(), operation)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        return self._last_block

    def free(self, block: int, nbytes: int) -> None:
        """Record the release of a block."""
        if block:
            self.events.append(MemoryEvent(block, -1, 0))
            self.in_use -= nbytes

    def adopt(self, storage: torch.UntypedStorage, block: int) -> None:
        """``storage`` lies in a block that was allocated for it, and frees it when it is gone."""
        gone = weakref.ref(storage, functools.partial(self._gone, id(storage)))
        self._blocks[id(storage)] = (gone, block, storage.nbytes())

    def take_events(self) -> RecordedStep:
        """The events since the last call."""
        step = RecordedStep(self.events, self.labels)
        self.events, self.labels = [], {}
        return step

    def _gone(self, key: int, _: object) -> None:
        _reference, block, nbytes = self._blocks.pop(key)
        self.free(block, nbytes)


class Watch(TorchDispatchMode):
    """Passes every storage that an operation creates to a recorder, and replaces some operations."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and being skipped costs a call around every call

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        super().__init__()
        self._recorder = recorder
        self.results = KnownResults(mode)
        self._pausing = 0
        self.replaced: dict[Any, Callable[..., Any]] = dict(kernels.REPLACED)
        """Operations that are done differently, because their shape depends on values, for example."""

    @property
    def recording(self) -> bool:
        """Whether what is created now is recorded."""
        return not self._pausing and self._recorder.listening

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._pausing += 1
        try:
            yield
        finally:
            self._pausing -= 1

    def read(self, tensor: torch.Tensor) -> Any:
        """A value for what is read from a fake tensor."""
        return _any_value(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is _DEVICE and type(args[0]) is FakeTensor:  # a third of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if not all(kind in _PLAIN or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a sharded or quantized tensor: its plain parts come next
        if func is _PIN:
            return args[0]  # host memory is not traced
        if func in _PROFILING:  # FSDP names its parts for profilers
            with without_dispatch():
                return func(*args)
        if func is _RECORD_STREAM:
            return None  # would delay the release until another stream is done
        recorder = self._recorder
        if func is _SCALAR:
            if recorder.log is not None and not self._pausing:
                recorder.log.read_by_host(args[0])
            return self.read(args[0])
        if not self.recording:
            return self.results(func, args, kwargs)
        is_sum = func is _aten.add.Tensor and not kwargs and not recorder.simulated
        in_place = is_sum and _is_accumulation(args, recorder)
        if func in self.replaced:
            result = self.replaced[func](*args, **kwargs)
        else:
            result = self.results(func, args, kwargs)
        if func is _EQUALS and args[1] == 0:
            result.whether_zero = True
        if in_place:
            recorder.hand_over(args[0].untyped_storage(), result.untyped_storage())
        if SimulatedMemory.allocates(func):
            name = str(func)
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == recorder.device.type:
                    recorder.see(tensor.untyped_storage(), name)
            if func in kernels.WORKSPACES and not recorder.simulated:
                recorder.workspace(kernels.WORKSPACES[func](*args), name)
        if recorder.log is not None:
            recorder.log.note(func, args, kwargs, result)
        return result


def _any_value(tensor: torch.Tensor) -> bool | float:
    """A value for what is read from fake tensors: there are labels, so their number is not 0, and this is the
    optimizer's step 1. The totals of all ranks, the only float64 numbers, are 0: anything else would mean
    that a rank failed."""
    if tensor.dtype is torch.bool:
        return not hasattr(tensor, "whether_zero")
    return 0.0 if tensor.dtype is torch.float64 else 1


def _is_accumulation(summands: tuple[Any, ...], recorder: Recorder) -> bool:
    """Whether this is autograd's sum of two gradients: in place on real tensors, but never on fake ones."""
    if torch.is_grad_enabled() or not in_backward():
        return False
    left, right = summands
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    if left.shape != right.shape or left.dtype != right.dtype or not left.is_contiguous():
        return False
    storage = left.untyped_storage()
    alone = references(storage) <= 2
    return alone and recorder.knows(storage) and storage.nbytes() == left.nbytes


_GRADIENTS_MADE = 4
"""Number of gradients: each of the three, and the one that they flow into; their sum is in place."""


def check_sums() -> None:
    """Check that autograd's sums of gradients are traced as the installed version of torch makes them.

    Raises:
        NoPrediction: they are made in another way.
    """
    if (made := _gradients_made()) != _GRADIENTS_MADE:
        reason = f"the sum of three gradients took {made} allocations instead of {_GRADIENTS_MADE}"
        raise no_prediction(reason)


def no_prediction(reason: str) -> NoPrediction:
    return NoPrediction(
        f"With torch {torch.__version__} the memory of a step cannot be predicted: on the self-check model, "
        f"{reason}. Use a torch version that this package was tested with (see its README), or search on "
        "the device (adaptive_batching.search=extrapolate)."
    )


def _gradients_made() -> int:
    """The allocations of a small backward pass on the fake device that sums three gradients."""
    device = fake_device.device()
    recorder = Recorder(device)
    with FakeTensorMode() as mode, Watch(recorder, mode):
        leaf = torch.empty(1024, device=device, requires_grad=True)
        inner = leaf * 1
        end = (inner * 2 + inner * 3 + inner * 4).sum()
        recorder.take_events()
        end.backward()
    return sum(event.nbytes == leaf.nbytes for event in recorder.take_events().events)
