"""The allocations of a training step, seen without a device, weights or data.

The step is the one that trains: the same ``TrainStep``, the same model, sharding, checkpointing and
optimizer. Its tensors are fake: they have shapes and storages, but no memory behind them. Whatever would
allocate or free memory is noted, with what it is for and where in the step it happens.

A tracer belongs in a process of its own (see ``imagined``).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torchtune import training

from torchtune_adaptive import build, imagined
from torchtune_adaptive.forecast import Event, Label, Step
from torchtune_adaptive.memory import DeviceMemory, Usage, allocates, plain_tensors
from torchtune_adaptive.step import TrainStep

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_RECORD_STREAM = _aten.record_stream.default
_SCALAR = _aten._local_scalar_dense.default

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
        self.events: list[Event] = []
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

    def _give(self, nbytes: int, operation: str, category: str) -> int:
        if not nbytes:
            return 0
        self._given += 1
        self.events.append(Event(self._given, nbytes, imagined.current_stream().number))
        self.labels[self._given] = Label(category or self.category, self.phase(), operation)
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        return self._given

    def _take_back(self, block: int, nbytes: int) -> None:
        if block:
            self.events.append(Event(block, -1, 0))
            self.in_use -= nbytes

    def _gone(self, key: int, _: object) -> None:
        _reference, block, nbytes = self._blocks.pop(key)
        self._take_back(block, nbytes)


class _Watch(TorchDispatchMode):
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
        if func in _WORKSPACES:
            recorder.workspace(_WORKSPACES[func](*args), name)
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


def _flash_backward(_grad: Any, query: torch.Tensor, *_: Any) -> list[int]:
    """Flash attention's gradient of the queries in fp32, and its row sums."""
    batch, heads, length, dim = query.shape
    length = -(-length // 128) * 128
    unit = 32 if dim <= 128 else 64
    return [batch * length * heads * (-(-dim // unit) * unit) * 4, batch * heads * length * 4]


_WORKSPACES: dict[Any, Callable[..., list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}


def _attention(  # type: ignore[no-untyped-def]
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """What scaled_dot_product_attention runs on CUDA; on other devices it would take another kernel."""
    if attn_mask is None and query.dtype != torch.float32:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


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


class _OneOfMany:
    """The ranks of a run, as far as a step that nothing goes wrong in asks for them."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.size = 0, ranks


class Tracer:
    """A run of a config, on the first of so many ranks, that can take steps of any size.

    Args:
        cfg: the config, of either recipe.
        ranks: how many there are. The first has the largest share where parameters cannot be split evenly.
    """

    def __init__(self, cfg: DictConfig, ranks: int) -> None:
        device = torch.device("cpu") if cfg.device == "cpu" else imagined.device()
        imagined.join(0, ranks)
        dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
        environment = build.Environment(device, dtype, 0, ranks)
        self.recorder = recorder = Recorder(device)
        self._watch = _Watch(recorder)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        offloads = cfg.get("enable_activation_offloading", False)
        self._offloading = imagined.for_offloading if offloads else nullcontext
        self._accumulation = min(cfg.gradient_accumulation_steps, 2)  # as in a trial
        self._packed = bool(cfg.get("dataset", {}).get("packed", False))
        self._optimizer_state_is_there = False

        lora = "lora_attn_modules" in cfg.model
        if lora:
            model = build.lora_model_without_weights(cfg, environment, self._fake)
        else:
            model, _ = build.full_model_without_weights(cfg, environment, self._fake)
        with self._imagining():
            _fill(model, device)
            _initialize_ropes(model, environment)
            self._optimizers = build.optimizers(cfg, environment, model, None)
            loss_fn = build.loss(cfg, environment, model)
            activations = training.get_act_offloading_ctx_manager(model, offloads)
            self.step = TrainStep(
                model=model,
                optimizers=self._optimizers.steppers,
                loss_fn=loss_fn,
                device=device,
                memory=_FakeMemory(recorder),
                ranks=_OneOfMany(ranks),  # type: ignore[arg-type]
                survive=False,
                activations=activations,
                clip_grad_norm=cfg.get("clip_grad_norm", None),
                optimizer_in_backward=self._optimizers.in_backward,
            )
        recorder.phase = lambda: self.step.phase
        self._note_what_is_what(model)
        self.set_up = self._taken()

    def take_step(self, rows: int, length: int) -> Step:
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
        return self._taken()

    def _taken(self) -> Step:
        recorder = self.recorder
        taken = Step(recorder.events, recorder.labels)
        recorder.events, recorder.labels = [], {}
        return taken

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
        resize = torch.UntypedStorage.resize_
        attention = F.scaled_dot_product_attention
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

        torch.UntypedStorage.resize_ = seen_resize  # type: ignore[method-assign,assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen_propagation  # type: ignore
        if not recorder.simulated:
            F.scaled_dot_product_attention = _attention
            torch.accelerator.current_stream = imagined.current_stream  # type: ignore[assignment]
        try:
            with self._fake, watch, self._offloading():
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore
            F.scaled_dot_product_attention = attention
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
            if isinstance(stream, imagined.Stream)
        }


def _fill(model: nn.Module, device: torch.device) -> None:
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
        {name: filled(parameter) for name, parameter in model.state_dict(keep_vars=True).items()},
        strict=False,
        assign=True,
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _initialize_ropes(model: nn.Module, environment: build.Environment) -> None:
    for module in model.modules():
        if hasattr(module, "apply_scaling"):  # Llama 3.1's goes by values, which there are none of
            module.apply_scaling = lambda freqs, *_, **__: torch.empty_like(freqs)  # type: ignore
    build.initialize_ropes(model, environment)


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
