"""Predict the memory of a training step, without a GPU, weights, or other ranks."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    ConfigError,
    NoPrediction,
    UsageError,
    arguments,
)
from torchtune_adaptive.core import StepOptions, TrainStep
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.experts import EVEN, WORST, Routing
from torchtune_adaptive.library.private import FakeTensorMode, TorchDispatchMode, tree_map_only
from torchtune_adaptive.library.search import CheckedBatch
from torchtune_adaptive.library.summed_loss import SummedLoss
from torchtune_adaptive.planner import (
    AnyDepth,
    DeviceLimits,
    Machine,
    Pace,
    Question,
    RecordedStep,
    Speed,
    StartUp,
    StepTracer,
    TracedRun,
    call_alone,
    check_sums,
    fill,
    gpus,
    planned_gpu,
)

log = logging.getLogger(__name__)

_AS_WRITTEN = "compile: predicted as if nothing were compiled, which takes more (overestimates)"
ANY_LENGTH = 1
"""Length that stands for rows as long as ``worst_case`` makes them."""


@dataclass(frozen=True)
class RoutedPlan:
    """The memory of a mixture of experts where its routers send tokens in one way."""

    peak: int
    """The peak, in bytes."""
    largest: int
    """The largest micro-batch that fits."""


@dataclass(frozen=True)
class ExpertsPlan:
    """The memory of a mixture of experts, by where its routers send tokens; mostly it does not matter."""

    even: RoutedPlan
    """All experts get as many rows."""
    worst: RoutedPlan
    """All tokens go to the same experts."""

    @property
    def differ(self) -> bool:
        """Whether routing changes the memory."""
        return self.even != self.worst


@dataclass(frozen=True)
class Plan:
    """The memory and the time that a training step will take."""

    largest: int
    """The largest micro-batch that fits, in rows, up to the ceiling; 0 if not even one row does."""
    rows: int
    """The micro-batch that the peak is for: the one asked for, or else the largest."""
    peak: int
    """The most memory that is reserved in a step, in bytes, on the rank with the largest share."""
    parts: dict[str, int]
    """Bytes of tensors at the peak, by what they are for; logits and loss are among the activations."""
    usable_bytes: int
    """Usable memory, in bytes: what the peak must stay within."""
    assumptions: tuple[str, ...]
    """Assumptions about the device and the step."""
    speed: Speed | None = None
    """The speed at ``rows``: tokens or rows per second, utilization, where the time goes, and how far off it
    may be; None if nothing is known about the device's."""
    allocated: int = 0
    """The most memory that tensors take in a step, in bytes, as ``torch.cuda.max_memory_allocated`` counts
    it; the allocator reserves more."""
    with_retries: bool = False
    """Whether the peak is above the usable memory, but a step runs if torch's allocator returns memory in the
    middle of it."""
    experts: ExpertsPlan | None = None
    """What a mixture of experts takes where routers send as many tokens to all (``experts.even``) and where
    they send all to the same (``experts.worst``): each has a ``peak`` and a ``largest``. The plan is that of
    the higher peak, and its speed is that of even routing. None for other models."""


@dataclass(frozen=True)
class StepQuestion:
    """A question for ``_answer``, in the process that traces."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
    worst_case: Callable[[int], Any]
    ranks: int
    max_grad_norm: float | None
    asked: Question
    assumptions: tuple[str, ...]


def plan_batch_size(
    build: Callable[[], nn.Module],
    *,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    worst_case: Callable[[int], Any],
    gpu: str = "h100-80gb",
    memory: int | str | None = None,
    ranks: int = 1,
    rows: int | None = None,
    ceiling: int = 1 << 14,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    headroom: float = 0.05,
    length: int = 1,
    timeout: float = 600.0,
) -> Plan:
    """Predict the peak memory of a training step, the largest micro-batch that fits, and the speed.

    The step that trains is traced on fake tensors, in a process of its own: tracing registers a device and
    fake ranks with torch and replaces some of its functions, which cannot be undone. So functions must be
    ones that another process can import: written with ``def`` at the top level of a module or script, whose
    own work is under ``if __name__ == "__main__"``. ``functools.partial`` gives them arguments.

    Args:
        build: function that makes the model, and applies ``fully_shard`` as training does, on the meta device
            and with ``ranks`` fake ranks. A mesh must be for ``torch.accelerator.current_accelerator()``.
        optimizer: function called with the model's parameters.
        forward: function called with the model and a micro-batch; returns the loss, summed, and the number of
            terms.
        worst_case: function that makes a micro-batch of so many rows on the host, each as long as the data
            can make it.
        gpu: the GPU, by a name that ``tune-adaptive plan --list-gpus`` shows; ``"cpu"`` is the device that
            ``AdaptiveStep(memory_limit=...)`` simulates.
        memory: the capacity of one process, such as ``"24GiB"``, if it is not that of the GPU.
        ranks: the number of ranks.
        rows: the micro-batch whose peak is wanted; by default, the largest that fits.
        ceiling: the largest micro-batch to consider.
        accumulation: micro-batches in a step.
        max_grad_norm: the norm above which gradients are scaled down.
        headroom: the share of the capacity that must stay free.
        length: the tokens in a row, so that the speed is in tokens; by default, it is in rows.
        timeout: seconds that tracing may take.

    Raises:
        UsageError: the arguments do not work together.
        NoPrediction: the step cannot be traced; the message says why.
    """
    question = step_question(
        build,
        optimizer=optimizer,
        forward=forward,
        worst_case=worst_case,
        gpu=gpu,
        memory=memory,
        ranks=ranks,
        rows=rows,
        ceiling=ceiling,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        headroom=headroom,
        length=length,
    )
    return answered(question, timeout)


def answered(question: StepQuestion, timeout: float) -> Plan:
    """The answer to a question, from a process that may take so many seconds.

    Raises:
        UsageError: the timeout cannot be used.
        NoPrediction: the step cannot be traced, or not in that time.
    """
    arguments.seconds("timeout", timeout)
    log.info(f"Tracing a step in a process of its own, for at most {timeout:g} s.")
    return call_alone(_answer, question, timeout=timeout)


def step_question(
    build: Callable[[], nn.Module],
    *,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    worst_case: Callable[[int], Any],
    gpu: str,
    memory: int | str | None,
    ranks: int,
    rows: int | None,
    ceiling: int,
    accumulation: int,
    max_grad_norm: float | None,
    headroom: float,
    length: int = 1,
) -> StepQuestion:
    """The question that the arguments of ``plan_batch_size`` ask.

    Raises:
        UsageError: they do not work together.
    """
    functions = {
        "build": build,
        "optimizer": optimizer,
        "forward": forward,
        "worst_case": worst_case,
    }
    for name, function in functions.items():
        _require_importable(name, function)
    ranks, ceiling = arguments.whole("ranks", ranks), arguments.whole("ceiling", ceiling)
    accumulation = arguments.whole("accumulation", accumulation)
    if rows is not None:
        rows = arguments.whole("rows", rows)
    length = arguments.whole("length", length)
    arguments.norm("max_grad_norm", max_grad_norm)
    headroom = arguments.share("headroom", headroom)
    bytes_given = arguments.memory("memory", memory)
    if gpu != "cpu":
        try:
            kind = gpus.gpu(gpu, "gpu", "memory")
        except ConfigError as error:  # which is for configs
            raise UsageError(str(error)) from None
        device, assumptions = planned_gpu(kind, ranks, headroom, bytes_given)
        machine = Machine()
        speeds = machine.speeds(kind.name)
        assumptions = (*assumptions, *machine.lines(kind.name, ranks))
        if speeds is not None and speeds.assumed:
            assumptions = (*assumptions, f"speed: of {speeds.name}, {speeds.assumed}")
    elif bytes_given is not None:
        device, assumptions = DeviceLimits.simulated(bytes_given, headroom), ()
        speeds = Machine.simulated()
    else:
        raise UsageError("memory: a CPU has none of its own to plan for. Pass memory='1GiB', say.")
    return StepQuestion(
        build=build,
        optimizer=optimizer,
        forward=forward,
        worst_case=worst_case,
        ranks=ranks,
        max_grad_norm=max_grad_norm,
        asked=Question(
            device=device,
            rows=rows,
            length=ANY_LENGTH,
            micro_batches=accumulation,
            pace=Pace(speeds, ranks, compiled=False, quantized=False, dtype="") if speeds else None,
            ceiling=ceiling,
            confirmed=True,
            tokens=length,
        ),
        assumptions=assumptions,
    )


def _require_importable(name: str, function: object) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise UsageError(
            f"{name}: {function!r} cannot be imported by the process that traces. Define it with def at the "
            "top level of a module; functools.partial gives it arguments."
        ) from None
    defined_in = getattr(getattr(function, "func", function), "__module__", "")
    if defined_in == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(
            f"{name}: it is defined in an interactive session, which the process that traces cannot import. "
            "Put it into a module."
        )


def _answer(question: StepQuestion) -> Plan:
    """Trace and predict, in a process that does nothing else."""
    asked = question.asked
    if asked.device.caching:
        check_sums()
    steps = StepsOfModel(question, EVEN)
    even = _found(steps, question)
    if not steps.has_experts:
        return even
    worst = even
    if steps.routing_matters:
        log.info("Memory follows from how many rows each expert gets: tracing the worst case, too.")
        worst = _found(StepsOfModel(question, WORST), question)
    more = max(even, worst, key=lambda plan: plan.peak)
    experts = ExpertsPlan(*(RoutedPlan(each.peak, each.largest) for each in (even, worst)))
    least = min(even.largest, worst.largest)
    return replace(more, largest=least, speed=even.speed, experts=experts)


def _found(steps: StepsOfModel, question: StepQuestion) -> Plan:
    asked = question.asked
    if asked.pace is not None:
        asked = replace(asked, pace=replace(asked.pace, compiled=bool(steps.as_written)))
    found = TracedRun(steps, ANY_LENGTH).answer(asked)
    return Plan(
        found.largest,
        found.peak.rows,
        found.peak.reserved,
        found.peak.parts,
        asked.device.usable_bytes,
        (*question.assumptions, *filter(None, [found.as_written])),
        found.speed,
        found.peak.allocated,
        found.peak.with_retries,
    )


class StepsOfModel:
    """The steps of one question with one ``routing`` of experts, each traced once."""

    compiled = False
    """Whether memory is that of compiled code; it is not, whatever is compiled."""
    max_seq_len = None

    def __init__(self, question: StepQuestion, routing: str = EVEN) -> None:
        self._tracer = AnyDepth(
            lambda shorten: ModelTracer(question, shorten, routing),
            lambda tracer: tracer.take_step(TracedRun.ROWS[0]),
        )
        self._start_up = self._tracer.start_up()
        self._known: dict[int, RecordedStep] = {}

    def start_up(self, length: int) -> StartUp:
        return self._start_up

    def step(self, rows: int, length: int) -> RecordedStep:
        if rows not in self._known:
            self._known[rows] = self._tracer.step(lambda tracer: tracer.take_step(rows))
        return self._known[rows]

    noted = step

    def of_phase(self, take: Callable[[ModelTracer], RecordedStep]) -> RecordedStep:
        """What is done between two steps, as a tracer takes it."""
        return self._tracer.step(take)

    def number(self, of: Callable[[ModelTracer], int]) -> int:
        """A number that is linear in the number of layers."""
        return self._tracer.number(of)

    def known(self) -> dict[tuple[int, int], RecordedStep]:
        return {}  # all rows are as long

    def known_first(self) -> dict[tuple[int, int], StartUp]:
        return {}

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(self._tracer.any.routing.experts)

    @property
    def routing_matters(self) -> bool:
        """Whether another routing may take other memory."""
        return self._tracer.any.routing.asked

    @property
    def as_written(self) -> str:
        return _AS_WRITTEN if self._tracer.any.compiles else ""


class ModelTracer(StepTracer):
    """One rank of a run with a model that the user builds, of which a function removes layers."""

    def __init__(
        self, question: StepQuestion, shorten: Callable[[nn.Module], None], routing: str
    ) -> None:
        super().__init__(not question.asked.device.caching, 0, question.ranks)
        self.compiles = False
        _only_wrap()
        if not self.recorder.simulated:
            _refuse_autocast()
        self._batch = CheckedBatch(question.worst_case)
        self._accumulation = min(question.asked.micro_batches, 2)  # later ones are like the second
        model = self._built(question.build)
        shorten(model)
        self.routing = Routing(routing, model)
        """What experts are told about the rows that they get."""
        with self.tracing():
            fill(model, self.device)
            optimizer = checks.plain_optimizer(question.optimizer(model.parameters()))
            checks.require_trainable(model, optimizer)
            step = TrainStep(
                model=model,
                objective=SummedLoss(partial(self._forward, question.forward, model), ()),
                optimizers=[optimizer],
                device=self.device,
                memory=self.memory,
                ranks=self.ranks,
                options=StepOptions(clip_grad_norm=question.max_grad_norm),
            )
            self.recorder.relabel(step.buckets, self.recorder.GRADIENTS)
        if step.buckets:
            self.needs_all_layers = "buckets of gradients do not end where layers do"
        self.begin(step, [model])

    def take_phase(
        self, work: Callable[[nn.Module, Any, Callable[[str], None]], Any], batch: Any
    ) -> RecordedStep:
        """What is done without gradients between two steps, with a batch that is made on the host.

        ``work`` is given the model, the batch on the device, and a function that says what it allocates next.
        """

        def label(category: str) -> None:
            self.recorder.category = category

        def done(_: Any) -> None:
            fake = tree_map_only(torch.Tensor, self._fake.from_tensor, batch)
            on_device = self.step.to_device(fake)
            label(self.recorder.ACTIVATIONS)
            with self.memory.running():
                work(self.step.model, on_device, label)
                # What FSDP2 leaves gathered for a backward pass, which does not come.
                for module in self.step.model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

        return self.trace_forward(done)

    def take_step(self, rows: int) -> RecordedStep:
        made = self._batch(rows)
        return self.trace(
            lambda: tree_map_only(torch.Tensor, self._fake.from_tensor, made),
            self._accumulation,
            lambda: 0,  # what is repeated is seen anyway, and which layer it is does not matter
        )

    def _built(self, build: Callable[[], nn.Module]) -> nn.Module:
        try:
            with (
                self.splitting(),
                _FakeOnDevice(self._fake, self.device),
                torch.device("meta"),
                mock.patch.object(torch, "compile", self.as_compiled),
            ):
                model = build()
        except AdaptiveBatchingError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise NoPrediction(
                f"build: it failed on the meta device with {self.ranks.size} fake ranks: {reason}. Make the "
                "model and shard it, and nothing else: no weights, no .cuda(), no init_process_group()."
            ) from None
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"build: returned a {type(model).__name__}, but must return the model."
            )
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and (
                (kind := parameter.device_mesh.device_type) != self.device.type
            ):
                raise UsageError(
                    f"build: {name} is sharded on a mesh for {kind}. Pass no mesh to fully_shard, or make it "
                    "for torch.accelerator.current_accelerator()."
                    + (" For gpu='cpu', make it for 'cpu'." if self.recorder.simulated else "")
                )
        return model

    def as_compiled(self, function: Any = None, **_: Any) -> Any:
        """The same, as it is written: regions may have hooks in them, at which compiled code is split."""
        self.compiles = True
        return self.as_compiled if function is None else function

    def _forward(self, forward: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        self.recorder.category = self.recorder.ACTIVATIONS
        return forward(model, batch)


class _FakeOnDevice(TorchDispatchMode):
    """Makes fake what is made on the device, as ``fully_shard`` does; meshes need real tensors."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self._fake, self._kind = fake, device.type

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or self._kind == "cpu" or torch.device(device).type != self._kind:
            return func(*args, **kwargs)
        with self._fake:
            return func(*args, **kwargs)


def _refuse_autocast() -> None:
    """Make ``torch.autocast`` fail in this process: its rules are CUDA's, and the fake device has none."""
    init = torch.autocast.__init__

    def begun(
        autocast: torch.autocast,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled and device_type != "cpu":
            raise NoPrediction(
                "forward: torch.autocast cannot be traced. Use fully_shard with "
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or a model in bf16."
            )
        # Checkpointing sets what was set, which is nothing.
        init(autocast, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = begun  # type: ignore


def _only_wrap() -> None:
    """Make ``DistributedDataParallel`` wrap models, and do nothing else, in all of this process.

    Its C++ part cannot hold fake tensors. A step drops that part anyway, and its buckets, before it makes its
    own; see Note [Buckets instead of DDP's] in ``core.ranks.buckets``. So what is left of it is the wrapping.
    """

    def init(
        wrapper: DistributedDataParallel,
        module: nn.Module,
        *_: Any,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        mixed_precision: object = None,
        **__: Any,
    ) -> None:
        nn.Module.__init__(wrapper)
        wrapper.module = module
        wrapper.process_group = process_group or dist.group.WORLD  # type: ignore
        wrapper.broadcast_buffers = broadcast_buffers
        wrapper.bucket_bytes_cap = int((bucket_cap_mb or 25) * (1 << 20))  # as DDP has it
        wrapper.find_unused_parameters = find_unused_parameters
        wrapper.mixed_precision = mixed_precision  # type: ignore

    def forward(wrapper: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        return wrapper.module(*inputs, **named)

    methods = {"__init__": init, "forward": forward, "no_sync": lambda wrapper: nullcontext()}
    for name, method in methods.items():
        setattr(DistributedDataParallel, name, method)
