"""A program on one rank of several: each collective has a result of the right shape, and nobody to wait for.

The other ranks are taken to do the same with rows that are as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.planner.private import FakeTensor
from torchtune_adaptive.planner.programs import notes
from torchtune_adaptive.planner.programs.imports import put
from torchtune_adaptive.planner.programs.known import note, values_of
from torchtune_adaptive.planner.programs.private import in_buckets, when_backward_ends
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder

_FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of ``DistributedDataParallel``, as its documentation has it."""


def follow(ranks: int, recorder: Recorder) -> None:
    """Let the program be the first of so many ranks from now on, as a launcher says so."""
    if dist.is_initialized():  # by what traces
        dist.destroy_process_group()
    if ranks > 1:
        os.environ.update(_environment(ranks))

    def joined(*_: Any, **__: Any) -> None:
        fake_device.init_fake_ranks(0, number())

    meshes: Any = dist.device_mesh  # one of which may join by itself
    for owner in (dist, dist.distributed_c10d, meshes):
        put(owner, "init_process_group", joined)
    put(dist, "destroy_process_group", lambda *_: None)
    put(dist, "get_backend", lambda *_: "nccl")
    put(dist, "is_nccl_available", lambda: True)
    put(dist, "barrier", lambda *_, **__: None)
    put(dist, "monitored_barrier", lambda *_, **__: None)
    put(dist, "broadcast_object_list", lambda *_, **__: None)
    put(dist, "all_gather_object", _gathered)
    put(dist, "gather_object", lambda one, found=None, *_, **__: _gathered(found or [], one))
    put(dist, "all_reduce", _reducing(dist.all_reduce))
    put(dist, "gather", _gathering_first(dist.gather))
    put(dist, "all_gather", _gathering(dist.all_gather))
    put(dist, "all_gather_into_tensor", _gathering(dist.all_gather_into_tensor))
    put(dist, "new_group", partial(_new_group, dist.new_group))
    for owner, name in (
        (DeviceMesh, "__init__"),
        (dist, "init_device_mesh"),
        (dist.device_mesh, "init_device_mesh"),
    ):
        put(owner, name, _of_kind(getattr(owner, name)))
    for name in ("__init__", "forward", "no_sync"):
        put(DistributedDataParallel, name, getattr(_Replicated, name))
    _Replicated.recorder = recorder
    flat = FullyShardedDataParallel
    put(flat, "__init__", _sharded_flat(flat.__init__))


def number() -> int:
    """The number of ranks, as a launcher has said."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _sharded_flat(begin: Callable[..., None]) -> Callable[..., None]:
    """What begins ``FullyShardedDataParallel``, and says what it does that is not planned."""

    def begun(*arguments: Any, **options: Any) -> None:
        notes.note(
            "FullyShardedDataParallel: planned as if memory could be used again once it is released; a run "
            "may hold it until another stream is done, and take more (fully_shard does not)"
        )
        if options.get("device_id") is not None:
            options["device_id"] = fake_device.device()
        begin(*arguments, **options)

    return begun


def _environment(ranks: int) -> dict[str, str]:
    first = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    number = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return {**first, **number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _of_kind(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a mesh for a kind of device, for the fake one where that is ``cuda``."""

    def made(*given: Any, **options: Any) -> Any:
        given = tuple(_kind(one) for one in given)
        return make(*given, **{name: _kind(one) for name, one in options.items()})

    return made


def _kind(value: Any) -> Any:
    return fake_device.NAME if type(value) is str and value == "cuda" else value


def _gathered(found: list[Any], one: Any, *_: Any, **__: Any) -> None:
    found[:] = [one] * len(found)


def _reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        values = values_of(tensor)
        done = reduce(tensor, op, group, *more, **named)
        if values is not None:
            _set(tensor, values * dist.get_world_size(group) if op == dist.ReduceOp.SUM else values)
        return done

    return reduced


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(found: Any, tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        values = values_of(tensor)
        done = gather(found, tensor, *more, **named)
        if values is None:
            return done
        for one in found if isinstance(found, list) else [found]:
            _set(
                one,
                values.expand(one.numel() // max(1, values.numel()), *values.shape).reshape(
                    one.shape
                ),
            )
        return done

    return gathered


def _gathering_first(gather: Callable[..., Any]) -> Callable[..., Any]:
    """What gathers on the first rank, where the program is."""
    gathered = _gathering(
        lambda found, tensor, *more, **named: gather(tensor, found, *more, **named)
    )

    def gathered_first(
        tensor: torch.Tensor, gather_list: Any = None, *more: Any, **named: Any
    ) -> Any:
        return gathered(gather_list, tensor, *more, **named)

    return gathered_first


def _set(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a tensor have these values, which follow from data."""
    if type(tensor) is FakeTensor:
        note(tensor, values)
    else:
        tensor.copy_(values)


def _new_group(make: Callable[..., Any], ranks: Any = None, *_: Any, **options: Any) -> Any:
    """A group of these ranks, whatever its backend."""
    described = options.get("group_desc")
    return make(ranks, group_desc=described)


class _Replicated:
    """The methods of ``DistributedDataParallel`` without its part in C++, which cannot hold fake tensors.

    Gradients are copied to buckets, which are summed over the ranks once they are full, and copied back.
    """

    recorder: Recorder

    def __init__(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, process_group or dist.group.WORLD
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.broadcast_buffers, self.require_backward_grad_sync = broadcast_buffers, True
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.device = next(module.parameters()).device
        parameters = [one for one in module.parameters() if one.requires_grad][::-1]
        cap = int((bucket_cap_mb or 25) * (1 << 20))
        self.buckets = [
            _Bucket([parameters[place] for place in places], gradient_as_bucket_view)
            for places in in_buckets(parameters, [_FIRST_BUCKET, cap])
        ]
        for bucket in self.buckets:
            bucket.follow(self)
        tensors = [bucket.memory for bucket in self.buckets]
        _Replicated.recorder.relabel(tensors, Recorder.GRADIENTS)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.broadcast_buffers and self.require_backward_grad_sync:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0, group=self.process_group)
        return self.module(*arguments, **options)

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


class _Bucket:
    """Memory for the gradients of some parameters, in which they are summed over the ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], views: bool) -> None:
        self._parameters, self._views = parameters, views
        total = sum(parameter.numel() for parameter in parameters)
        self.memory = torch.zeros(
            total, dtype=parameters[0].dtype, device=parameters[0].device, requires_grad=False
        )
        self._parts: list[torch.Tensor] = []
        begin = 0
        for parameter in parameters:
            size, stride = parameter.size(), parameter.stride()
            self._parts.append(self.memory.as_strided(size, stride, begin))
            begin += parameter.numel()
        self._missing = {*range(len(parameters))}

    def follow(self, model: Any) -> None:
        """Sum the gradients of the model's parameters as they come."""
        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._came, model, place))

    @torch.no_grad()
    def _came(self, model: Any, place: int, parameter: torch.Tensor) -> None:
        if not model.require_backward_grad_sync:
            return
        assert parameter.grad is not None
        part = self._parts[place]
        if parameter.grad is not part:
            part.copy_(parameter.grad)
            if self._views:
                parameter.grad = part
        self._missing.discard(place)
        if self._missing:
            return
        self._missing = {*range(len(self._parameters))}
        work = dist.all_reduce(self.memory, group=model.process_group, async_op=True)
        when_backward_ends(partial(self._summed, work))

    @torch.no_grad()
    def _summed(self, work: Any) -> None:
        work.wait()
        for one, its in zip(self._parameters, self._parts, strict=True):
            if one.grad is not its and one.grad is not None:
                one.grad.copy_(its)
