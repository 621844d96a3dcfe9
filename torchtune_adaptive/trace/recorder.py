"""What is given out and taken back on a device that is traced, operation by operation.

A storage is noted when an operation makes it, with what it is for, and again when nothing refers to it any
more. Operations that fake tensors cannot run, or would run otherwise than a GPU does, are answered here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.device.memory import plain_tensors
from torchtune_adaptive.device.simulated import allocates
from torchtune_adaptive.memory_model.steps import Label, MemoryEvent, RecordedStep
from torchtune_adaptive.trace import fake_device, kernels

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_RECORD_STREAM = _aten.record_stream.default
_SCALAR = _aten._local_scalar_dense.default
_PIN = _aten._pin_memory.default
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
GATHERED = "gathered parameters"
LOSS = "logits and loss"
INPUTS = "inputs"
STEPPING = "temporaries of the optimizer step"
WORKSPACES = "workspaces"


class Recorder:
    """Notes what is given out and taken back on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[MemoryEvent] = []
        self.labels: dict[int, Label] = {}
        self.phase: Callable[[], str] = lambda: "set-up"
        self.category = PARAMETERS
        self.in_use = 0
        self.peak = 0
        # A simulated device sees nothing but steps. It counts with a mode, and where there is one autograd
        # adds gradients out of place.
        self.simulated = device.type == "cpu"
        self.listening = not self.simulated
        self._blocks: dict[int, tuple[Any, int, int]] = {}  # by storage: reference, block, bytes
        self._given = 0

    def see(self, storage: torch.UntypedStorage, operation: str, category: str = "") -> None:
        """Note ``storage`` as it is now, and when it is gone."""
        key, nbytes = id(storage), storage.nbytes()
        if known := self._blocks.get(key):
            reference, block, before = known
            if nbytes == before:
                return
            self._take_back(block, before)
        else:
            reference = weakref.ref(storage, functools.partial(self._gone, key))
        block = self._give(nbytes, operation, category)
        self._blocks[key] = (reference, block, nbytes)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._blocks

    def relabel(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """What the tensors are for is only known now."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                known = self._blocks.get(id(plain.untyped_storage()))
                if known and known[1] in self.labels:
                    self.labels[known[1]] = self.labels[known[1]]._replace(category=category)

    def hand_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """``new`` is at the place of ``old``, which nothing will use any more."""
        reference, block, nbytes = self._blocks[id(old)]
        self._blocks[id(old)] = (reference, 0, 0)
        gone = weakref.ref(new, functools.partial(self._gone, id(new)))
        self._blocks[id(new)] = (gone, block, nbytes)

    def workspace(self, sizes: Iterable[int], operation: str) -> None:
        """Memory that an operation uses inside."""
        held = [(self._give(nbytes, operation, WORKSPACES), nbytes) for nbytes in sizes]
        for block, nbytes in held:
            self._take_back(block, nbytes)

    def taken(self) -> RecordedStep:
        """What has been noted since this was last asked."""
        taken = RecordedStep(self.events, self.labels)
        self.events, self.labels = [], {}
        return taken

    def _give(self, nbytes: int, operation: str, category: str) -> int:
        if not nbytes:
            return 0
        self._given += 1
        self.events.append(MemoryEvent(self._given, nbytes, fake_device.current_stream().number))
        self.labels[self._given] = Label(category or self.category, self.phase(), operation)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        return self._given

    def _take_back(self, block: int, nbytes: int) -> None:
        if block:
            self.events.append(MemoryEvent(block, -1, 0))
            self.in_use -= nbytes

    def _gone(self, key: int, _: object) -> None:
        _reference, block, nbytes = self._blocks.pop(key)
        self._take_back(block, nbytes)


class Watch(TorchDispatchMode):
    """Tells a recorder of every storage that operations make, and answers what fake tensors cannot."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and being skipped costs a call around every call

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._pausing = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._pausing += 1
        try:
            yield
        finally:
            self._pausing -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is _DEVICE and type(args[0]) is FakeTensor:  # a third of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if not all(kind in (torch.Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a sharded or quantised tensor: see the plain ones inside it
        if func is _PIN:
            return args[0]  # on the host, which is not what this is about
        if func is _RECORD_STREAM:
            return None  # frees when another stream is done: here, at once
        if func is _SCALAR:
            return _any_value(args[0].dtype)
        recorder = self._recorder
        if self._pausing or not recorder.listening:
            return func(*args, **kwargs)
        in_place = (
            not recorder.simulated
            and func is _aten.add.Tensor
            and not kwargs
            and _is_accumulation(args, recorder)
        )
        result = func(*args, **kwargs)
        if in_place:
            recorder.hand_over(args[0].untyped_storage(), result.untyped_storage())
        if not allocates(func):
            return result
        name = str(func)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == recorder.device.type:
                recorder.see(tensor.untyped_storage(), name)
        if func in kernels.WORKSPACES:
            recorder.workspace(kernels.WORKSPACES[func](*args), name)
        return result


def _any_value(dtype: torch.dtype) -> bool | float:
    """For what is read from tensors: there is something to learn, and this is the optimizer's step 1. The
    sums of all ranks, the only numbers in float64, are 0, or a rank would have failed."""
    return True if dtype is torch.bool else 0.0 if dtype is torch.float64 else 1


def _is_accumulation(summands: tuple[Any, ...], recorder: Recorder) -> bool:
    """Whether autograd adds two gradients that meet: in place on real tensors, but never on fake ones.

    Private: the two counts that autograd itself goes by (checked on torch 2.11, 2.13 and 2.15).
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    left, right = summands
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    if left.shape != right.shape or left.dtype != right.dtype or not left.is_contiguous():
        return False
    storage = left.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata) <= 2
    return alone and recorder.knows(storage) and storage.nbytes() == left.nbytes
