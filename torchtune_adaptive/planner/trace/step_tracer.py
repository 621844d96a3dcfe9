"""Records the allocations of a training step, without a device, weights or data.

The step is the one that trains: the same ``TrainStep``, the same model, sharding, checkpointing and
optimizer. Its tensors are fake: they have shapes and storages, but no memory behind them. Every allocation
and release is recorded, with what it is for and where in the step it happens.

A tracer needs its own process (see ``fake_device``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.core import Batch, DeviceMemory, Ranks, TrainStep, Usage
from torchtune_adaptive.planner import private
from torchtune_adaptive.planner.memory.recorded_step import RecordedStep
from torchtune_adaptive.planner.told import tell
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.alike_layers import lists_of_layers
from torchtune_adaptive.planner.trace.async_reductions import AsyncReductions
from torchtune_adaptive.planner.trace.compiled_regions import CompiledRegions, check_compiler
from torchtune_adaptive.planner.trace.kernels import attention, softmax
from torchtune_adaptive.planner.trace.known_events import KnownEvents
from torchtune_adaptive.planner.trace.operation_log import OperationLog
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

_ON_STREAMS = {
    "all_gather_copy_in_stream": Recorder.GATHERED,
    "all_gather_stream": Recorder.GATHERED,
    "reduce_scatter_stream": Recorder.GRADIENTS,
    "all_reduce_stream": Recorder.GRADIENTS,
}
"""Categories of what FSDP allocates on its own streams, by their names."""


class FakeMemory(DeviceMemory):
    """The device's memory as ``TrainStep`` needs it: what the recorder has counted."""

    name = "fake device"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def capacity(self) -> int:
        return 1 << 62

    def capped(self, limit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def statistics(self) -> Usage:
        return Usage(self._recorder.peak, self._recorder.peak, retries=0)

    def restart_peaks(self) -> None:
        self._recorder.peak = self._recorder.in_use

    def in_use(self) -> int:
        return self._recorder.in_use

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self._recorder.listening = self._recorder.listening, True
        try:
            yield
        finally:
            self._recorder.listening = before

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for plain in DeviceMemory.plain_tensors(tensor):
                if plain.device.type == self._recorder.device.type:
                    self._recorder.see(plain.untyped_storage(), "")


class FakeRanks(Ranks):
    """Ranks of which only this one runs: the others always agree with it."""

    communicate = False

    def __init__(self, rank: int, ranks: int, holders: int = 1) -> None:
        self.rank, self.size, self._group = rank, ranks, None
        self._holders = holders

    def alike(self, value: Hashable) -> Ranks:
        if self._holders == 1:
            raise NoPrediction(
                "Layers are split over ranks, which is predicted only for configs. Plan the model unsplit."
            )
        return FakeRanks(self.rank % self._holders, self._holders)


class StepTracer:
    """One rank of a run on a fake device.

    Whoever derives from it builds a model in ``tracing()`` and passes its step to ``begin``.

    Args:
        simulated: whether the device is the simulated one, whose memory is that of a CPU.
        rank: the number of this rank. If parameters do not divide evenly, the first has the largest share.
        ranks: the number of ranks.
        holders: the number of them that hold the same rows, and have successive numbers.
        before_ampere: whether the device stands for a GPU that is older than Ampere.
        watch: what sees the operations, and passes them to a recorder.
    """

    def __init__(
        self,
        simulated: bool,
        rank: int,
        ranks: int,
        holders: int = 1,
        before_ampere: bool = False,
        watch: Callable[[Recorder, private.FakeTensorMode], Watch] = Watch,
    ) -> None:
        self.device = torch.device("cpu") if simulated else fake_device.device()
        fake_device.init_fake_ranks(rank, ranks)
        self._attention = partial(attention, before_ampere)
        self._streams = count(1)
        self._async_reductions = AsyncReductions()
        self.ranks = FakeRanks(rank, ranks, holders)
        self.recorder = Recorder(self.device)
        self.memory = FakeMemory(self.recorder)
        self.fake_mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        self.watch = watch(self.recorder, self.fake_mode)
        self._known_events = KnownEvents(self.recorder, self.watch, self.fake_mode)
        self._within: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context in which to trace as well."""
        self.models: Sequence[nn.Module] = ()
        self.set_up = RecordedStep([], {})
        self._optimizer_state_is_there = False
        self.regions: CompiledRegions | None = None
        """Regions that are compiled; None if everything runs as it is written."""
        self._not_followed = ""
        self.needs_all_layers = ""
        """The reason why a model with fewer layers tells nothing about its step; empty if there is none."""

    def follow_compiler(self, backend: str) -> None:
        """Take what is compiled with a backend as compiled from now on, where that is known to be right."""
        self._not_followed = check_compiler(self.device, backend)
        if not self._not_followed:
            self.regions = CompiledRegions(self.device, self.fake_mode)

    def compile_with(self, other: StepTracer) -> None:
        """Compile what is alike in both once."""
        if self.regions is not None and other.regions is not None:
            self.regions.known = other.regions.known

    @property
    def as_written(self) -> str:
        """The reason why something that is compiled runs as it is written; empty if nothing does."""
        return self._not_followed if self.regions is None else self.regions.failed

    def uncompiled(self) -> AbstractContextManager[None]:
        """A context in which everything runs as it is written."""
        return nullcontext() if self.regions is None else self.regions.as_written()

    def begin(self, step: TrainStep, models: Sequence[nn.Module]) -> None:
        """Trace this step of these models from now on. Its tensors are fake, on the tracer's device."""
        self.step, self.models = step, tuple(models)
        if not self.recorder.simulated:
            for optimizer in step.optimizers:
                update_at_once(optimizer, self.device)
        parameters = [p for model in models for p in model.parameters()]
        self.uneven = any(_is_uneven(p) for p in parameters if isinstance(p, DTensor))
        """Whether ranks hold different shares of the parameters."""
        self.recorder.phase = lambda: self.step.stage
        for model in models:
            self._tell_of_layers(model)
        self.set_up = self.recorder.take_events()

    def _tell_of_layers(self, model: nn.Module) -> None:
        """Tell which layer a forward or backward pass is in. That takes microseconds for each layer."""

        def follow(layer: nn.Module, which: str) -> None:
            def begins(*_: object) -> None:
                tell(f"{self.recorder.phase()} pass, {which}")

            def passed(module: nn.Module, inputs: object, output: object) -> None:
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(begins)

            layer.register_forward_pre_hook(begins)
            layer.register_forward_hook(passed)

        for layers in lists_of_layers(model):
            for number, layer in enumerate(layers, 1):
                follow(layer, f"layer {number} of {len(layers)}")

    def trace(
        self,
        make_batch: Callable[[], Batch],
        micro_batches: int,
        layer: Callable[[], int] | None = None,
    ) -> RecordedStep:
        """One step, whose micro-batches ``make_batch`` makes on the host. What operations compute and move is
        noted as well if there is a function ``layer``, which tells the number of the layer that runs."""
        recorder, step = self.recorder, self.step

        def take(log: OperationLog | None) -> None:
            batch = make_batch()
            recorder.peak = recorder.in_use
            for number in range(1, micro_batches + 1):
                recorder.category = recorder.INPUTS
                tell("forward pass")
                step.forward_backward(batch, last=number == micro_batches)
                if log is not None:
                    log.next_part()
            parameters = list(step.model.parameters())
            recorder.relabel((p.grad for p in parameters if p.grad is not None), recorder.GRADIENTS)
            recorder.category = recorder.STEPPING
            tell("optimizer")
            step.apply()
            if not self._optimizer_state_is_there:
                recorder.relabel(state_of(step.optimizers), recorder.OPTIMIZER)
                self._optimizer_state_is_there = True

        # The first step is different.
        return self._recorded(take, layer if self._optimizer_state_is_there else None)

    def trace_forward(self, work: Callable[[Callable[[], None]], Any]) -> RecordedStep:
        """Something that the step does without gradients, between two steps. ``work`` does it, and calls the
        function that it is given before each part but the first that counts by itself, as a micro-batch of a
        step does."""
        recorder, of_step = self.recorder, self.recorder.phase

        def do(log: OperationLog | None) -> None:
            assert log is not None
            recorder.category = recorder.INPUTS
            work(log.next_part)
            log.next_part()  # the update: there is none

        recorder.phase = lambda: "forward"
        try:
            return self._recorded(do, lambda: 0)
        finally:
            recorder.phase = of_step

    def _recorded(
        self, take: Callable[[OperationLog | None], None], layer: Callable[[], int] | None
    ) -> RecordedStep:
        """What happens when something is taken; its operations are noted if there is a ``layer``."""
        recorder, log = self.recorder, None
        if layer is not None:
            log = OperationLog(recorder.device.type, recorder.block_of, recorder.phase, layer)
        recorder.log = log
        gc.disable()  # or when reference cycles are freed would depend on earlier traces
        try:
            with self.tracing(), fake_device.heard_by(log):
                take(log)
            gc.collect()
            gc.freeze()  # what is left stays, so later collections can skip it
        finally:
            recorder.log = None
            gc.enable()
        traced = recorder.take_events()
        self.label_streams(traced)
        return traced._replace(operations=log.finish()) if log is not None else traced

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """A context in which tensors are fake, and nothing is recorded."""
        without_values = private.replaced(private.of_meshes())
        with without_values, self.splitting(), self.fake_mode, self.watch, self.watch.paused():
            yield

    @staticmethod
    def splitting() -> AbstractContextManager[None]:
        """A context in which FSDP splits parameters for many ranks in the time that it takes for few."""
        return private.replaced(private.of_chunks())

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which tensors are fake, and what is allocated on the device is recorded."""
        # What is compiled already runs eager: dynamo does not know the device.
        with (
            fake_device.numbering_streams(self._streams),
            private.replaced(self.replacements()),
            torch.compiler.set_stance("force_eager"),
            self.fake_mode,
            self.watch,
            self._within(),
        ):
            yield

    def replacements(self) -> private.Replacements:
        """Replacements while tracing."""
        recorder, watch = self.recorder, self.watch
        resize = torch.UntypedStorage.resize_

        def seen_resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resize(storage, nbytes)
            if recorder.knows(storage):
                recorder.see(storage, "resize_", recorder.GATHERED)
            return storage

        def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
            """An 8-bit optimizer's compiled function for each parameter: nothing in it takes memory."""

            def run(*arguments: Any) -> Any:
                if recorder.log is not None:
                    tensors = (t for t in arguments if isinstance(t, torch.Tensor))
                    recorder.log.compiled(p for t in tensors for p in DeviceMemory.plain_tensors(t))
                with watch.paused():
                    return function(*arguments)

            return run

        def compiled(function: Any = None, **_: Any) -> Any:
            """What ``torch.compile`` gives."""
            if function is None:  # a decorator with options
                return compiled
            if getattr(function, "__module__", "").startswith("torchao.optim"):
                return as_one_kernel(function)
            return self.as_compiled(function)

        tensor = torch.tensor

        def made_on_host(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
            """A tensor of Python numbers, as 8-bit optimizers have; torch would ask the device for it."""
            made = tensor(data, **options)
            if made.numel() == 1 and device is not None and not recorder.simulated:
                # Fake tensors of one number have it, and torch would copy it to the device.
                return torch.empty(made.shape, dtype=made.dtype, device=device)
            return made.to(device)

        replacements = [
            (torch, "tensor", made_on_host),
            (torch, "compile", compiled),
            (torch.UntypedStorage, "resize_", seen_resize),
            *private.of_sharding(unseen=watch.paused),
            *private.of_meshes(),
        ]
        if not recorder.simulated:
            replacements += [
                (F, "scaled_dot_product_attention", self._attention),
                (F, "softmax", softmax),
                (torch.accelerator, "current_stream", fake_device.current_stream),
                (dist, "all_reduce", self._async_reductions.instead_of(dist.all_reduce)),
            ]
        return replacements

    def as_compiled(self, function: Any, **_: Any) -> Any:
        """What ``torch.compile`` gives for a function or a module of the step."""
        if self.regions is None:
            return function
        if isinstance(function, nn.Module):
            function.forward = self.regions.region(function.forward)
            return function
        return self.regions.region(function)

    def label_streams(self, step: RecordedStep) -> None:
        """Label what FSDP allocates on its own streams by the stream."""
        on_streams = self.stream_categories()
        for block, _, stream in step.events:
            if category := on_streams.get(stream):
                step.labels[block] = step.labels[block]._replace(category=category)

    def stream_categories(self) -> dict[int, str]:
        """Categories of what FSDP allocates on its own streams, by the stream's number."""
        found = {}
        for streams in map(private.communication_streams, self.models):
            for name, category in _ON_STREAMS.items():
                if isinstance(stream := getattr(streams, name, None), fake_device.FakeStream):
                    found[stream.number] = category
        return found


def update_at_once(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let an optimizer update all tensors at once where it would do so by itself on a GPU. That takes
    temporaries of the size of all of them. torch decides by their types, which fake tensors change."""
    for group in optimizer.param_groups:
        decided = group.get("foreach", False) is not None
        if decided or group.get("fused") or group.get("differentiable"):
            continue
        on_device = all(p.device == device for p in group["params"])
        if on_device and not any(map(private.is_traceable_wrapper_subclass, group["params"])):
            group["foreach"] = True


def _is_uneven(parameter: DTensor) -> bool:
    """Whether ranks hold parts of different sizes."""
    parts = [1] * parameter.ndim
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            parts[placement.dim] *= size  # type: ignore[attr-defined]
    return any(size % number for size, number in zip(parameter.shape, parts, strict=True))


def state_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if torch.is_tensor(value)]
