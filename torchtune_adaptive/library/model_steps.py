"""The steps of a model that the user builds, traced: each size once, on one rank of a run.

Tracing registers a device and fake ranks with torch and replaces some of its functions, which cannot be
undone. So it is done in a process that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.common import AdaptiveBatchingError, NoPrediction, UsageError, counted
from torchtune_adaptive.core import StepOptions, TrainStep
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.experts import Routing
from torchtune_adaptive.library.private import FakeTensorMode, TorchDispatchMode, tree_map_only
from torchtune_adaptive.library.search import CheckedBatch
from torchtune_adaptive.library.step_questions import EVEN, TRACED_MICRO_BATCHES, StepQuestion
from torchtune_adaptive.library.summed_loss import SummedLoss
from torchtune_adaptive.planner import AnyDepth, RecordedStep, StartUp, StepTracer, TracedRun, fill

_AS_WRITTEN = "compile: predicted as if nothing were compiled, which takes more (overestimates)"


class StepsOfModel:
    """The steps of one question with one ``routing`` of experts, each traced when it is asked for."""

    compiled = False
    """Whether memory is that of compiled code; it is not, whatever is compiled."""
    max_seq_len = None

    def __init__(self, question: StepQuestion, routing: str = EVEN) -> None:
        self._tracer = AnyDepth(
            lambda shorten: ModelTracer(question, shorten, routing),
            lambda tracer: tracer.take_step(TracedRun.ROWS[0]),
        )
        self._start_up = self._tracer.start_up()
        self._steps: dict[int, RecordedStep] = {}

    def start_up(self, length: int) -> StartUp:
        return self._start_up

    def step(self, rows: int, length: int) -> RecordedStep:
        if rows not in self._steps:
            where = counted(rows, "row")
            self._steps[rows] = self._tracer.step(lambda one: one.take_step(rows), where=where)
        return self._steps[rows]

    noted = step

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
        device = question.asked.device
        super().__init__(not device.caching, 0, question.ranks, before_ampere=device.before_ampere)
        self.compiles = False
        _only_wrap()
        if not self.recorder.simulated:
            _refuse_autocast()
        self._batch = CheckedBatch(question.worst_case)
        model = self._built(question.build)
        shorten(model)
        self.routing = Routing(routing, model)
        """What experts are told about the rows that they get."""
        with self.tracing():
            fill(model, self.device)
            optimizer = checks.plain_optimizer(question.optimizer(model.parameters()))
            checks.require_trainable(model, optimizer)
            forward = partial(self._forward, question.forward, model)
            step = TrainStep(
                model=model,
                objective=SummedLoss(forward, ()),
                optimizers=[optimizer],
                device=self.device,
                memory=self.memory,
                ranks=self.ranks,
                options=StepOptions(
                    clip_grad_norm=question.max_grad_norm,
                ),
            )
            self.recorder.relabel(step.buckets, self.recorder.GRADIENTS)
        kinds = TRACED_MICRO_BATCHES if step.buckets else 2  # FSDP's last is like those between
        self._accumulation = min(question.asked.micro_batches, kinds)
        if step.buckets:
            self.needs_all_layers = "buckets of gradients do not end where layers do"
        self.begin(step, [model])

    def take_step(self, rows: int) -> RecordedStep:
        made = self._batch(rows)
        return self.trace(
            lambda: tree_map_only(torch.Tensor, self.fake_mode.from_tensor, made),
            self._accumulation,
            lambda: 0,  # what is repeated is seen anyway, and which layer it is does not matter
        )

    def _built(self, build: Callable[[], nn.Module]) -> nn.Module:
        try:
            with (
                self.splitting(),
                _FakeOnDevice(self.fake_mode, self.device),
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
