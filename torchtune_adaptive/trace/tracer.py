"""The allocations of a training step, seen without a device, weights or data.

The step is the one that trains: the same ``TrainStep``, the same model, sharding, checkpointing and
optimizer. Its tensors are fake: they have shapes and storages, but no memory behind them. Whatever would
allocate or free memory is noted, with what it is for and where in the step it happens.

A tracer belongs in a process of its own (see ``imagined``).
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchtune import training

from torchtune_adaptive.device.memory import DeviceMemory, Usage, plain_tensors
from torchtune_adaptive.memory_model.steps import RecordedStep
from torchtune_adaptive.settings.kinds import is_packed
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.kinds import recipe_kind
from torchtune_adaptive.setup.model import (
    initialize_ropes,
    parameters_by_name,
)
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


class _FakeMemory(DeviceMemory):
    """The device's memory as ``TrainStep`` wants it; all that it does is be watched."""

    name = "imagined device"

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
    """Tensors made of numbers, as 8-bit optimizers make them, are otherwise made on the device itself.

    What decides that has no public setting (checked on torch 2.11, 2.13 and 2.15).
    """

    avoid_device_init = True


class FakeRanks:
    """The ranks of a run, as far as a step that nothing goes wrong in asks for them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.size = rank, ranks


class Tracer:
    """A run of a config, on one of so many ranks, that can take steps of any size.

    Args:
        cfg: the config, of either recipe.
        ranks: how many there are.
        rank: which one it is. Where parameters cannot be split evenly, the first has the largest share.
    """

    def __init__(self, cfg: DictConfig, ranks: int, rank: int = 0) -> None:
        device = torch.device("cpu") if cfg.device == "cpu" else fake_device.device()
        fake_device.init_fake_ranks(rank, ranks)
        dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
        environment = Environment(device, dtype, rank, ranks)
        self.recorder = recorder = Recorder(device)
        self._watch = Watch(recorder)
        self._fake = _Fake(allow_non_fake_inputs=True)
        offloads = cfg.get("enable_activation_offloading", False)
        self._offloading = fake_device.for_offloading if offloads else nullcontext
        self._accumulation = min(cfg.gradient_accumulation_steps, 2)  # as in a trial
        self._packed = is_packed(cfg)
        self._optimizer_state_is_there = False

        model = recipe_kind(cfg).build_without_weights(cfg, environment, self._fake)
        with self._imagining():
            # With CPU offload, parameters wait on the host, and the optimizer works there.
            fill(model, torch.device("cpu") if cfg.get("fsdp_cpu_offload", False) else device)
            _initialize_ropes(model, environment)
            self._optimizers = build_optimizers(cfg, environment, model, None)
            loss_fn = build_loss(cfg, environment, model)
            activations = training.get_act_offloading_ctx_manager(model, offloads)
            self.step = TrainStep(
                model=model,
                objective=NextTokenPrediction(loss_fn),
                optimizers=self._optimizers.steppers,
                device=device,
                memory=_FakeMemory(recorder),
                ranks=FakeRanks(rank, ranks),  # type: ignore[arg-type]
                options=StepOptions(
                    survive=False,
                    activations=activations,
                    clip_grad_norm=cfg.get("clip_grad_norm", None),
                    optimizer_in_backward=self._optimizers.in_backward,
                ),
            )
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        self.uneven = any(p.ndim and p.shape[0] % ranks for p in sharded)
        """Whether ranks hold different shares of the parameters."""
        recorder.phase = lambda: self.step.phase
        self._note_what_is_what(model)
        self.set_up = recorder.taken()

    def take_step(self, rows: int, length: int) -> RecordedStep:
        """A step of micro-batches of so many rows, each of so many tokens."""
        recorder, step = self.recorder, self.step
        gc.disable()  # or when tensors in circles are freed would depend on what was traced before
        try:
            with self._imagining():
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
            gc.freeze()  # what is left stays, and need not be walked through again
        finally:
            gc.enable()
        return recorder.taken()

    def _batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """As the collate functions make them, on the host. With packed rows torchtune's mask is dense on a
        CPU, and a few kilobytes on a GPU."""
        names = ("tokens", "labels", "input_pos") if self._packed else ("tokens", "labels")
        batch = {name: torch.empty((rows, length), dtype=torch.int64) for name in names}
        if self._packed and self.recorder.simulated:
            batch["mask"] = torch.empty((rows, length, length), dtype=torch.bool)
        return batch

    @contextmanager
    def _imagining(self) -> Iterator[None]:
        recorder, watch = self.recorder, self._watch
        compile_ = torch.compile
        resize = torch.UntypedStorage.resize_
        stock_attention = F.scaled_dot_product_attention
        current_stream = torch.accelerator.current_stream
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def seen_resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resize(storage, nbytes)
            if recorder.knows(storage):
                recorder.see(storage, "resize_", GATHERED)
            return storage

        def unseen_propagation(propagator: ShardingPropagator, schema: Any) -> Any:
            with watch.paused():  # works out shapes on tensors of the whole model's size
                return propagate(propagator, schema)

        def as_one_kernel(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            """What an 8-bit optimizer compiles for each parameter: nothing in it takes memory."""

            def run(*arguments: Any) -> Any:
                with watch.paused():
                    return function(*arguments)

            return run

        torch.compile = as_one_kernel  # type: ignore[assignment]
        torch.UntypedStorage.resize_ = seen_resize  # type: ignore[method-assign,assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen_propagation  # type: ignore
        if not recorder.simulated:
            F.scaled_dot_product_attention = attention
            torch.accelerator.current_stream = fake_device.current_stream  # type: ignore[assignment]
        try:
            with self._fake, watch, self._offloading():
                yield
        finally:
            torch.compile = compile_
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore
            F.scaled_dot_product_attention = stock_attention
            torch.accelerator.current_stream = current_stream

    def _note_what_is_what(self, model: nn.Module) -> None:
        """Tell activations from what belongs to the loss: by whether the last norm has been passed, on the
        way forward and on the way back."""
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
        """What FSDP allocates on streams of its own. Private names (checked on torch 2.11, 2.13 and 2.15)."""
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


def fill(model: nn.Module, device: torch.device) -> None:
    """Put the parameters on the device, as loading a checkpoint would."""

    def filled(parameter: torch.Tensor) -> nn.Parameter:
        trained = parameter.requires_grad
        if isinstance(parameter, DTensor):
            local = _empty(parameter._local_tensor, device)
            parameter = DTensor(local, parameter._spec, requires_grad=False)
        else:
            parameter = _empty(parameter.detach(), device)
        return nn.Parameter(parameter, requires_grad=trained)

    model.load_state_dict(
        {name: filled(value) for name, value in parameters_by_name(model).items()},
        strict=False,
        assign=True,
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _initialize_ropes(model: nn.Module, environment: Environment) -> None:
    for module in model.modules():
        if hasattr(module, "apply_scaling"):  # Llama 3.1's goes by values, which there are none of
            module.apply_scaling = lambda freqs, *_, **__: torch.empty_like(freqs)  # type: ignore
    initialize_ropes(model, environment)


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like one on the meta device; a quantised one is made of several."""
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: _empty(getattr(tensor, name), device) for name in names}
    context = dict(context)
    context["tensor_meta"] = dataclasses.replace(context["tensor_meta"], device=device)
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def _state(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if torch.is_tensor(value)]
