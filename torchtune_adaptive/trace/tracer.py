"""Records the allocations of a training step, without a device, weights or data.

The step is the one that trains: the same ``TrainStep``, the same model, sharding, checkpointing and
optimizer. Its tensors are fake: they have shapes and storages, but no memory behind them. Every allocation
and release is recorded, with what it is for and where in the step it happens.

A tracer needs its own process (see ``fake_device``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torchtune import training

from torchtune_adaptive.device.memory import DeviceMemory, Usage, plain_tensors
from torchtune_adaptive.memory_model.steps import RecordedStep
from torchtune_adaptive.settings.kinds import is_packed
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.kinds import recipe_kind
from torchtune_adaptive.setup.optimizer import build_loss, build_optimizers
from torchtune_adaptive.step.objective import NextTokenPrediction
from torchtune_adaptive.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.trace import fake_device
from torchtune_adaptive.trace.kernels import attention
from torchtune_adaptive.trace.recorder import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    INPUTS,
    LOSS,
    OPTIMIZER,
    STEPPING,
    Recorder,
    Watch,
)
from torchtune_adaptive.trace.weights import fill, initialize_fake_ropes


class _FakeMemory(DeviceMemory):
    """The device's memory as ``TrainStep`` needs it: what the recorder has counted."""

    name = "fake device"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def capacity(self) -> int:
        return 1 << 62

    def capped(self, limit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self) -> None:
        self._recorder.peak = self._recorder.in_use

    def usage(self) -> Usage:
        return Usage(self._recorder.peak, self._recorder.peak, 0)

    def retries(self) -> int:
        return 0

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
            for plain in plain_tensors(tensor):
                if plain.device.type == self._recorder.device.type:
                    self._recorder.see(plain.untyped_storage(), "")


class _Fake(FakeTensorMode):
    """Without this attribute, tensors made of Python numbers would be created on the device itself, as 8-bit
    optimizers do. It has no public setting (checked on torch 2.11, 2.13 and 2.15).
    """

    avoid_device_init = True


class FakeRanks:
    """The ranks of a run, as far as a step that succeeds needs them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = rank, ranks


class Tracer:
    """One rank of a run, which can take steps of any size.

    Args:
        cfg: the config, for any of the recipes.
        ranks: how many there are.
        rank: which of them this is. If parameters do not divide evenly, the first has the largest share.
    """

    def __init__(self, cfg: DictConfig, ranks: int, rank: int = 0) -> None:
        device = torch.device("cpu") if cfg.device == "cpu" else fake_device.device()
        fake_device.init_fake_ranks(rank, ranks)
        dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
        environment = Environment(device, dtype, rank, ranks)
        self.recorder = recorder = Recorder(device)
        self._watch = Watch(recorder)
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._offloads = cfg.get("enable_activation_offloading", False)
        self._offloading = fake_device.for_offloading if self._offloads else nullcontext
        self._accumulation = min(cfg.gradient_accumulation_steps, 2)  # as in a trial
        self._packed = is_packed(cfg)
        self._optimizer_state_is_there = False

        model = recipe_kind(cfg).build_without_weights(cfg, environment, self._fake)
        with self._tracing():
            # With CPU offload, parameters wait on the host, and the optimizer works there.
            fill(model, torch.device("cpu") if cfg.get("fsdp_cpu_offload", False) else device)
            initialize_fake_ropes(model, environment)
            self._optimizers = build_optimizers(cfg, environment, model, None)
            self.step = self._new_step(cfg, environment, model)
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        self.uneven = any(p.ndim and p.shape[0] % ranks for p in sharded)
        """Whether ranks hold different shares of the parameters."""
        recorder.phase = lambda: self.step.phase
        self._follow_categories(model)
        self.set_up = recorder.take_events()

    def _new_step(self, cfg: DictConfig, environment: Environment, model: nn.Module) -> TrainStep:
        ranks = FakeRanks(environment.rank, environment.ranks)
        return TrainStep(
            model=model,
            optimizers=self._optimizers.steppers,
            objective=NextTokenPrediction(build_loss(cfg, environment, model)),
            device=environment.device,
            memory=_FakeMemory(self.recorder),
            ranks=ranks,  # type: ignore[arg-type]
            options=StepOptions(
                survive=False,
                activations=training.get_act_offloading_ctx_manager(model, self._offloads),
                clip_grad_norm=cfg.get("clip_grad_norm", None),
                optimizer_in_backward=self._optimizers.in_backward,
            ),
        )

    def take_step(self, rows: int, length: int) -> RecordedStep:
        """The step at a size: ``rows`` in each micro-batch, each with ``length`` tokens."""
        recorder, step = self.recorder, self.step
        gc.disable()  # or when reference cycles are freed would depend on earlier traces
        try:
            with self._tracing():
                batch = self._batch(rows, length)
                recorder.peak = recorder.in_use
                for _ in range(self._accumulation):
                    recorder.category = INPUTS
                    step.forward_backward(batch)
                parameters = list(step.model.parameters())
                recorder.relabel((p.grad for p in parameters if p.grad is not None), GRADIENTS)
                recorder.category = STEPPING
                step.apply()
                if not self._optimizer_state_is_there:
                    recorder.relabel(_state(self._optimizers.steppers), OPTIMIZER)
                    self._optimizer_state_is_there = True
                del batch
            gc.collect()
            gc.freeze()  # what is left stays, so later collections can skip it
        finally:
            gc.enable()
        return recorder.take_events()

    def _batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """A batch on the host, like those of the collate functions. For packed rows torchtune's mask is dense
        on a CPU, and a few kilobytes on a GPU."""
        names = ("tokens", "labels", "input_pos") if self._packed else ("tokens", "labels")
        batch = {name: torch.empty((rows, length), dtype=torch.int64) for name in names}
        if self._packed and self.recorder.simulated:
            batch["mask"] = torch.empty((rows, length, length), dtype=torch.bool)
        return batch

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with ExitStack() as undo:
            for owner, name, replacement in self._replacements():
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            with self._fake, self._watch, self._offloading():
                yield

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """What is replaced in torch while tracing: owner, name, replacement. Partly private (checked on torch
        2.11, 2.13 and 2.15)."""
        recorder, watch = self.recorder, self._watch
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def seen_resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resize(storage, nbytes)
            if recorder.knows(storage):
                recorder.see(storage, "resize_", GATHERED)
            return storage

        def unseen_propagation(propagator: ShardingPropagator, schema: Any) -> Any:
            with watch.paused():  # computes shapes on tensors of the whole model's size
                return propagate(propagator, schema)

        def as_one_kernel(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            """What an 8-bit optimizer compiles for each parameter: nothing in it takes memory."""

            def run(*arguments: Any) -> Any:
                with watch.paused():
                    return function(*arguments)

            return run

        replacements = [
            (torch, "compile", as_one_kernel),
            (torch.UntypedStorage, "resize_", seen_resize),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen_propagation),
        ]
        if not recorder.simulated:
            replacements += [
                (F, "scaled_dot_product_attention", attention),
                (torch.accelerator, "current_stream", fake_device.current_stream),
            ]
        return replacements

    def _follow_categories(self, model: nn.Module) -> None:
        """Distinguish activations from what belongs to the loss, which begins after the last norm."""
        recorder = self.recorder

        def enters(category: str) -> Callable[..., None]:
            def hook(*_: object) -> None:
                recorder.category = category

            return hook

        def passed_norm(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            recorder.category = LOSS
            if output.requires_grad:
                output.register_hook(enters(ACTIVATIONS))

        model.register_forward_pre_hook(enters(ACTIVATIONS))
        if isinstance(norm := getattr(model, "norm", None), nn.Module):
            norm.register_forward_hook(passed_norm)

    def stream_categories(self) -> dict[int, str]:
        """What FSDP allocates on its own streams. Private names (checked on torch 2.11, 2.13 and 2.15)."""
        model = self.step.model
        if not isinstance(model, FSDPModule):
            return {}
        streams = model._get_fsdp_state()._comm_ctx
        named = {
            "all_gather_copy_in_stream": GATHERED,
            "all_gather_stream": GATHERED,
            "reduce_scatter_stream": GRADIENTS,
            "all_reduce_stream": GRADIENTS,
        }
        found = {name: getattr(streams, name, None) for name in named}
        return {
            stream.number: named[name]
            for name, stream in found.items()
            if isinstance(stream, fake_device.FakeStream)
        }


def _state(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if torch.is_tensor(value)]
